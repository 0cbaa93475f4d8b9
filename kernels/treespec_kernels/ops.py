"""Locates the Triton kernels of each op: `<op>_kernels.py`, in the folder of its family."""

from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent


@cache
def kernel_modules() -> dict[str, str]:
    """Every op with Triton kernels, and the name of the module that holds them."""
    files = sorted(ROOT.glob("*/*_kernels.py"), key=lambda file: file.name)
    return {file.stem.removesuffix("_kernels"): f"{__package__}.{file.parent.name}.{file.stem}" for file in files}


def module_file(name: str) -> Path:
    """The source of a module of this package, by its dotted name."""
    return ROOT.joinpath(*name.removeprefix(f"{__package__}.").split(".")).with_suffix(".py")
