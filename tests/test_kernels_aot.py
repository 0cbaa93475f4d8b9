"""Every shipped kernel configuration compiles for real targets, without a GPU, within bounds and without a spill."""

import json
import os
import subprocess
import sys

import pytest

from treespec_kernels.aot import SHARED_BYTES, default_shapes

# Registers per thread, some tens above what Triton 3.6 and 3.9 give: a change that costs occupancy shows here.
REGISTER_BOUND = {
    "attend_items": 224,
    "combine_segments": 64,
    "move_path": 64,
    "choose_in_blocks": 64,
    "choose_of_blocks": 32,
}


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_shipped_defaults_compile(target: str) -> None:
    pytest.importorskip("triton")
    # A process of its own: this one may have imported triton for the interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "treespec_kernels.aot", "--target", target]
    child = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    report = json.loads(child.stdout)
    assert report["failed"] == []
    rows = report["targets"][target]
    assert {row["kernel"] for row in rows} == set(REGISTER_BOUND)
    assert len(rows) == len(default_shapes()) * len(REGISTER_BOUND)
    for row in rows:
        assert row["spills"] == 0, row
        assert row["shared_bytes"] <= SHARED_BYTES[target], row
        assert 0 < row["registers"] <= REGISTER_BOUND[row["kernel"]], row
    shapes = {(row["config"]["dtype"], row["config"]["head_dim"]) for row in rows}
    assert shapes == {(dtype, head_dim) for dtype in ("bf16", "fp16", "fp32") for head_dim in (64, 128)}


def test_an_interpreted_process_cannot_compile() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "treespec_kernels.aot", "--target", "sm_90"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    child = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "ValueError: aot: TRITON_INTERPRET is set" in child.stderr
