"""Finds the modules of each op's Triton kernels, `<op>_kernels.py` in the folder of its family."""

from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent
PDL_OPS = (
    "lm_head",
    "qkv_rope",
    "quantized_row_linear",
    "rms_norm",
    "row_linear",
    "tree_attention",
    "tree_attention_masked",
)
"""Ops whose kernels support programmatic dependent launch (PDL). PDL is tuned and compiled as op
`programmatic_launch`."""


@cache
def kernel_modules() -> dict[str, tuple[str, ...]]:
    """Return the kernel modules of every op that has Triton kernels, by op name."""
    files = ROOT.glob("*/*_kernels.py")
    found = {file.stem.removesuffix("_kernels"): (f"{__package__}.{file.parent.name}.{file.stem}",) for file in files}
    found["programmatic_launch"] = tuple(name for op in PDL_OPS for name in found[op])
    return dict(sorted(found.items()))


def module_file(name: str) -> Path:
    """Return the path of the source file of a module of this package."""
    return ROOT.joinpath(*name.removeprefix(f"{__package__}.").split(".")).with_suffix(".py")
