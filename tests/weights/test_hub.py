"""Models of the hub: from a name to a folder, offline too. No test reaches a network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from tests.helpers import commands
from tests.helpers.commands import use_hub_cache
from tests.helpers.loras import make_lora
from tests.helpers.models import make_llama
from treespec import LLM
from treespec.errors import CheckpointError, ModelError
from treespec.startup.options import local_folder, resolve_model
from treespec_weights import HubError, OptionError, fetch, is_hub_id
from treespec_weights.hub import ALLOWED, IGNORED

pytestmark = pytest.mark.slow

Snapshot = Callable[..., str]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Snapshot], list[dict[str, Any]]]:
    """Puts something in the place of the download; returns the calls."""

    def place(answer: Snapshot) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def snapshot_download(repo_id: str, **options: Any) -> str:
            calls.append({"repo_id": repo_id} | options)
            return answer(repo_id, **options)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return calls

    return place


def raising(error: Exception) -> Snapshot:
    def answer(*_: Any, **__: Any) -> str:
        raise error

    return answer


def http_error(kind: type[Exception], message: str) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    return error


def run(*arguments: object, code: int = 0) -> Any:
    return commands.run("weights", "fetch", *arguments, "--json", code=code).document


def test_names() -> None:
    assert all(map(is_hub_id, ("gpt2", "owner/model", "Owner-1/Model.v0_2")))
    for name in ("", "a/b/c", "../x", "/x", "a/../b", "a b/c", "a/b\n", "x" * 97, "-a/b", "a--b/c"):
        assert not is_hub_id(name)
        with pytest.raises(OptionError, match="owner/model"):
            fetch(name)


def test_fetch(tmp_path: Path, hub: Any) -> None:
    folder = make_llama(tmp_path / "model", 0)
    calls = hub(lambda *_, **__: str(folder))
    assert run("owner/model", "--revision=v1") == {"hub_id": "owner/model", "revision": "v1", "folder": str(folder)}
    assert run("owner/model", f"--to={tmp_path / 'to'}")["folder"] == str(folder)
    assert calls[0]["revision"] == "v1" and "local_dir" not in calls[0]
    assert calls[1]["revision"] is None and calls[1]["local_dir"] == str(tmp_path / "to")
    assert commands.run("weights", "fetch", "owner/model").stdout == f"{folder}\n"
    assert resolve_model("owner/model") == folder and calls[-1]["repo_id"] == "owner/model"
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        fetch("owner/model")
    path.unlink()
    with pytest.raises(HubError, match=r"no complete safetensors \(pickles and GGUF files are not fetched\)"):
        fetch("owner/model")


def test_adapters(tmp_path: Path, hub: Any) -> None:
    lora = make_lora(tmp_path / "lora", make_llama(tmp_path / "model", 0), 1)
    hub(lambda *_, **__: str(lora))
    assert local_folder("owner/lora") == lora


def test_no_pickle_and_no_code_is_asked_for() -> None:
    wanted = "config.json model-00001-of-00002.safetensors tokenizer.json tokenizer.model merges.txt LICENSE".split()
    wanted += "generation_config.json model.safetensors.index.json chat_template.jinja".split()
    others = "pytorch_model.bin model.pt x.pkl modeling.py model.gguf sub/model.safetensors .gitattributes".split()
    others += "original/consolidated.00.pth original/params.json consolidated.safetensors onnx/model.onnx".split()
    kept = filter_repo_objects(wanted + others, allow_patterns=list(ALLOWED), ignore_patterns=list(IGNORED))
    assert list(kept) == wanted


def test_what_the_hub_does_not_give(tmp_path: Path, hub: Any) -> None:
    for error, parts in (
        (http_error(RepositoryNotFoundError, "404 Client Error"), ["'owner/model' at 'v1'", "404", "check the name"]),
        (http_error(GatedRepoError, "403 gated"), ["403 gated", "HF_TOKEN"]),
        (LocalEntryNotFoundError("nothing"), ["'owner/model' at 'v1' is not in the cache", "cannot be reached"]),
        (OSError(28, "No space left on device"), ["No space left on device"]),
        (http_error(HfHubHTTPError.__bases__[0], "403 of the proxy"), ["403 of the proxy"]),
        (RuntimeError("Could not determine home directory."), ["home directory"]),
    ):
        hub(raising(error))
        reported = run("owner/model", "--revision=v1", code=2)["error"]
        assert reported["type"] == "HubError"
        for part in [*parts, "local folder with config.json"]:
            assert part in reported["message"]
        with pytest.raises(ModelError, match=r"'owner/model' is no folder here, and .*local folder"):
            resolve_model("owner/model")


def test_folders_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Any) -> None:
    calls = hub(raising(AssertionError("the hub was asked")))
    (tmp_path / "owner" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("owner/model", "nowhere", "./owner/other", "../owner/other", str(tmp_path / "x" / "y")):
        assert resolve_model(name) == Path(name)
    assert not calls


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub_cache(tmp_path, monkeypatch, HF_HUB_OFFLINE=True)
    message = "(?s)'owner/model' is no folder here.*not in the cache.*HF_HUB_OFFLINE is set.*weights fetch"
    with pytest.raises(ModelError, match=message):
        LLM("owner/model")
    repository = tmp_path / "models--owner--model"
    snapshot = make_llama(repository / "snapshots" / "0123abcd", 0)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    assert run("owner/model")["folder"] == str(snapshot)
