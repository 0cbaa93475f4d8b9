"""Linear layers and activations on a CPU: a row has the same bits whatever is computed beside it."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from tests.helpers.exactness import threads
from tests.helpers.models import quick
from treespec_kernels.comparison import assert_close
from treespec_kernels.linear.activations import ACTIVATIONS, soft_cap
from treespec_kernels.linear.linear import Linear, onednn_available

ROWS = (2, 3, 16, 17, 32, 33, 40, 65, 128, 300)
EXACT = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
EXACT["relu2"] = lambda x: F.relu(x).square()
# Summands enough for several blocks of a kernel, and outputs enough for a rare difference to show; and odd widths.
SIZES = ((688, 256), (1024, 1024), (4096, 512), (48, 173), (48, 1365))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("activation", [None, *EXACT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_has_equal_bits_in_passes_of_any_size(dtype: torch.dtype, activation: str | None, count: int) -> None:
    if not onednn_available(dtype):
        pytest.skip(f"oneDNN has no {dtype} here")
    generator, error = torch.Generator().manual_seed(0), 1e-5 if dtype == torch.float32 else 1e-2
    with threads(count):
        for inputs, outputs in SIZES if activation in (None, "silu") else SIZES[3:]:
            weight = (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(dtype)
            x, bias = (torch.randn(n, generator=generator).to(dtype) for n in ((max(ROWS), inputs), (outputs,)))
            linear = Linear(weight, bias, "onednn")
            layer = linear if activation is None else partial(linear.activated, activation=activation)
            pairs = torch.cat([layer(pair) for pair in x.split(2)])
            exact = x.double() @ weight.double().T + bias.double()
            wanted = exact if activation is None else EXACT[activation](exact)
            assert_close(pairs.float(), wanted.float(), max_error=10 * error, rms_error=error)
            for rows in ROWS:
                assert torch.equal(layer(x[:rows]), pairs[:rows]), (inputs, outputs, rows)


@pytest.mark.parametrize("count", quick((1, 3), (3,)))
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_has_equal_bits_for_any_number_of_rows(name: str, count: int) -> None:
    """At widths that are no multiple of a vector, where ATen's own differ."""
    function, exact = ACTIVATIONS[name], EXACT[name]
    generator = torch.Generator().manual_seed(0)
    with threads(count):
        for width in (1, 3, 7, 173, 509, 1365, 2730):
            x = 3 * torch.randn(40, width, generator=generator)
            whole = function(x)
            assert_close(whole, exact(x.double()).float(), max_error=2e-5, rms_error=2e-6)
            for start, rows in ((0, 1), (1, 1), (3, 2), (5, 7), (1, 16), (0, 33)):
                assert torch.equal(function(x[start : start + rows].clone()), whole[start : start + rows])


def test_capped_logits_have_equal_bits_for_any_number_of_rows() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = 20 * torch.randn(33, 509, generator=torch.Generator().manual_seed(0)).to(dtype)
        whole = soft_cap(logits, 30.0)
        for start, rows in ((0, 1), (1, 1), (3, 2), (5, 7), (16, 16)):
            assert torch.equal(soft_cap(logits[start : start + rows].clone(), 30.0), whole[start : start + rows])
