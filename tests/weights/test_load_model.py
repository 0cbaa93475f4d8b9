"""What `inspect` and `verify` report of a checkpoint, what they find, and how they exit."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.helpers import commands
from tests.helpers.families import CASES, make_model
from tests.helpers.models import edit_config, make_llama
from tests.helpers.tokenizers_made import letters, save_tokenizer
from treespec_weights import compare_draft, inspect_checkpoint, verify_checkpoint

Q = "model.layers.1.self_attn.q_proj.weight"


def tokenizer_json(size: int) -> dict[str, Any]:
    vocab = {f"t{id}": id for id in range(size - 1)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return {"model": model, "added_tokens": [{"id": size - 1, "content": "<e>"}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small tied Llama in bfloat16, one file, with a tokenizer."""
    return save_llama(tmp_path / "target", hidden_size=24)


def save_llama(folder: Path, hidden_size: int, vocab_size: int = 40, **options: Any) -> Path:
    sizes = {"intermediate_size": 32, "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": True}
    make_llama(folder, 0, torch.bfloat16, hidden_size=hidden_size, vocab_size=vocab_size, **sizes, **options)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(vocab_size)))
    return folder


def run(*arguments: object, code: int = 0) -> str:
    return commands.run("weights", *arguments, code=code).stdout


def edit(folder: Path, tensors: dict[str, torch.Tensor | None]) -> None:
    """Replaces (or, with None, drops) tensors of a single-file checkpoint."""
    path = folder / "model.safetensors"
    stored = {name: tensor.clone() for name, tensor in load_file(path).items()} | tensors
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, path)


@pytest.mark.parametrize("shard_size", ["1GB", "4KB"])
def test_inspect_json(tmp_path: Path, shard_size: str) -> None:
    folder = save_llama(tmp_path / "target", hidden_size=24, max_shard_size=shard_size)
    report = json.loads(run("inspect", folder, "--json"))
    count = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).num_parameters()
    assert (report["family"], report["architectures"], report["supported"]) == ("llama", ["LlamaForCausalLM"], True)
    assert (report["parameters"], report["bytes"], report["problems"]) == (count, 2 * count, 0)
    assert report["dtypes"] == {"BF16": {"tensors": 20, "values": count, "bytes": 2 * count}}
    assert (report["shape"]["head_dim"], report["shape"]["tied"], report["context"]) == (8, True, 128)
    kv = 2 * 2 * 2 * 8
    assert report["memory"] == {
        dtype: {"weights_bytes": size * count, "kv_bytes_per_token": size * kv}
        for dtype, size in (("float32", 4), ("bfloat16", 2), ("float16", 2))
    }
    rows = {row["name"]: row for row in report["tensors"]}
    row = rows["model.layers.{i}.self_attn.q_proj.weight"]
    assert (row["count"], row["shape"], row["dtype"], row["bytes"]) == (2, [32, 24], "BF16", 32 * 24 * 2)
    assert (report["vocabulary"]["tokens"], report["vocabulary"]["max_id"]) == (40, 39)
    assert (list(report["files"]) == ["model.safetensors"]) == (shard_size == "1GB") and verify_checkpoint(folder).ok
    assert report["drafts"] == []


def test_inspect_text(folder: Path, tmp_path: Path) -> None:
    text = run("inspect", folder, "--draft", save_llama(tmp_path / "draft", hidden_size=16))
    assert text.splitlines()[0] == str(folder) and all(line == line.rstrip() for line in text.splitlines())
    for part in ("llama (Llama", "KV per token", "KV at 128", "self_attn.q_proj.weight", "32 x 24", "usable"):
        assert part in text
    edit(folder, {Q: None, "\x1b[31mred": torch.ones(1)})
    assert inspect_checkpoint(folder)["problems"] == 2
    text = run("inspect", folder)
    assert "`verify` lists them" in text
    assert "\x1b" not in text + run("verify", folder, code=1), "names can steer the terminal"


@pytest.mark.parametrize(
    ("family", "described"),
    [
        ("qwen3_5", "2 of 3 layers are Gated DeltaNets, with states of 7.5 KiB per request"),
        ("granite_hybrid", "2 of 3 layers are Mamba 2, with states of 9.0 KiB per request"),
        ("lfm2", "2 of 3 layers are gated convolutions"),
        ("falcon_h1", "3 of 3 layers have attention beside Mamba 2, with states of 13.5 KiB per request"),
    ],
)
def test_inspect_describes_recurrent_layers(family: str, described: str, tmp_path: Path) -> None:
    assert described in run("inspect", make_model(tmp_path / family, CASES[family], 0))


def test_what_a_draft_shares(folder: Path, tmp_path: Path) -> None:
    target, path = inspect_checkpoint(folder), save_llama(tmp_path / "draft", hidden_size=16)
    draft = compare_draft(target, inspect_checkpoint(path))
    assert draft["usable"] and draft["same_vocabulary"] and draft["same_vocab_size"]
    assert draft["same_hidden_size"] is False
    assert 0 < draft["cost_ratio"] < 1
    tokenizer = tokenizer_json(40)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer, indent=4))
    assert compare_draft(target, inspect_checkpoint(path))["same_vocabulary"] is True
    tokenizer["model"]["vocab"] |= {"t1": 2, "t2": 1}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    shared = compare_draft(target, inspect_checkpoint(path))
    assert (shared["usable"], shared["same_vocabulary"], shared["connection"]) == (False, False, None)
    assert "a tokenizer cannot be read" in shared["reason"] and "tokenizers library" in shared["reason"]
    (path / "tokenizer.json").unlink()
    shared = compare_draft(target, inspect_checkpoint(path))
    assert (shared["usable"], shared["same_vocabulary"]) == (True, None)
    assert "usable, if the tokenizers are the same" in run("inspect", folder, "--draft", path)


