"""Linear layers on a CPU: a row has the same bits whatever is computed beside it."""

from functools import partial

import pytest
import torch

from tests.helpers.exactness import threads
from treespec_kernels.linear.linear import Linear, onednn_available

ROWS = (2, 3, 16, 17, 32, 33, 40, 65, 128, 300)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_has_equal_bits_in_passes_of_any_size(dtype: torch.dtype, activation: str | None, count: int) -> None:
    """Summands enough for several blocks of a kernel, and outputs enough for a rare difference to show."""
    if not onednn_available(dtype):
        pytest.skip(f"oneDNN has no {dtype} here")
    generator = torch.Generator().manual_seed(0)
    with threads(count):
        for inputs, outputs in ((688, 256), (1024, 1024), (4096, 512)):
            weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
            linear = Linear(weight, None, "onednn")
            layer = linear if activation is None else partial(linear.activated, activation=activation)
            x = torch.randn(max(ROWS), inputs, generator=generator).to(dtype)
            pairs = torch.cat([layer(pair) for pair in x.split(2)])
            for rows in ROWS:
                assert torch.equal(layer(x[:rows]), pairs[:rows]), (inputs, outputs, rows)
