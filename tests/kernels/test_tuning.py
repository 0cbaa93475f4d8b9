"""The sweep over kernel configurations: what it compiles."""

from pathlib import Path

import pytest

from tests.helpers.child import uninterpreted_document

PRECOMPILED = """
import json, os, time, torch
from pathlib import Path
from treespec_kernels.ops.shapes import KernelShape, Setting
from treespec_kernels.tuning.sweep import precompile, problems_of
if __name__ == "__main__":
    os.environ["TRITON_CACHE_DIR"] = FOLDER
    setting = Setting(KernelShape(torch.bfloat16, 16, 4, 2, 64, 96, 100), compiled_for="sm_90")
    problems = problems_of([setting], ["row_linear", "programmatic_launch"])[-2:]
    configs = [problem[0].candidates()[:2] for problem in problems]
    found = []
    for deadline in (time.monotonic(), float("inf")):
        precompile(problems, configs, 2, deadline)
        found.append(sorted({path.stem for path in Path(FOLDER).rglob("*.cubin")}))
    print(json.dumps(found))
"""


def test_configurations_are_compiled_before_they_are_measured(tmp_path: Path) -> None:
    """In other processes that need no GPU, until a deadline."""
    pytest.importorskip("triton")
    none, compiled = uninterpreted_document(PRECOMPILED.replace("FOLDER", repr(str(tmp_path))))
    assert none == [] and {"multiply_rows", "norm_rows", "attend_items", "project_to_vocab"} <= {*compiled}
