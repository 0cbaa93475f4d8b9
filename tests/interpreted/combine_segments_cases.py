"""Cases of the kernel combine_segments by itself."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from tests.interpreted.common import DEVICE, assert_near, each_dtype
from treespec_kernels.attention.tree_attention_kernels import combine_segments
from treespec_kernels.launch.triton_launch import block_of, launch_options

HEADS = 2
BOUNDS = {torch.float32: (2e-6, 5e-7), torch.float16: (1e-2, 1e-3), torch.bfloat16: (8e-2, 8e-3)}
# A chunk is 16 segments, of heads above 128 it is 8.
COUNTS = [16, 0, 1, 33, 7, 8, 9, 0, 15, 17, 24]


class Partials(NamedTuple):
    """One row's segments."""

    acc: torch.Tensor  # fp32 [num_segments, HEADS, head_dim]
    max: torch.Tensor  # fp32 [num_segments, HEADS], in units of log2
    sum: torch.Tensor


def partials_of(count: int, head_dim: int, seed: int = 0) -> Partials:
    """Maxima so far from 0, on either side, that weights overflow or vanish where nothing is subtracted."""
    generator = torch.Generator().manual_seed(seed * 1000 + count)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    total = 0.5 + drawn(count, HEADS).abs()
    peak = (-1) ** seed * 200 + 3 * drawn(count, HEADS)
    return Partials(drawn(count, HEADS, head_dim) * total[..., None], peak, total)


def all_partials(head_dim: int) -> list[Partials]:
    return [partials_of(count, head_dim, seed) for seed, count in enumerate(COUNTS)]


def of_no_key(count: int, head_dim: int) -> Partials:
    """What a segment leaves of which a row sees no position, as under a window."""
    zeros = torch.zeros(count, HEADS, dtype=torch.float32, device="cpu")
    return Partials(zeros[..., None].repeat(1, 1, head_dim), zeros - torch.inf, zeros)


def joined(*parts: Partials) -> Partials:
    return Partials(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def combine(
    rows: Sequence[Partials], dtype: torch.dtype = torch.float32, stale: Sequence[float] = (torch.nan, torch.inf)
) -> torch.Tensor:
    """The rows' outputs, [num_rows, HEADS, head_dim]. Before, between and behind their partials stand others that are
    `stale`, more than a chunk of them."""
    head_dim = rows[0].acc.shape[2]
    old = [
        Partials(*(torch.full((20, *part.shape[1:]), value, dtype=torch.float32, device="cpu") for part in rows[0]))
        for value in stale
    ]
    parts, first = [old[0]], []
    for row, partials in enumerate(rows):
        first.append(sum(len(part.max) for part in parts))
        parts += [partials, old[row % len(old)]]
    buffers = [tensor.to(DEVICE) for tensor in joined(*parts)]
    counts = [len(partials.max) for partials in rows]
    tables = [torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (first, counts)]
    out = torch.full((len(rows), HEADS, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    combine_segments[(len(rows), HEADS)](
        *buffers,
        *tables,
        out,
        *out.stride()[:2],
        NUM_HEADS=HEADS,
        HEAD_DIM=head_dim,
        BLOCK_D=block_of(head_dim, 16),
        num_warps=1,
        enable_fp_fusion=False,
        **launch_options(False),
    )
    return out.cpu()


def expected_of(partials: Partials) -> torch.Tensor:
    """In float64 and all at once."""
    acc, peak, total = (tensor.double() for tensor in partials)
    if len(peak) == 0:
        return acc.sum(dim=0)
    weights = torch.exp2(peak - peak.amax(dim=0))
    return (acc * weights[..., None]).sum(dim=0) / (total * weights).sum(dim=0)[:, None]


@each_dtype
@pytest.mark.parametrize("head_dim", [48, 128, 256])
def test_any_number_of_segments(head_dim: int, dtype: torch.dtype) -> None:
    rows = all_partials(head_dim)
    out = combine(rows, dtype)
    for row, partials in enumerate(rows):
        if COUNTS[row] == 0:
            assert torch.equal(out[row], torch.zeros_like(out[row]))
        else:
            assert_near(out[row], expected_of(partials).to(dtype), BOUNDS)


@pytest.mark.parametrize("head_dim", [48, 256])
def test_the_bits_of_a_row_follow_from_its_own_segments(head_dim: int) -> None:
    """Not from other rows, from where its partials lie, or from what lies behind them."""
    rows = all_partials(head_dim)
    out = combine(rows)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3), device="cpu").tolist()
    assert torch.equal(combine([rows[row] for row in order], stale=(1.0, 7.0, -torch.inf)), out[order])
    for row, partials in enumerate(rows):
        assert torch.equal(combine([partials], stale=(0.0,))[0], out[row]), f"{COUNTS[row]} segments"


@pytest.mark.parametrize("head_dim", [16, 256])
def test_segments_without_a_key_change_nothing(head_dim: int) -> None:
    rows = all_partials(head_dim)
    out = combine(rows)
    behind = [joined(partials, of_no_key(35, head_dim)) for partials in rows]
    assert torch.equal(combine(behind), out)
    before = [joined(of_no_key(32, head_dim), partials) for partials in rows]  # whole chunks: the others stay together
    assert torch.equal(combine(before), out)
    before = [joined(of_no_key(5, head_dim), partials, of_no_key(1, head_dim)) for partials in rows]
    assert_near(combine(before), out, BOUNDS)


def test_a_nan_of_its_own_stays_with_its_row_and_head() -> None:
    rows = all_partials(16)
    clean = combine(rows)
    faulty = [row for row, count in enumerate(COUNTS) if count > 0]
    for row in faulty:
        rows[row].acc[-1, 1, 5] = torch.nan
    out = combine(rows)
    expected = clean.clone()
    expected[faulty, 1, 5] = torch.nan
    assert torch.equal(out.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))
    for row in faulty:
        rows[row].sum[-1, 1] = torch.nan
    expected[faulty, 1] = torch.nan
    assert torch.equal(combine(rows).nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))
