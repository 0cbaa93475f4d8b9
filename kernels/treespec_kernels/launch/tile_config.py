"""Base class for configurations of kernels with matrix products."""

from typing import Any

_CONSTANTS = ("block_m", "block_n", "block_k", "split_k")


class TileConfig:
    """Base class of frozen dataclasses with a kernel's tile sizes and launch options.

    Bits of results depend on them (another number of warps may reduce a tile in another order), so they are fixed
    for an engine's lifetime.
    """

    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if name.startswith("block_") and (size < 16 or size & (size - 1)):
                raise ValueError(f"{name} is {size}; it must be a power of two, 16 or more")
            if name in ("split_k", "num_warps", "num_stages") and size < 1:
                raise ValueError(f"{name} is {size}; it must be 1 or more")

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's constexpr arguments that are fields of the configuration: `BLOCK_M` is `block_m`."""
        return {name.upper(): getattr(self, name) for name in _CONSTANTS if hasattr(self, name)}

    @property
    def options(self) -> dict[str, Any]:
        """Triton's launch options: num_warps, num_stages, enable_fp_fusion."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}
