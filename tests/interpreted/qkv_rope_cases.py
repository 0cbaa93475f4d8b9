"""Cases of qkv_rope."""

from dataclasses import dataclass, replace

import pytest
import torch

from tests.interpreted.common import DEVICE, IMPLEMENTATION, NAN, assert_near, each_dtype
from treespec_kernels.attention.qkv_rope import qkv_rope_ref, qkv_rope_triton

MAX_POSITIONS, PAGE_SIZE, NUM_PAGES = 300, 4, 20
# (max, rms) error relative to the RMS of the output: one rounding of it.
BOUNDS = {torch.float32: (3e-6, 3e-7), torch.float16: (5e-3, 5e-4), torch.bfloat16: (4e-2, 4e-3)}

# (head_dim, query heads, KV heads)
HEADS = [(2, 1, 1), (8, 8, 1), (16, 6, 2), (24, 3, 3), (64, 8, 2), (80, 4, 2), (128, 5, 1), (600, 2, 1)]


def angles(head_dim: int) -> torch.Tensor:
    """[MAX_POSITIONS, head_dim / 2] in float64."""
    inv_freq = 100.0 ** -(torch.arange(head_dim // 2).double() / (head_dim // 2))
    return torch.arange(MAX_POSITIONS).double()[:, None] * inv_freq


def rotation_of(head_dim: int) -> torch.Tensor:
    cos, sin = angles(head_dim).cos(), angles(head_dim).sin()
    return torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1).float().to(DEVICE)


@dataclass(frozen=True)
class Inputs:
    """`pool` holds a pattern of its own in every element, so that a write to a wrong slot shows."""

    qkv: torch.Tensor
    rotation: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    pool: torch.Tensor  # [num_layers, NUM_PAGES, 2, PAGE_SIZE, num_kv_heads, head_dim]: no layer of it is dense
    q_out: torch.Tensor
    bias: torch.Tensor | None

    @property
    def kv_layer(self) -> torch.Tensor:
        """[2, NUM_PAGES, num_kv_heads, PAGE_SIZE, head_dim] of the middle layer."""
        return self.pool[1].permute(1, 0, 3, 2, 4)

    def rows(self, chosen: torch.Tensor) -> "Inputs":
        """These rows alone, at slots and over a pool of their own; of a bias by group, a group for each of them."""
        num_rows = len(self.q_out)
        chosen = chosen.to(DEVICE)
        bias = self.bias
        if bias is not None and bias.dim() == 2:
            bias = bias[chosen // (num_rows // len(bias))]
        return replace(
            self,
            qkv=self.qkv[..., chosen, :].contiguous(),
            positions=self.positions[chosen],
            slots=PAGE_SIZE + torch.arange(len(chosen), device=DEVICE),
            pool=pattern(self.pool),
            q_out=torch.full_like(self.q_out[: len(chosen)], NAN),
            bias=bias,
        )


def pattern(like: torch.Tensor) -> torch.Tensor:
    """Numbers from 1,000 to 1,999, with every third a NaN."""
    flat = 1000.0 + torch.arange(like.numel(), device=DEVICE) % 1000
    flat[::3] = NAN
    return flat.to(like.dtype).view(like.shape)


def random_inputs(
    rows: int,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    *,
    splits: int = 0,
    groups: int | None = None,
    padding: int = 0,
) -> Inputs:
    """groups: None for no bias, 0 for one bias of all rows. The last `padding` rows point to the null page's slot 0."""
    generator = torch.Generator().manual_seed(1000 * rows + head_dim + splits)
    width = (num_heads + 2 * num_kv_heads) * head_dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    slots = PAGE_SIZE + torch.randperm((NUM_PAGES - 1) * PAGE_SIZE, generator=generator)[:rows]
    positions = torch.randint(MAX_POSITIONS, (rows,), generator=generator)
    slots[rows - padding :], positions[rows - padding :] = 0, 0
    pool = torch.empty(3, NUM_PAGES, 2, PAGE_SIZE, num_kv_heads, head_dim, dtype=dtype, device=DEVICE)
    return Inputs(
        normal(splits, rows, width) if splits else normal(rows, width).to(dtype),
        rotation_of(head_dim),
        positions.int().to(DEVICE),
        slots.to(DEVICE),
        pattern(pool),
        torch.full((rows, num_heads, head_dim), NAN, dtype=dtype, device=DEVICE),
        None if groups is None else normal(*(groups, width) if groups else (width,)).to(dtype),
    )


def run(inputs: Inputs) -> None:
    qkv_rope = {"ref": qkv_rope_ref, "triton": qkv_rope_triton}[IMPLEMENTATION]
    arguments = (inputs.qkv, inputs.rotation, inputs.positions, inputs.slots, inputs.kv_layer, inputs.q_out)
    assert qkv_rope(*arguments, bias=inputs.bias) is None


def written(inputs: Inputs) -> torch.Tensor:
    """[rows, num_heads + 2 * num_kv_heads, head_dim]: Q, and what lies in the rows' slots."""
    pages, offsets = inputs.slots // PAGE_SIZE, inputs.slots % PAGE_SIZE
    k, v = (cache[pages, :, offsets] for cache in inputs.kv_layer)
    return torch.cat((inputs.q_out, k, v), 1)


def model(inputs: Inputs) -> torch.Tensor:
    """The same in float64: a pair of dimensions is a complex number, and a position turns it by its angle."""
    rows, num_heads, head_dim = inputs.q_out.shape
    x = inputs.qkv.double() if inputs.qkv.dim() == 2 else inputs.qkv.double().sum(0)
    if inputs.bias is not None:
        bias = inputs.bias.double().view(-1, x.shape[1])
        x = x + bias.repeat_interleave(rows // len(bias), 0)
    heads = x.view(rows, x.shape[1] // head_dim, 2, head_dim // 2)
    numbers = torch.complex(heads[:, :, 0], heads[:, :, 1])
    angle = angles(head_dim).to(DEVICE)[inputs.positions.long()][:, None]
    turned = numbers * torch.polar(torch.ones_like(angle), angle)
    turned[:, num_heads + inputs.kv_layer.shape[2] :] = numbers[:, num_heads + inputs.kv_layer.shape[2] :]
    return torch.cat((turned.real, turned.imag), -1).to(inputs.q_out.dtype)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    integers = torch.int32 if actual.dtype == torch.float32 else torch.int16
    assert torch.equal(actual.view(integers), expected.view(integers))


def assert_turns(inputs: Inputs, padding: int = 0) -> None:
    """Q, K and V against the model and bit for bit against the specification; every other slot as it was."""
    before = inputs.pool.clone()
    by_ref = replace(inputs, pool=before.clone(), q_out=torch.full_like(inputs.q_out, NAN))
    run(inputs)
    arguments = (by_ref.qkv, by_ref.rotation, by_ref.positions, by_ref.slots, by_ref.kv_layer, by_ref.q_out)
    qkv_rope_ref(*arguments, bias=by_ref.bias)
    real = slice(0, len(inputs.q_out) - padding)
    assert_near(written(inputs)[real], model(inputs)[real], BOUNDS)
    assert_same_bits(written(inputs)[real], written(by_ref)[real])
    assert_same_bits(inputs.q_out, by_ref.q_out)

    untouched = replace(inputs, pool=before)
    for state in (inputs, untouched):
        state.kv_layer[:, inputs.slots // PAGE_SIZE, :, inputs.slots % PAGE_SIZE] = 0
    assert_same_bits(inputs.pool, untouched.pool)


@each_dtype
@pytest.mark.parametrize(("head_dim", "num_heads", "num_kv_heads"), HEADS)
def test_rows_in_the_dtype(head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    for rows in (1, 2, 5):
        assert_turns(random_inputs(rows, head_dim, num_heads, num_kv_heads, dtype))


@each_dtype
@pytest.mark.parametrize("group", range(1, 9))
def test_groups_of_query_heads(group: int, dtype: torch.dtype) -> None:
    for num_kv_heads in (1, 3):
        assert_turns(random_inputs(2, 24, group * num_kv_heads, num_kv_heads, dtype))


@each_dtype
@pytest.mark.parametrize("splits", [1, 2, 3, 4])
def test_partial_sums_and_a_bias(splits: int, dtype: torch.dtype) -> None:
    for head_dim, groups in ((24, None), (64, 0), (80, 3)):
        assert_turns(random_inputs(3, head_dim, 4, 2, dtype, splits=splits, groups=groups))


@each_dtype
@pytest.mark.parametrize("groups", [0, 1, 2, 3])
def test_a_bias_by_group(groups: int, dtype: torch.dtype) -> None:
    assert_turns(random_inputs(6, 16, 4, 2, dtype, groups=groups))


@each_dtype
def test_63_rows(dtype: torch.dtype) -> None:
    assert_turns(random_inputs(63, 16, 4, 2, dtype))
    assert_turns(random_inputs(63, 24, 2, 1, dtype, splits=2, groups=3))


@each_dtype
def test_padding_rows_share_the_null_slot(dtype: torch.dtype) -> None:
    assert_turns(random_inputs(9, 24, 4, 2, dtype, padding=4), padding=4)
    assert_turns(random_inputs(3, 24, 4, 2, dtype, splits=2, groups=0, padding=3), padding=3)


@each_dtype
def test_a_row_has_the_same_bits_in_every_pass(dtype: torch.dtype) -> None:
    for options in ({}, {"splits": 3, "groups": 3}):
        inputs = random_inputs(63, 24, 4, 2, dtype, **options)
        run(inputs)
        expected = written(inputs)
        order = torch.randperm(63, generator=torch.Generator().manual_seed(1))
        for chosen in (order, order[:7], order[:2], order[:1], order[-1:]):
            alone = inputs.rows(chosen)
            run(alone)
            assert torch.equal(written(alone), expected[chosen.to(DEVICE)])


@each_dtype
def test_position_0_turns_nothing(dtype: torch.dtype) -> None:
    inputs = random_inputs(2, 24, 4, 2, dtype)
    inputs.positions.zero_()
    run(inputs)
    assert torch.equal(written(inputs), inputs.qkv.view(2, -1, 24))


def test_values_are_copied_even_where_they_are_not_finite() -> None:
    inputs = random_inputs(2, 24, 4, 2, torch.float32)
    inputs.qkv[0, 6 * 24 :] = float("inf")
    inputs.qkv[1, 6 * 24 + 3] = NAN
    run(inputs)
    assert_same_bits(written(inputs)[:, 6:], inputs.qkv.view(2, -1, 24)[:, 6:])
    assert written(inputs)[:, :6].isfinite().all()


def test_splits_may_lie_in_a_larger_buffer() -> None:
    inputs = random_inputs(3, 24, 4, 2, torch.float32, splits=3)
    buffer = torch.full((3, 8, 8 * 24), NAN, device=DEVICE)
    buffer[:, :3] = inputs.qkv
    assert_turns(replace(inputs, qkv=buffer[:, :3]))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_captured_pass_replays_at_new_slots() -> None:
    inputs = random_inputs(5, 24, 4, 2, torch.float16, splits=2, groups=0)
    run(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(inputs)
    fresh = replace(inputs.rows(torch.tensor([3, 1, 0, 4, 2])), slots=inputs.slots.flip(0))
    inputs.qkv.copy_(fresh.qkv)
    inputs.positions.copy_(fresh.positions)
    inputs.slots.copy_(fresh.slots)
    graph.replay()
    run(fresh)
    assert_same_bits(written(inputs), written(fresh))
