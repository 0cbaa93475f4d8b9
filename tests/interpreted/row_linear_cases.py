"""Cases of row_linear and quantized_row_linear: the kernels against the reference."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from tests.helpers.quantized_checkpoints import random_weight
from tests.interpreted.common import (
    DEVICE,
    INTERPRETED,
    NAN,
    check,
    each_dtype,
    in_the_interpreter,
    normal,
    on_a_gpu,
    view_amid_nan,
)
from treespec_kernels.comparison import assert_close
from treespec_kernels.linear.row_linear import (
    RowLinearConfig,
    activated_ref,
    activated_triton,
    row_linear_partials_triton,
    row_linear_triton,
)

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

SMALL = RowLinearConfig(16, 32, 32, split_k=1, num_warps=4, num_stages=2)
TILED = RowLinearConfig(64, 32, 32, 1, num_warps=4, num_stages=2, larger=((128, 8, 2), (256, 16, 2)))
if INTERPRETED:  # a GPU has another instruction for 16 rows
    TILED = replace(SMALL, larger=((32, 8, 2), (64, 16, 2)))


class Layer(NamedTuple):
    rows: int
    out_features: int
    in_features: int
    added: str = ""
    gate: bool = False
    groups: int | None = None
    split_k: int = 1
    activation: str | None = None
    config: RowLinearConfig | None = SMALL


LAYERS = [
    Layer(1, 1, 1),
    Layer(2, 63, 123, "bias"),
    Layer(17, 64, 33, "residual"),
    Layer(16, 32, 64, "bias residual", groups=2),
    Layer(3, 40, 70, "bias residual", split_k=8),  # more splits than blocks
    Layer(5, 63, 96, "bias residual", groups=2, split_k=2),
    Layer(18, 62, 40, "bias", True, groups=2),
    Layer(1, 126, 123, "bias residual", True),
    Layer(3, 122, 123, "bias", True, groups=3, split_k=3),
    Layer(2, 64, 96, "residual", True, split_k=2),
    Layer(3, 96, 72, config=None),
    Layer(3, 96, 72, gate=True, config=None),
    Layer(33, 40, 70, config=TILED),
    Layer(33, 62, 40, "bias residual", True, 2, config=TILED),
    Layer(33, 40, 70, groups=2, split_k=3, config=TILED),
    *(Layer(3, 38, 64, "bias", True, activation=activation) for activation in ("gelu", "gelu_tanh", "relu")),
    Layer(3, 38, 64, "bias", split_k=2, activation="gelu"),
    Layer(3, 38, 64, "bias", activation="silu"),
]


def arguments_of(layer: Layer, dtype: torch.dtype) -> dict[str, Any]:
    """x lies in the middle of a wider tensor of NaN."""
    draw, stack = normal(layer.rows + layer.out_features), () if layer.groups is None else (layer.groups,)
    x = view_amid_nan(draw(*stack, layer.rows, layer.in_features, dtype=dtype))
    weight = (draw(*stack, layer.out_features, layer.in_features) * layer.in_features**-0.5).to(dtype)
    arguments: dict[str, Any] = {"x": x, "weight": weight, "silu_gate": layer.gate, "activation": layer.activation}
    if "bias" in layer.added:
        arguments["bias"] = draw(*stack, layer.out_features, dtype=dtype)
    if "residual" in layer.added:
        features = layer.out_features // (1 + layer.gate)
        arguments["residual"] = draw(*stack, layer.rows, features, dtype=dtype)
    return arguments


def in_the_middle(x: torch.Tensor, weight: Any, **options: Any) -> torch.Tensor:
    """The result, in the middle of a wider tensor whose rest must stay as it was."""
    features = weight.shape[-2] // (1 + options.get("silu_gate", False))
    wide = x.new_full((*x.shape[:-1], features + 16), NAN)
    out = wide[..., 8:-8]
    assert row_linear_triton(x, weight, **options, out=out) is out
    assert wide[..., :8].isnan().all() and wide[..., -8:].isnan().all()
    return out


@each_dtype
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: "-".join(map(str, layer[:-1])))
def test_layers(layer: Layer, dtype: torch.dtype) -> None:
    arguments = arguments_of(layer, dtype)
    config = layer.config and replace(layer.config, split_k=layer.split_k)
    check("row_linear", arguments, config, num_rows=layer.rows, run=in_the_middle)


FORMS = [  # inputs, bits, groups, type of zero points
    (123, 8, 1, None),
    (64, 8, 2, torch.int8),
    (96, 8, 3, torch.float32),
    (106, 4, 1, torch.int8),
    (96, 4, 3, torch.float32),
    (96, 8, 6, None),
]


@each_dtype
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("rows, out, split_k, stack", [(3, 33, 1, ()), (17, 64, 2, (2,))])
def test_quantized_layers(
    rows: int, out: int, split_k: int, stack: tuple[int, ...], form: Any, dtype: torch.dtype
) -> None:
    draw, gate, inputs = normal(form[0]), bool(stack), form[0]
    arguments = {
        "x": draw(*stack, rows, inputs, dtype=dtype),
        "weight": random_weight(out, *form, dtype, stack, DEVICE),
        "bias": draw(*stack, out, dtype=dtype),
        "residual": draw(*stack, rows, out // (1 + gate), dtype=dtype),
        "silu_gate": gate,
    }
    config = replace(SMALL, split_k=split_k, block_k=min(SMALL.block_k, form[0] // form[2]))
    check("quantized_row_linear", arguments, config, num_rows=rows, run=in_the_middle)


@each_dtype
@pytest.mark.parametrize("split_k", [2, 8])
def test_partials_are_the_sums_of_their_splits_and_add_up_to_the_result(split_k: int, dtype: torch.dtype) -> None:
    """70 features are three blocks of 32, so that some of 8 splits are empty."""
    arguments = arguments_of(Layer(5, 40, 70, "bias residual"), dtype)
    x, weight, config = arguments["x"], arguments["weight"], replace(SMALL, split_k=split_k)
    partials = row_linear_partials_triton(x, weight, config=config)
    assert (partials.shape, partials.dtype) == ((split_k, 5, 40), torch.float32)
    width = -(-3 // split_k) * 32
    for i, partial in enumerate(partials):
        part = slice(min(70, i * width), min(70, (i + 1) * width))
        expected = x[:, part].float() @ weight[:, part].float().T
        assert_close(partial, expected, max_error=1e-5, rms_error=1e-6)
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    added = total + arguments["bias"].float() + arguments["residual"].float()
    assert torch.equal(row_linear_triton(**arguments, config=config), added.to(dtype))


@pytest.mark.parametrize("split_k", [1, 2])
def test_rows_and_weights_may_lie_apart(split_k: int) -> None:
    arguments = arguments_of(Layer(18, 48, 72, "bias residual", groups=2), torch.float32)
    x = arguments["x"].transpose(0, 1).contiguous().transpose(0, 1)  # [groups, rows, in], rows of the groups in turn
    weight = view_amid_nan(arguments["weight"], rows=2)
    config = replace(SMALL, split_k=split_k)
    expected = row_linear_triton(**arguments, config=config)
    assert torch.equal(row_linear_triton(**(arguments | {"x": x, "weight": weight}), config=config), expected)
    one = x[:, :1]
    strange = one.as_strided(one.shape, (one.stride(0), 3, 1))  # of a single row no stride counts
    alone = arguments | {"x": strange, "residual": arguments["residual"][:, :1]}
    assert torch.equal(row_linear_triton(**alone, config=config), expected[:, :1])


@each_dtype
@pytest.mark.parametrize(
    "features, added, gate, groups, activation",
    [(6, "", True, None, None), (600, "bias", True, 2, "gelu"), (600, "bias", False, None, None)],
)
def test_activated_products(
    features: int, added: str, gate: bool, groups: int | None, activation: str | None, dtype: torch.dtype
) -> None:
    """Of cuBLAS; in one block of features, and in three with a part of one."""
    draw, stack = normal(5), () if groups is None else (groups,)
    product = draw(*stack, 5, features, dtype=dtype)
    bias = draw(*stack, features, dtype=dtype) if added else None
    arguments = {"product": product, "bias": bias, "silu_gate": gate, "activation": activation}
    changes = {"ref": activated_ref, "run": activated_triton}
    check("row_linear", arguments, num_rows=5, rows={"product": -2}, **changes)


@in_the_interpreter
def test_bfloat16_is_refused_in_the_interpreter() -> None:
    arguments = arguments_of(Layer(1, 16, 16), torch.bfloat16)
    with pytest.raises(ValueError, match=r"bfloat16 wrongly; use float16 or float32"):
        row_linear_triton(**arguments, config=SMALL)


@on_a_gpu
@each_dtype
@pytest.mark.parametrize(
    "out_features, in_features, gate",
    [
        (2048, 520, False),
        (6144, 4096, False),
        (4096, 14336, False),
        (28672, 4096, True),
        (768, 256, False),
        (1376, 344, True),
    ],
)
def test_shipped_defaults_are_row_invariant(
    out_features: int, in_features: int, gate: bool, dtype: torch.dtype
) -> None:
    arguments = arguments_of(Layer(257, out_features, in_features, "residual", gate), dtype)
    check("row_linear", arguments, num_rows=257, run=in_the_middle)
    out = row_linear_triton(**arguments)
    for count in (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 256):
        for first in {0, 1, 257 - count}:
            chosen = slice(first, first + count)
            some = arguments | {name: arguments[name][chosen] for name in ("x", "residual")}
            assert torch.equal(row_linear_triton(**some), out[chosen]), (count, first)
