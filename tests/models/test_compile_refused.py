"""compile=True where it cannot be had: an error that says why; "auto": a word in the log. These run without a compiler,
too."""

import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.calls import failing
from tests.helpers.models import make_llama, new_folder, quick_start, tiny
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec import LLM
from treespec.errors import ConfigError, ExactnessError, KernelError
from treespec.models.decoder import Decoder
from treespec.startup.selftest import differing_rows
from treespec_kernels.cpu.cpu_library import compile_library, find_compiler


@pytest.fixture(autouse=True)
def nothing_is_measured() -> Iterator[None]:
    with quick_start(differing_rows):
        yield


def small_llm(model: Path, **options: Any) -> LLM:
    return LLM(model, **({"device": "cpu", "max_num_seqs": 1, "max_model_len": 64} | options))


def is_compiled(model: Path, **options: Any) -> bool:
    llm = small_llm(model, **options)
    assert llm.stats()["frozen"]["compile"] is (llm.engine.runner.target.linear == "compiled")
    return bool(llm.stats()["frozen"]["compile"])


@needs_compiler
def test_auto_compiles_where_it_can() -> None:
    assert is_compiled(tiny()[0])
    assert not is_compiled(tiny()[0], compile=False)


@pytest.mark.parametrize(
    "options, compiler, why",
    [
        ({"attention": "cpu-packed"}, None, "attention='cpu-packed'"),
        ({"linear": "torch"}, None, "linear='torch'"),
        ({"dtype": "float16", "exact": False}, None, "float16"),
        ({"backend": "transformers"}, None, "transformers' code"),
        ({}, "no-such-compiler", "no C++ compiler"),
        ({}, "false", "compile=True: false"),
        ({}, "'c++", 'compile=True: CXX="\'c++" is no'),
    ],
)
def test_compiled_passes_that_cannot_be_had(
    options: dict[str, Any],
    compiler: str | None,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """compile=True is an error, never a silent fallback; "auto" says why not."""
    if compiler is not None:
        monkeypatch.setenv("CXX", compiler)
    with pytest.raises(KernelError, match=re.escape(why)):
        small_llm(tiny()[0], compile=True, **options)
    with caplog.at_level(logging.INFO, "treespec"):
        assert not is_compiled(tiny()[0], **options)
    assert why in caplog.text.partition("passes are not compiled: ")[2]


def test_values_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="compile=1; valid: True, False, 'auto'"):
        small_llm(tiny()[0], compile=1)
    uneven = make_llama(new_folder("uneven"), 0, intermediate_size=100)
    with pytest.raises(KernelError, match=r"MLP size of 100.*multiple of 16"):
        small_llm(uneven, compile=True)
    monkeypatch.setenv("TREESPEC_CPU", "avx1024")
    with pytest.raises(KernelError, match=r"TREESPEC_CPU='avx1024'; valid: baseline, avx2, .*amx"):
        small_llm(tiny()[0])


@needs_compiler
@pytest.mark.parametrize("damage", ["empty", "half", "noise"])
def test_a_damaged_library_is_built_anew(damage: str, tmp_path: Path) -> None:
    """Loading half a file would end the process."""
    source = tmp_path / "three.cpp"
    source.write_text('extern "C" int three() { return 3; }')

    def three() -> int:
        return int(compile_library(find_compiler(), (source,), (), tmp_path / "kept").three())

    assert three() == 3
    (kept,) = (tmp_path / "kept").glob("*.so")
    whole = kept.read_bytes()
    kept.unlink()  # the one that is loaded keeps its memory
    kept.write_bytes({"empty": b"", "half": whole[: len(whole) // 2], "noise": whole[::-1]}[damage])
    assert three() == 3
    assert kept.read_bytes() == whole, "the compiler wrote another file"


@pytest.mark.slow
@needs_compiler
def test_without_a_cache_folder_libraries_are_built_for_each_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "treespec").write_text("where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", f"{find_compiler()[0]} -O0")
    assert is_compiled(tiny()[0])
    assert caplog.text.count("cannot cache compiled libraries") == 1 and "set XDG_CACHE_HOME" in caplog.text


@pytest.mark.slow
def test_auto_needs_no_home(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A container may run under a number that no user has."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    homeless = failing(Path, "home", RuntimeError("Could not determine home directory."))
    with homeless, caplog.at_level(logging.INFO, "treespec"):
        assert not is_compiled(tiny()[0])
        assert not is_compiled(tiny()[0], quantization="int8")
    assert "not compiled: no home folder to keep files in; set XDG_CACHE_HOME" in caplog.text
    assert "quantised weights are held as torch.float32" in caplog.text
    with homeless, pytest.raises(OSError, match="no home folder"):
        is_compiled(tiny()[0], compile=True)


def not_exact(*linear: str) -> AbstractContextManager[None]:
    """The self-test finds differences in passes with these linear layers, and in no others."""

    def differing(decoder: Decoder, *rest: Any) -> list[str]:
        return ["row 1 of 2 differs"] if decoder.linear in linear else []

    return quick_start(differing)


def test_auto_takes_the_eager_pass_where_the_compiled_one_is_not_exact(caplog: pytest.LogCaptureFixture) -> None:
    with not_exact("compiled"):
        llm = small_llm(tiny(torch.bfloat16)[0])
        assert not llm.stats()["frozen"]["compile"]
        assert llm.engine.cache.pools[0].dtype == torch.float32, "a cache of compiled passes"
        with pytest.raises(ExactnessError, match="row 1 of 2"):
            is_compiled(tiny()[0], compile=True)
    assert "compiled passes are not exact on this machine" in caplog.text


@pytest.mark.slow
def test_auto_pads_passes_where_no_linear_layer_is_row_invariant(caplog: pytest.LogCaptureFixture) -> None:
    with not_exact("compiled", "onednn"):
        llm = small_llm(tiny()[0])
        assert llm.stats()["frozen"]["linear"] == "torch" and "fixed rows" in llm.stats()["frozen"]["exactness"]
        with pytest.raises(ExactnessError, match="row 1 of 2"):
            small_llm(tiny()[0], compile=False, linear="onednn")
    assert "oneDNN's linear layers are not row-invariant here" in caplog.text