def test_how_drafts_of_other_vocabularies_would_guess(tmp_path: Path) -> None:
    """The verdicts are those of the engine: padded, translated, by text, or not at all."""
    target = save_llama(tmp_path / "target", 16, 8)
    save_tokenizer(target, letters("abcdefgh"))
    cases = {
        "padded": (16, "abcdefgh", "usable: padded"),
        "translated": (8, "hgfedcba", "usable: translated (TLI, 100% of tokens)"),
        "text": (6, "uvwxyz", "usable: by text (0% of tokens are the target's)"),
    }
    report = inspect_checkpoint(target)
    for name, (size, tokens, verdict) in cases.items():
        draft = save_llama(tmp_path / name, 16, size)
        save_tokenizer(draft, letters(tokens))
        shared = compare_draft(report, inspect_checkpoint(draft))
        assert shared["usable"] and shared["reason"] is None and f"usable: {shared['connection']}" == verdict
        assert verdict in run("inspect", target, "--draft", draft)
    bare = save_llama(tmp_path / "bare", 16, 5000)
    (bare / "tokenizer.json").unlink()
    shared = compare_draft(report, inspect_checkpoint(bare))
    assert not shared["usable"] and shared["connection"] is None
    assert shared["reason"].startswith("vocab_size differs: 5,000, the target's is 8; ")


def test_inspect_of_an_unsupported_family_shows_what_it_can(tmp_path: Path, folder: Path) -> None:
    model = BloomForCausalLM(BloomConfig(n_layer=1, hidden_size=16, n_head=2, vocab_size=40))
    model.save_pretrained(tmp_path / "bloom")
    report = inspect_checkpoint(tmp_path / "bloom")
    assert (report["family"], report["supported"], report["shape"]) == ("bloom", False, None)
    assert "supported: llama" in report["unsupported_because"]
    assert report["memory"]["float32"]["kv_bytes_per_token"] is None
    assert "unsupported" in run("inspect", tmp_path / "bloom", "--draft", folder)
    assert "'bloom' is not supported" in run("verify", tmp_path / "bloom", code=1)


@pytest.mark.parametrize("key", ["dtype", "hidden_act", "sliding_window", "max_position_embeddings", "architectures"])
def test_values_that_are_no_json_stay_out_of_the_report(folder: Path, key: str) -> None:
    """Python's parser reads NaN, which others refuse."""
    edit_config(folder, model_type="mistral", **{key: math.nan})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    json.loads(run("inspect", folder, "--json"), parse_constant=refuse)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_verify_finds_a_single_value_wherever_it_stands(tmp_path: Path, dtype: torch.dtype, value: str) -> None:
    tensors = {"empty": torch.zeros(0, 3, dtype=dtype)}
    for place in (0, 1, 63, 64, 98, 99, 100, 164, 199, 200, 205, 206):
        values = torch.randn(9, 23)
        values.view(-1)[place] = float(value)
        tensors[str(place)] = values.to(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    problems = [problem for problem in verify_checkpoint(tmp_path, chunk=100).problems if problem.kind == "value"]
    found = {problem.where: problem.message.split("the first at ")[1] for problem in problems}
    assert found == {repr(t): str([int(t) // 23, int(t) % 23]) for t in tensors if t != "empty"}


def test_verify_lists_everything_at_once(folder: Path) -> None:
    bad = torch.full((32, 23), float("nan"))
    edit(folder, {Q: bad, "model.norm.weight": None, "x": torch.ones(1, dtype=torch.int8)})
    edit_config(folder, eos_token_id=[1, 40])
    (folder / "generation_config.json").write_text('{"eos_token_id": -1}')
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(44)))
    report = json.loads(run("verify", folder, "--json", code=1))
    assert report["ok"] is False
    found = {(problem["kind"], problem["where"]) for problem in report["problems"]}
    assert found == {
        ("shape", repr(Q)),
        ("missing", "'model.norm.weight'"),
        ("unexpected", "'x'"),
        ("value", repr(Q)),
        ("config", "'eos_token_id' of 'config.json'"),
        ("config", "'eos_token_id' of 'generation_config.json'"),
        ("tokenizer", "'tokenizer.json'"),
    }
    text = run("verify", folder, code=1)
    assert "its largest token id is 43, but vocab_size is 40" in text
    assert text.splitlines()[-1] == "7 problems"


def test_verify_reports_files_and_config_together(folder: Path) -> None:
    report = json.loads(run("verify", folder, "--json"))
    assert report["ok"] is True and report["problems"] == []
    assert [check["name"] for check in report["checks"]] == ["files", "config", "tokenizer", "tensors", "values"]
    assert run("verify", folder).splitlines()[-1] == "no problems"
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    edit_config(folder, hidden_size=-4)
    report = json.loads(run("verify", folder, "--json", code=1))
    assert {problem["where"] for problem in report["problems"]} == {"'model.safetensors'", "'hidden_size'"}
    assert [check["done"] for check in report["checks"]] == [True, True, False, False, False]


def test_vocabulary_of_sentencepiece_and_unigram_files(folder: Path) -> None:
    unigram = {"model": {"type": "Unigram", "vocab": [[f"t{id}", -1.0] for id in range(40)]}}
    (folder / "tokenizer.json").write_text(json.dumps(unigram))
    assert inspect_checkpoint(folder)["vocabulary"]["tokens"] == 40
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"pieces")
    assert inspect_checkpoint(folder)["vocabulary"]["tokens"] is None
    assert "SentencePiece" in run("verify", folder)


@pytest.mark.slow
def test_the_script_runs_by_itself(folder: Path) -> None:
    done = commands.program("weights/load_model.py", "verify", str(folder), "--json", PYTHONPATH=None)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ok"] is True
