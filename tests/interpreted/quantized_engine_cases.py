"""Quantised models on the Triton kernels."""

from pathlib import Path
from unittest import mock

import pytest

from tests.helpers.gguf_files import write_gguf
from tests.helpers.models import greedy, make_draft, make_llama, new_folder, open_llm, tokens_of
from tests.helpers.quantized_checkpoints import quantize_folder
from tests.interpreted.engines import SHORT, SMALL, TREES, TRITON, trees_as_plain
from tests.interpreted.tuning_cases import NAME
from treespec import SpecConfig
from treespec_kernels.linear.quantized import QuantizedWeight
from treespec_kernels.tuning import tuned
from treespec_kernels.tuning.tuned import KernelConfigs, TunedEntry


@pytest.fixture(scope="module")
def folders() -> tuple[Path, list[Path]]:
    """A target, and two drafts of its shape that are stored quantised, so that they are stacked."""
    root = new_folder("quantised-graphs")
    target = make_llama(root / "target", 0, **(SMALL | {"intermediate_size": 96}))
    drafts = [make_draft(root / f"ssm-{i}", target, i, noise) for i, noise in ((1, 0.04), (2, 0.1))]
    return target, [quantize_folder(draft, 8, None) for draft in drafts]


@pytest.fixture(scope="module")
def gguf_files(folders: tuple[Path, list[Path]]) -> tuple[Path, list[Path]]:
    """The same models as GGUF files in Q4_1, whose zero points are fractions."""
    root = folders[0].parent
    drafts = [make_draft(root / f"plain-{i}", folders[0], i, noise) for i, noise in ((1, 0.04), (2, 0.1))]
    paths = [write_gguf(folder.with_suffix(".gguf"), folder, "Q4_1") for folder in (folders[0], *drafts)]
    return paths[0], paths[1:]


@pytest.mark.parametrize(
    "models, quantization, drafts", [("folders", "int4", "int8"), ("gguf_files", None, "int4 groups of 32")]
)
def test_trees_give_the_tokens_of_plain_decoding(
    models: str, quantization: str | None, drafts: str, request: pytest.FixtureRequest
) -> None:
    folders = request.getfixturevalue(models)
    spec, options = SpecConfig(max_depth=2, sources=("ssm",)), {"quantization": quantization, "dtype": "float32"}
    llm = open_llm(*folders, spec=spec, max_num_seqs=2, **options, **TRITON)
    assert isinstance(llm.engine.runner.target.weights.layers[0].qkv, QuantizedWeight)
    assert [model.quantization for model in llm.engine.sources.ssms.models] == [drafts, drafts]
    trees = trees_as_plain(llm, SHORT, greedy(4), TREES)
    cpu = open_llm(folders[0], max_num_seqs=2, compile=False, **options).generate(SHORT, greedy(4))
    assert tokens_of(trees) == tokens_of(cpu)
    assert all(output.metrics.acceptance_length > 1.3 for output in trees)


def test_an_engine_uses_what_was_tuned(folders: tuple[Path, list[Path]], tmp_path: Path) -> None:
    op, config = "quantized_row_linear", {"block_n": 16, "block_k": 16, "split_k": 2}
    key = {"dtype": "float32", "groups": 1, "out_features": 64, "in_features": 32, "bits": 4, "group": 32, "zero": 0}
    entry = TunedEntry(op, key, config, 1.0, 2.0, {}, tuned.versions_of(NAME, op), "2026-01-01")
    path = tmp_path / f"{tuned.slug(NAME)}.json"
    tuned.save_entries(path, NAME, [entry])
    configs = KernelConfigs.load("cuda", name=NAME, folder=tmp_path)
    with mock.patch.object(KernelConfigs, "load", lambda device: configs):
        llm = open_llm(folders[0], [], max_num_seqs=1, quantization="int4", max_model_len=128, **TRITON)
    assert configs.tuned == [entry.label]
    assert llm.stats()["frozen"]["tuned_file"] == str(path)
