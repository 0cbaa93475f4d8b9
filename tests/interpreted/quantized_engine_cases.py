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

SIZES = ((64, 32), (32, 32), (192, 32), (32, 96))  # of the layers: qkv, o, gate and up, down


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
    cpu = open_llm(folders[0], max_num_seqs=2, **options).generate(SHORT, greedy(4))
    assert tokens_of(trees) == tokens_of(cpu)
    assert all(output.metrics.acceptance_length > 1.3 for output in trees)


def entry(config: dict[str, int], op: str = "quantized_row_linear", stale: bool = False, **key: int) -> TunedEntry:
    versions = tuned.versions_of(NAME, op) | ({"source": "another"} if stale else {})
    of_dtype = {"dtype": "float32", "groups": 1} | key
    return TunedEntry(op, of_dtype, config, 1.0, 2.0, {}, versions, "2026-01-01T00:00:00+00:00")


def test_tuned_configurations_are_used_and_change_no_token(folders: tuple[Path, list[Path]], tmp_path: Path) -> None:
    """Of the four layers two are tuned; the others' entries are stale, or of another op, group or number of bits."""
    qkv, o, gate_up, down = ({"out_features": out, "in_features": inputs} for out, inputs in SIZES)
    int4, config = {"bits": 4, "group": 32, "zero": 0}, {"block_n": 16, "block_k": 16, "split_k": 2}
    entries = [
        entry(config, **qkv, **int4),
        entry(config | {"split_k": 3}, **down, **int4),
        entry(config, **o, **int4, stale=True),
        *(entry(config, **gate_up, **(int4 | change)) for change in ({"bits": 8}, {"group": 64}, {"zero": 1})),
        entry(config, "row_linear", **gate_up, silu_gate=1),
    ]
    tuned.save_entries(tmp_path / f"{tuned.slug(NAME)}.json", NAME, entries)
    load = KernelConfigs.load
    options = {"max_num_seqs": 1, "quantization": "int4"}
    with mock.patch.object(KernelConfigs, "load", lambda device: load("cuda", name=NAME, folder=tmp_path)):
        llm = open_llm(folders[0], [], max_model_len=128, **options, **TRITON)
    [linear] = llm.engine.runner.target.kernels._linear
    found = [(each.block_n, each.block_k, each.split_k) for each in linear.values()]
    assert found == [(16, 16, 2), (64, 32, 1), (64, 32, 1), (16, 16, 3)]
    frozen = llm.stats()["frozen"]
    assert frozen["tuned_file"] == str(tmp_path / f"{tuned.slug(NAME)}.json")
    defaults = [label for label in frozen["default_kernels"] if "row_linear" in label]
    assert defaults == [
        f"quantized_row_linear float32, bits 4, group 32, groups 1, in_features {size['in_features']}, "
        f"out_features {size['out_features']}, zero 0"
        for size in (o, gate_up)
    ]
    trees = trees_as_plain(llm, SHORT[1:], greedy(3), SpecConfig(nodes=6, max_depth=2, sources=("lookup",)))
    cpu = open_llm(folders[0], **options).generate(SHORT[1:], greedy(3), spec="off")
    assert tokens_of(trees) == tokens_of(cpu)
