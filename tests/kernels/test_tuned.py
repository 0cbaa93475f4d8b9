"""Tuned files: what is read and what is skipped; and that a write is whole or not at all."""

import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from treespec_kernels.attention.tree_attention_config import SegmentPartition, TreeAttentionConfig
from treespec_kernels.linear.row_linear import RowLinearConfig
from treespec_kernels.linear.row_tiles import RowTile
from treespec_kernels.tuning import tuned
from treespec_kernels.tuning.tuned import KernelConfigs, TunedEntry, versions_of

GPU, FILE = "NVIDIA H200", "nvidia-h200.json"
KEY = {"dtype": "bfloat16", "head_dim": 128, "group": 4}
DEFAULT = TreeAttentionConfig.default(torch.bfloat16, 128)


def entry(**changes: Any) -> TunedEntry:
    found = TunedEntry(
        op="tree_attention",
        key=KEY,
        config={"block_m": 32, "block_n": 64, "num_warps": 4, "num_stages": 2, "partition": {"short": 128}},
        microseconds=10.0,
        default_microseconds=12.0,
        loads={"nodes 32": {"microseconds": 10.0, "default_microseconds": 12.0, "weight": 1.0}},
        versions=versions_of(GPU, "tree_attention"),
        measured="2026-01-01T00:00:00+00:00",
    )
    return replace(found, **changes)


def load(folder: Path, *entries: TunedEntry) -> KernelConfigs:
    """What is found in a folder, after entries are written into it."""
    if entries:
        tuned.save_entries(folder / FILE, GPU, list(entries))
    return KernelConfigs.load("cuda", name=GPU, folder=folder)


def test_a_tuned_configuration_is_found_by_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for empty in (load(tmp_path), KernelConfigs.load("cpu")):
        assert empty.get("tree_attention", KEY, DEFAULT) is DEFAULT
        assert empty.file is None and empty.tuned == [] and len(empty.fallbacks) == 1
    configs = load(tmp_path, entry())
    given = {"dtype": torch.bfloat16, "group": 4, "head_dim": 128}
    expected = TreeAttentionConfig(32, 64, 4, 2, SegmentPartition(128, 1024, 8192))
    assert configs.get("tree_attention", given, DEFAULT) == expected
    for other in (KEY | {"head_dim": 64}, KEY | {"dtype": "float16"}, {"dtype": "bfloat16", "head_dim": 128}):
        assert configs.get("tree_attention", other, DEFAULT) is DEFAULT
    assert configs.get("lm_head", KEY, DEFAULT) is DEFAULT
    assert configs.file == str(tmp_path / FILE)
    assert configs.tuned == ["tree_attention bfloat16, group 4, head_dim 128"]
    assert len(configs.fallbacks) == 4 and "lm_head bfloat16, group 4, head_dim 128" in configs.fallbacks
    assert configs.get("lm_head", KEY, DEFAULT) is DEFAULT and len(configs.fallbacks) == 4, "told once"
    gate = KernelConfigs([entry(op="row_linear", key={"dtype": "float16", "silu_gate": 1})])
    assert gate.get("row_linear", {"silu_gate": True, "dtype": "torch.float16"}, DEFAULT) != DEFAULT
    assert gate.get("row_linear", {"silu_gate": False, "dtype": "float16"}, DEFAULT) is DEFAULT
    assert configs.describe().startswith("1 of 5 kernel shapes tuned") and "lm_head" in configs.describe()
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "version"), [("gpu", "NVIDIA H100"), ("triton", "1.0.0"), ("source", "another"), ("source", None)]
)
def test_a_stale_entry_is_skipped_alone(tmp_path: Path, name: str, version: str | None) -> None:
    versions = versions_of(GPU, "tree_attention")
    others = versions | {"torch": "2.11"}  # which changes nothing
    stale = versions | {name: version} if version else {k: v for k, v in versions.items() if k != name}
    configs = load(tmp_path, entry(versions=stale), entry(key=KEY | {"head_dim": 64}, versions=others))
    assert configs.get("tree_attention", KEY, DEFAULT) is DEFAULT
    assert configs.get("tree_attention", KEY | {"head_dim": 64}, DEFAULT) != DEFAULT
    [reason] = configs.stale
    assert f"{name} {version}, now {versions[name]}" in reason and reason in configs.describe()


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"format": "treespec tuned kernels 1", "device": "NVIDIA H100", "entries": []}',
        '{"format": "another", "device": "NVIDIA H200", "entries": []}',
        '{"format": "treespec tuned kernels 1", "device": "NVIDIA H200", "entries": [{"op": "row_linear"}]}',
        "\udcff",
    ],
)
def test_a_corrupt_or_foreign_file_is_skipped_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    path = tmp_path / FILE
    path.write_text(content, errors="surrogateescape")
    with caplog.at_level(logging.WARNING):
        configs = load(tmp_path)
    assert configs.get("tree_attention", KEY, DEFAULT) is DEFAULT
    [record] = caplog.records
    assert str(path) in record.getMessage()
    assert load(tmp_path, entry()).get("tree_attention", KEY, DEFAULT) != DEFAULT


def test_an_invalid_configuration_is_skipped_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = [KEY | {"head_dim": size} for size in (16, 32)]
    invalid = [entry(key=keys[0], config={"tile": 7}), entry(key=keys[1], config={"block_m": 7})]
    configs = load(tmp_path, entry(), *invalid)
    assert configs.get("tree_attention", KEY, DEFAULT).block_m == 32
    with caplog.at_level(logging.WARNING):
        assert all(configs.get("tree_attention", key, DEFAULT) is DEFAULT for key in keys * 2)
    assert len(caplog.records) == 2 and "tile" in caplog.text and "it must be a power of two" in caplog.text
    assert len(configs.fallbacks) == 2


def test_entries_are_merged_in_one_write(tmp_path: Path) -> None:
    other = KEY | {"head_dim": 64}
    load(tmp_path, entry(), entry(key=other))
    configs = load(tmp_path, entry(config={"block_m": 128}))
    assert [configs.get("tree_attention", key, DEFAULT).block_m for key in (KEY, other)] == [128, 32]
    blocked = tmp_path / "blocked"
    (blocked / FILE).mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        load(blocked, entry())
    assert [*blocked.iterdir()] == [blocked / FILE], "nothing temporary stays"


@pytest.mark.slow
def test_the_hash_follows_the_kernels_and_what_they_import(tmp_path: Path) -> None:
    hashes = [tuned.source_hash(op) for op in tuned.kernel_files()]
    assert len(set(hashes)) == len(hashes)
    kernels, dot = tmp_path / "linear" / "op_kernels.py", tmp_path / "linear" / "dot.py"
    kernels.parent.mkdir()
    kernels.write_text("from treespec_kernels.linear.dot import dot\n")
    dot.write_text("x = 1")
    seen = [tuned.source_hash("op", tmp_path)]
    for path in (dot, kernels):
        path.write_text(path.read_text() + "# more\n")
        seen.append(tuned.source_hash("op", tmp_path))
    assert len(set(seen)) == 3


@pytest.mark.slow
def test_configurations_survive_json() -> None:
    tiles = RowLinearConfig(64, 128, 64, 1, 4, 6, larger=(RowTile(128, 8, 6), RowTile(256, 16, 4)))
    for config in (DEFAULT, tiles):
        assert tuned.config_of(json.loads(json.dumps(asdict(config))), replace(config, num_stages=1)) == config
        assert tuned.config_of({}, config) == config
