"""Cases of row_linear_triton."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from tests.interpreted.common import DEVICE, INTERPRETED, NAN, assert_near, each_dtype
from treespec_kernels.linear.row_linear import (
    RowLinearConfig,
    activated_ref,
    activated_triton,
    row_linear_partials_triton,
    row_linear_ref,
    row_linear_triton,
)
from treespec_kernels.linear.row_tiles import proven
from treespec_kernels.tuning.testing import assert_close

pytestmark = pytest.mark.usefixtures("poisoned_allocations")

# In the interpreter a dot is BLAS, whose bits follow the shape of the whole product and its memory.
SMALL = RowLinearConfig(16, 32, 32, split_k=1, num_warps=4, num_stages=2)

TILED = RowLinearConfig(64, 32, 32, 1, num_warps=4, num_stages=2, larger=((128, 8, 2), (256, 16, 2)))


class Layer(NamedTuple):
    """Arguments of `row_linear_ref`; x lies in the middle of a wider tensor of NaN."""

    x: torch.Tensor
    weight: torch.Tensor
    options: dict[str, Any]

    def rows(self, chosen: Any) -> "Layer":
        """The layer for some of its rows."""
        residual = self.options["residual"]
        chosen_residual = None if residual is None else residual[..., chosen, :]
        return Layer(self.x[..., chosen, :], self.weight, self.options | {"residual": chosen_residual})


def random_layer(
    rows: int,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    *,
    groups: int | None = None,
    added: str = "",
    silu_gate: bool = False,
) -> Layer:
    generator = torch.Generator().manual_seed(rows + out_features)
    stacked = () if groups is None else (groups,)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*stacked, *shape, generator=generator).to(DEVICE, dtype)

    x = torch.full((*stacked, rows, in_features + 16), NAN, device=DEVICE, dtype=dtype)[..., 8 : 8 + in_features]
    x.copy_(normal(rows, in_features))
    features = out_features // 2 if silu_gate else out_features
    return Layer(
        x,
        normal(out_features, in_features) * in_features**-0.5,
        {
            "bias": normal(out_features) if "bias" in added else None,
            "residual": normal(rows, features) if "residual" in added else None,
            "silu_gate": silu_gate,
        },
    )


def compute(layer: Layer, config: RowLinearConfig | None) -> torch.Tensor:
    """The result, in the middle of a wider tensor whose rest must stay as it was."""
    expected = row_linear_ref(layer.x, layer.weight, **layer.options)
    wide = expected.new_full((*expected.shape[:-1], expected.shape[-1] + 16), NAN)
    out = wide[..., 8:-8]
    assert row_linear_triton(layer.x, layer.weight, **layer.options, config=config, out=out) is out
    assert wide[..., :8].isnan().all() and wide[..., -8:].isnan().all()
    return out


def assert_matches_ref(layer: Layer, config: RowLinearConfig | None) -> None:
    assert_near(compute(layer, config), row_linear_ref(layer.x, layer.weight, **layer.options))


@each_dtype
@pytest.mark.parametrize(
    "rows, out_features, in_features, split_k, groups, added, silu_gate",
    [
        (1, 1, 1, 1, None, "", False),
        (1, 1, 63, 2, 1, "bias residual", False),
        (2, 63, 123, 1, None, "bias", False),
        (3, 123, 64, 3, None, "residual", False),
        (7, 32, 256, 8, None, "bias residual", False),
        (16, 64, 63, 4, None, "", False),
        (17, 256, 33, 1, None, "residual", False),
        (33, 63, 96, 2, 2, "bias residual", False),
        (65, 40, 40, 1, 3, "bias", False),
        (64, 2, 64, 2, None, "", True),
        (1, 126, 123, 1, None, "bias residual", True),
        (17, 64, 128, 1, 2, "", True),
        (3, 122, 123, 3, 3, "bias", True),
        (2, 64, 96, 8, None, "residual", True),
    ],
)
def test_against_ref(
    dtype: torch.dtype,
    rows: int,
    out_features: int,
    in_features: int,
    split_k: int,
    groups: int | None,
    added: str,
    silu_gate: bool,
) -> None:
    layer = random_layer(rows, out_features, in_features, dtype, groups=groups, added=added, silu_gate=silu_gate)
    assert_matches_ref(layer, replace(SMALL, split_k=split_k))


@each_dtype
@pytest.mark.parametrize("silu_gate", [False, True])
def test_the_shipped_defaults(dtype: torch.dtype, silu_gate: bool) -> None:
    for rows, out_features, in_features in [(3, 96, 72), (5, 2048, 520)][: 1 if INTERPRETED else 2]:
        assert_matches_ref(random_layer(rows, out_features, in_features, dtype, silu_gate=silu_gate), None)


@each_dtype
@pytest.mark.parametrize(
    "out_features, in_features, split_k, groups, added, silu_gate",
    [
        (40, 70, 1, None, "bias residual", False),
        (40, 70, 3, None, "", False),
        (24, 64, 2, 2, "residual", False),
        (62, 40, 1, 2, "bias", True),
        (62, 64, 2, None, "residual", True),
    ],
)
def test_a_row_has_the_same_bits_in_every_number_of_rows(
    dtype: torch.dtype,
    out_features: int,
    in_features: int,
    split_k: int,
    groups: int | None,
    added: str,
    silu_gate: bool,
) -> None:
    layer = random_layer(35, out_features, in_features, dtype, groups=groups, added=added, silu_gate=silu_gate)
    config = replace(SMALL, split_k=split_k)
    out = compute(layer, config)
    order = torch.randperm(35, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for chosen in (slice(0, 1), slice(34, 35), slice(3, 5), slice(16, 32), slice(0, 33), order, order[:7]):
        assert torch.equal(compute(layer.rows(chosen), config), out[..., chosen, :]), chosen
    for row in (0, 17):
        twice = layer.rows([row] * 19)
        assert torch.equal(compute(twice, config), out[..., [row] * 19, :])


COUNTS = (1, 63, 64, 65, 127, 128, 129, 255, 256, 300)


@each_dtype
@pytest.mark.parametrize(
    "out_features, in_features, split_k, groups, added, silu_gate",
    [
        (40, 70, 1, None, "", False),
        (40, 70, 1, 2, "bias residual", False),
        (24, 64, 2, 2, "residual", False),
        (62, 40, 1, None, "bias", True),
        (62, 64, 2, None, "residual", True),
    ],
)
def test_a_row_has_the_same_bits_in_every_tile(
    dtype: torch.dtype,
    out_features: int,
    in_features: int,
    split_k: int,
    groups: int | None,
    added: str,
    silu_gate: bool,
) -> None:
    layer = random_layer(300, out_features, in_features, dtype, groups=groups, added=added, silu_gate=silu_gate)
    config = replace(TILED, split_k=split_k)
    expected = compute(layer, config.with_tile(config.tiles[0]))
    assert_near(expected, row_linear_ref(layer.x, layer.weight, **layer.options))
    for tile in config.larger:
        for count in COUNTS if split_k == 1 else COUNTS[::3]:  # every row of split sums is a program of its own
            own = slice(300 - count, 300)
            assert torch.equal(compute(layer.rows(own), config.with_tile(tile)), expected[..., own, :]), (tile, count)


@each_dtype
def test_partials_have_the_same_bits_in_every_tile(dtype: torch.dtype) -> None:
    layer, config = random_layer(257, 40, 70, dtype, groups=2), replace(TILED, split_k=3)
    first, *others = (
        row_linear_partials_triton(layer.x, layer.weight, config=config.with_tile(tile)) for tile in config.tiles
    )
    assert all(torch.equal(partials, first) for partials in others)


@each_dtype
def test_a_launch_takes_the_tile_for_its_rows(dtype: torch.dtype) -> None:
    """A weight of 70 tiles of columns, at which tiles of every size are the fastest for some number of rows."""
    layer = random_layer(200, 70 * 16, 32, dtype)
    config = replace(TILED, block_n=16)
    expected = compute(layer, config.with_tile(config.tiles[0]))
    assert {config.for_rows(rows, 70).block_m for rows in (64, 128, 200)} == {64, 128, 256}
    for rows in (64, 128, 200):
        assert torch.equal(compute(layer.rows(slice(0, rows)), config), expected[:rows])


@each_dtype
def test_only_tiles_with_equal_bits_are_kept(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    layer = random_layer(257, 40, 70, dtype)

    def run(config: RowLinearConfig, wrong: int | None) -> tuple[torch.Tensor, ...]:
        out = compute(layer, config)
        return (torch.nextafter(out, out + 1) if config.block_m == wrong else out,)

    assert proven(TILED, lambda config: run(config, None), "a layer") == TILED
    assert not caplog.messages
    for wrong, kept in ((128, TILED.larger[1:]), (256, TILED.larger[:1])):
        assert proven(TILED, lambda config, wrong=wrong: run(config, wrong), "a layer").larger == kept
        assert caplog.messages.pop() == (
            f"a layer: tiles of {wrong} rows do not have the bits of tiles of 64 here; not using them"
        )
        caplog.clear()


@each_dtype
def test_a_row_has_the_same_bits_beside_other_rows(dtype: torch.dtype) -> None:
    layer = random_layer(20, 40, 70, dtype, added="bias")
    for split_k in (1, 2):
        config = replace(SMALL, split_k=split_k)
        out = compute(layer, config)
        for companion in (0.0, -1e4, NAN):
            x = torch.full_like(layer.x, companion)
            x[5] = layer.x[5]
            assert torch.equal(compute(layer._replace(x=x), config)[5], out[5])


@each_dtype
def test_a_group_has_the_bits_of_its_layer_alone(dtype: torch.dtype) -> None:
    layer = random_layer(4, 40, 70, dtype, groups=3, added="bias residual")
    for split_k in (1, 2):
        config = replace(SMALL, split_k=split_k)
        out = compute(layer, config)
        for group in range(3):
            options = {name: layer.options[name][group] for name in ("bias", "residual")} | {"silu_gate": False}
            alone = Layer(layer.x[group], layer.weight[group], options)
            assert torch.equal(compute(alone, config), out[group])


@each_dtype
@pytest.mark.parametrize("split_k", [1, 2, 3, 4, 8])
def test_partials_are_the_sums_of_their_splits_and_add_up_to_the_result(dtype: torch.dtype, split_k: int) -> None:
    """70 features are three blocks of 32, so that splits of 4 and 8 have empty parts."""
    layer = random_layer(5, 40, 70, dtype, added="bias residual")
    config = replace(SMALL, split_k=split_k)
    partials = row_linear_partials_triton(layer.x, layer.weight, config=config)
    assert (partials.shape, partials.dtype) == ((split_k, 5, 40), torch.float32)
    width = -(-3 // split_k) * 32
    for i, partial in enumerate(partials):
        part = slice(min(70, i * width), min(70, (i + 1) * width))
        expected = layer.x[:, part].float() @ layer.weight[:, part].float().T
        assert_close(partial, expected, max_error=1e-5, rms_error=1e-6)
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    added = total + layer.options["bias"].float() + layer.options["residual"].float()
    assert torch.equal(compute(layer, config), added.to(dtype))
    assert torch.equal(row_linear_triton(layer.x, layer.weight, config=config), total.to(dtype))


@each_dtype
@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("split_k", [1, 2])
def test_residual_may_be_updated_in_place(dtype: torch.dtype, split_k: int, groups: int | None) -> None:
    layer = random_layer(19, 40, 70, dtype, groups=groups, added="residual")
    config = replace(SMALL, split_k=split_k)
    expected = compute(layer, config)
    residual = layer.options["residual"]
    assert row_linear_triton(layer.x, layer.weight, residual=residual, config=config, out=residual) is residual
    assert torch.equal(residual, expected)


def test_a_workspace_is_used_and_may_be_larger() -> None:
    layer = random_layer(6, 40, 70, torch.float32, groups=2)
    config = replace(SMALL, split_k=3)
    size = config.workspace_size(12, 40)
    assert size == 3 * 12 * 40
    workspace = torch.full((size + 5,), NAN, device=DEVICE)
    partials = row_linear_partials_triton(layer.x, layer.weight, config=config, workspace=workspace)
    assert partials.shape == (3, 12, 40) and partials.data_ptr() == workspace.data_ptr()
    assert torch.equal(partials, row_linear_partials_triton(layer.x, layer.weight, config=config))
    assert workspace[size:].isnan().all()
    y = row_linear_triton(layer.x, layer.weight, config=config, workspace=workspace.fill_(NAN))
    assert torch.equal(workspace[:size].view(3, 2, 6, 40), partials.view(3, 2, 6, 40))
    assert torch.equal(y, compute(layer, config))


@each_dtype
def test_rows_and_weights_may_lie_apart(dtype: torch.dtype) -> None:
    layer = random_layer(18, 48, 72, dtype, groups=2, added="bias residual")
    x = layer.x.transpose(0, 1).contiguous().transpose(0, 1)  # [groups, rows, in], rows of the groups in turn
    weight = layer.weight.new_full((2, 50, 88), NAN)[:, 1:49, 8:80]
    weight.copy_(layer.weight)
    for config in (SMALL, replace(SMALL, split_k=2)):
        expected = compute(layer, config)
        assert torch.equal(compute(Layer(x, weight, layer.options), config), expected)
        one_row = layer.rows(slice(0, 1))
        strange = one_row.x.as_strided(one_row.x.shape, (one_row.x.stride(0), 3, 1))  # of a single row no stride counts
        assert torch.equal(compute(one_row._replace(x=strange), config), expected[:, :1])


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("added, silu_gate, groups", [("", True, None), ("bias", True, 2), ("bias", False, None)])
@each_dtype
def test_activated_products(
    dtype: torch.dtype, added: str, silu_gate: bool, groups: int | None, activation: str | None
) -> None:
    """Of cuBLAS: they have the bits of the layer if its sums are those of the product."""
    generator = torch.Generator().manual_seed(5)
    size = (5, 6) if groups is None else (groups, 5, 6)
    for features in (6, 600):  # one block, and three with a part of one
        product = torch.randn(*size[:-1], features, generator=generator).to(DEVICE, dtype)
        bias = torch.randn(*size[:-2], features, generator=generator).to(DEVICE, dtype) if added else None
        options = {"bias": bias, "silu_gate": silu_gate, "activation": activation}
        got, expected = activated_triton(product, **options), activated_ref(product, **options)
        assert got.shape == expected.shape and got.dtype == dtype
        assert_near(got, expected)
        one = torch.eye(features, dtype=dtype, device=DEVICE)
        one = one if groups is None else one.expand(groups, -1, -1).contiguous()
        if features == 6:  # times one, exactly
            assert torch.equal(got, row_linear_triton(product, one, config=SMALL, **options))


@pytest.mark.skipif(not INTERPRETED, reason="about the interpreter")
def test_bfloat16_is_refused_in_the_interpreter() -> None:
    layer = random_layer(1, 16, 16, torch.bfloat16)
    with pytest.raises(ValueError, match=r"bfloat16 wrongly; use float16 or float32"):
        row_linear_triton(layer.x, layer.weight, config=SMALL)


@pytest.mark.skipif(INTERPRETED, reason="needs the speed of a GPU")
@each_dtype
@pytest.mark.parametrize(
    "out_features, in_features, silu_gate",
    [(6144, 4096, False), (4096, 14336, False), (28672, 4096, True), (768, 256, False), (1376, 344, True)],
)
def test_shipped_defaults_are_row_invariant(
    dtype: torch.dtype, out_features: int, in_features: int, silu_gate: bool
) -> None:
    layer = random_layer(257, out_features, in_features, dtype, added="residual", silu_gate=silu_gate)
    assert_matches_ref(layer, None)
    out = compute(layer, None)
    for count in (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 256):
        for first in {0, 1, 257 - count}:
            chosen = slice(first, first + count)
            assert torch.equal(compute(layer.rows(chosen), None), out[chosen]), (count, first)
    order = torch.randperm(257, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert torch.equal(compute(layer.rows(order), None), out[order])


@pytest.mark.skipif(INTERPRETED, reason="about CUDA graphs")
def test_a_captured_graph_follows_its_inputs() -> None:
    layer = random_layer(9, 512, 512, torch.bfloat16, added="residual")
    config = replace(SMALL, split_k=4)
    out = torch.empty_like(layer.options["residual"])
    workspace = torch.empty(config.workspace_size(9, 512), device=DEVICE)

    def run() -> None:
        row_linear_triton(layer.x, layer.weight, **layer.options, config=config, out=out, workspace=workspace)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    layer.x.copy_(layer.x.flip(0))
    graph.replay()
    assert torch.equal(out, compute(layer, config))
