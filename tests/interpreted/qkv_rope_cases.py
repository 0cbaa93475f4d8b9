"""Cases of qkv_rope: the reference against complex numbers in float64, the kernel against the reference."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from tests.interpreted.common import (
    DEVICE,
    IMPLEMENTATION,
    NAN,
    assert_near,
    by_row,
    check,
    each_dtype,
    normal,
    split_sums,
)
from treespec_kernels.attention.qkv_rope import HeadNorm, qkv_rope_ref, qkv_rope_triton
from treespec_kernels.attention.tree_attention import whole_heads
from treespec_kernels.comparison import same_bits

MAX_POSITIONS, PAGE_SIZE, NUM_PAGES, EPS = 300, 4, 20, 1e-5
# (max, rms) error relative to the RMS of the output: one rounding of it, and of norms.
BOUNDS = {torch.float32: (3e-6, 3e-7), torch.float16: (5e-3, 5e-4), torch.bfloat16: (4e-2, 4e-3)}

qkv_rope = qkv_rope_ref if IMPLEMENTATION == "ref" else qkv_rope_triton


class Case(NamedTuple):
    rows: int
    head_dim: int
    heads: int
    kv_heads: int
    splits: int | None = None  # None: rows in the dtype
    bias_groups: int | None = None  # None: no bias, 0: one of all rows
    norm_groups: int | None = None  # the same of norms of heads
    rotates: bool = True
    wide: bool = False
    last: bool = False
    q_rotates: bool = False  # Q by another table
    values: bool = False  # V is normalised
    planes: tuple[int, int] | None = None  # their heads, and the size of these; None: whole heads


CASES = [
    Case(1, 2, 1, 1),
    Case(5, 8, 8, 1),
    Case(2, 24, 3, 3, 1),
    Case(3, 80, 4, 2, 3, 3),
    Case(3, 64, 8, 2, 2, 0),
    Case(6, 16, 4, 2, None, 3),
    Case(1, 600, 2, 1, 4, 0),
    Case(3, 24, 5, 1, 2, None, 0, False),
    Case(4, 16, 3, 1, 2, None, 2),
    Case(6, 16, 3, 1, 3, 3, 2),
    Case(2, 16, 4, 2, rotates=False),
    Case(3, 24, 5, 1, 2, 0, 0, wide=True),
    Case(4, 16, 34, 17, None, 2, 2, wide=True),
    Case(3, 24, 3, 1, 2, 0, 0, last=True),
    Case(3, 24, 3, 2, 2, q_rotates=True),
    Case(3, 24, 4, 2, 2, norm_groups=0, values=True, planes=(1, 8)),
    Case(2, 16, 4, 4, planes=(2, 16)),
    Case(2, 32, 4, 2, None, 0, planes=(2, 16)),
    Case(3, 16, 4, 0, 2, norm_groups=0),
]


def angles(head_dim: int) -> torch.Tensor:
    """[MAX_POSITIONS, head_dim / 2] in float64."""
    inv_freq = 100.0 ** -(torch.arange(head_dim // 2).double() / (head_dim // 2))
    return (torch.arange(MAX_POSITIONS).double()[:, None] * inv_freq).to(DEVICE)


def arguments_of(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """Rows in any slots of the middle layer of a pool, whose pattern shows a write to a wrong slot."""
    draw, generator = normal(case.rows + case.head_dim), torch.Generator().manual_seed(case.rows)
    width = (case.heads + 2 * case.kv_heads) * case.head_dim
    cos, sin = angles(case.head_dim).cos(), angles(case.head_dim).sin()
    rotation = torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1).float()
    heads, part_dim = case.planes or (case.kv_heads, case.head_dim)
    planes = case.kv_heads * case.head_dim // max(heads * part_dim, 1)
    pool = torch.empty(2 + max(planes, 1), NUM_PAGES, 2, PAGE_SIZE, heads, part_dim, device=DEVICE)
    pattern = 1000.0 + torch.arange(pool.numel(), device=DEVICE) % 1000
    pattern[::3] = NAN
    layers = pattern.to(dtype).view(pool.shape).permute(0, 2, 1, 4, 3, 5)
    arguments: dict[str, Any] = {
        "qkv": split_sums(draw, case.splits, case.rows, width, dtype=dtype),
        "rotation": rotation if case.rotates else None,
        "positions": torch.randint(MAX_POSITIONS, (case.rows,), generator=generator).int().to(DEVICE),
        "slots": torch.randperm(NUM_PAGES * PAGE_SIZE, generator=generator)[: case.rows].to(DEVICE),
        "kv_layer": None if not planes else layers[1] if case.planes is None else layers[1 : 1 + planes],
        "q_out": torch.full((case.rows, case.heads, case.head_dim), NAN, dtype=dtype, device=DEVICE),
    }
    if case.q_rotates:
        arguments["q_rotation"] = rotation * 1.5
    if case.bias_groups is not None:
        arguments["bias"] = draw(*[case.bias_groups] * (case.bias_groups > 0), width, dtype=dtype)
    if case.norm_groups is not None:
        heads = (case.heads, case.kv_heads) if case.wide else (1, 1)
        sizes = ((*[case.norm_groups] * (case.norm_groups > 0), count * case.head_dim) for count in heads)
        weights = (1 + draw(*size, dtype=dtype) / 4 for size in sizes)
        arguments["norm"] = HeadNorm(*weights, EPS, case.wide, case.last, case.values)
    return arguments


def written(arguments: dict[str, Any]) -> torch.Tensor:
    """[rows, num_heads + 2 * num_kv_heads, head_dim]: Q, and what lies in the rows' slots."""
    slots, q, cache = arguments["slots"], arguments["q_out"], arguments["kv_layer"]
    if cache is None:
        return q
    parts = cache.unbind(-5)  # K and V
    rows = [whole_heads(part, q.shape[2])[slots // PAGE_SIZE, :, slots % PAGE_SIZE] for part in parts]
    return torch.cat((q, *rows), 1)


def model(arguments: dict[str, Any]) -> torch.Tensor:
    """The same in float64: a pair of dimensions is a complex number, and a position turns it by its angle."""
    rows, heads, head_dim = arguments["q_out"].shape
    kv_heads = (arguments["qkv"].shape[-1] // head_dim - heads) // 2
    x = arguments["qkv"].double().view(-1, rows, (heads + 2 * kv_heads) * head_dim).sum(0)

    x = x + by_row(arguments["bias"], rows) if "bias" in arguments else x
    q, k, v = x.view(rows, -1, head_dim).split((heads, kv_heads, kv_heads), 1)

    def normed(q: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
        weights = [by_row(weight, rows)[:, None] for weight in arguments["norm"][:2]]
        parts = [x.reshape(rows, -1, weight.shape[-1]) for x, weight in zip((q, k), weights, strict=True)]
        pairs = zip(parts, weights, strict=True)
        return [(F.rms_norm(x, x.shape[2:], eps=EPS) * weight).view(rows, -1, head_dim) for x, weight in pairs]

    last = "norm" in arguments and arguments["norm"].last
    if "norm" in arguments and not last:
        q, k = normed(q, k)
    if "norm" in arguments and arguments["norm"].of_values:
        v = F.rms_norm(v, v.shape[2:], eps=EPS)
    turned = torch.cat((q, k), 1)
    if arguments["rotation"] is not None:
        first, second = turned.chunk(2, -1)
        angle = angles(head_dim)[arguments["positions"].long()][:, None]
        numbers = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
        turned = torch.cat((numbers.real, numbers.imag), -1)
    if "q_rotation" in arguments:
        turned[:, :heads] *= 1.5
    if last:
        turned = torch.cat(normed(*turned.split((heads, kv_heads), 1)), 1)
    return torch.cat((turned, v), 1).to(arguments["q_out"].dtype)


@each_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows(case: Case, dtype: torch.dtype) -> None:
    """Without a norm bit for bit, every other slot included."""
    arguments = arguments_of(case, dtype)
    if IMPLEMENTATION == "ref":
        expected = model(arguments)
        qkv_rope(**arguments)
        assert_near(written(arguments), expected, BOUNDS)
        return

    def near_where_written(results: dict[str, torch.Tensor], right: dict[str, torch.Tensor], config: Any) -> None:
        sides = [arguments | {name: tensor.clone() for name, tensor in side.items()} for side in (results, right)]
        assert_near(*map(written, sides), BOUNDS)
        for side in sides:
            if side["kv_layer"] is not None:
                side["kv_layer"][..., arguments["slots"] // PAGE_SIZE, :, arguments["slots"] % PAGE_SIZE, :] = 0
        assert case.kv_heads == 0 or same_bits(*(side["kv_layer"] for side in sides))

    changes: dict[str, Any] = {"exact": True} if case.norm_groups is None else {"compare": near_where_written}
    grouped = ("bias", "norm") if case.bias_groups or case.norm_groups else ()
    check("qkv_rope", arguments, num_rows=case.rows, grouped=grouped, **changes)


@each_dtype
def test_padding_rows_share_the_null_slot(dtype: torch.dtype) -> None:
    whole, padded = (arguments_of(Case(9, 24, 4, 2), dtype) for _ in range(2))
    padded["slots"][5:], padded["positions"][5:] = 0, 0
    qkv_rope(**whole)
    qkv_rope(**padded)
    assert same_bits(written(padded)[:5], written(whole)[:5])
    assert padded["q_out"].isfinite().all()
