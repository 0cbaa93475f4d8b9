"""Linear layers on a CPU: a row has the same bits whatever is computed beside it."""

import pytest
import torch

from tests.exactness import threads
from treespec_kernels.linear.linear import Linear, onednn_available

ROWS = (2, 3, 16, 17, 32, 33, 40, 65, 128, 300)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("reordered", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_has_equal_bits_in_passes_of_any_size(
    dtype: torch.dtype, reordered: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Summands enough for several blocks of a kernel, and outputs enough for a rare difference to show."""
    if not onednn_available(dtype):
        pytest.skip(f"oneDNN has no {dtype} here")
    monkeypatch.setattr("treespec_kernels.linear.linear.onednn_available", lambda dtype: reordered)
    generator = torch.Generator().manual_seed(0)
    with threads(count):
        for inputs, outputs in ((688, 256), (1024, 1024), (4096, 512)):
            weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
            layer = Linear(weight, None)
            x = torch.randn(max(ROWS), inputs, generator=generator).to(dtype)
            alone = torch.cat([layer(row) for row in x[:70].split(1)])
            whole = layer(x)
            assert torch.equal(whole[:70], alone)
            for rows in ROWS:
                assert torch.equal(layer(x[:rows]), whole[:rows]), (inputs, outputs, rows)
