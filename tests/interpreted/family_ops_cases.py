"""What families other than Llama need of the ops, against their specifications and against torch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.interpreted.common import DEVICE, IMPLEMENTATION, assert_near, each_dtype
from treespec_kernels.attention.qkv_rope import HeadNorm, qkv_rope_ref, qkv_rope_triton
from treespec_kernels.attention.tree_attention import (
    AttentionShape,
    TreeAttentionConfig,
    plan_tree_attention,
    tree_attention_ref,
    tree_attention_triton,
)
from treespec_kernels.attention.tree_attention_config import SegmentPartition
from treespec_kernels.linear.activations import ACTIVATIONS
from treespec_kernels.linear.lm_head import BlockStats, LmHeadConfig, block_stats_ref, lm_head_ref, lm_head_triton
from treespec_kernels.linear.rms_norm import Norm, rms_norm_ref, rms_norm_triton
from treespec_kernels.linear.row_linear import RowLinearConfig, row_linear_ref, row_linear_triton
from treespec_kernels.tuning.testing import tree_attention_inputs, tree_parents

EPS = 1e-5
# (max, rms) error relative to the RMS of the result: roundings of the stream, of what it takes up and of the norm.
BOUNDS = {torch.float32: (1e-5, 2e-6), torch.float16: (1e-2, 1e-3), torch.bfloat16: (8e-2, 8e-3)}

triton_alone = pytest.mark.skipif(IMPLEMENTATION == "ref", reason="torch's sums follow the shape")


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert_near(actual, expected.to(actual.dtype), BOUNDS)


# --- norms


def norm_options(hidden: int, kind: str, dtype: torch.dtype, groups: int = 1) -> dict[str, Any]:
    """Weights of a norm with all that it may have."""
    held = torch.float32 if kind == "rms_plus_one" else dtype
    options: dict[str, Any] = {"kind": kind, "weight": 1 + normal(groups, hidden).to(held) / 4}
    options["post_weight"] = (1 + normal(groups, hidden, dtype=held).flip(1) / 3) if kind != "layer" else None
    options["shift"] = normal(groups, hidden, dtype=dtype).flip(1) if kind == "layer" else None
    options["weight"] = options["weight"].to(held)
    return options


def normed(x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    op = rms_norm_ref if IMPLEMENTATION == "ref" else rms_norm_triton
    return op(x, Norm(eps=EPS, **options), residual=residual, bias=bias)


@each_dtype
@pytest.mark.parametrize("kind", ["rms", "rms_plus_one", "layer"])
def test_norms(kind: str, dtype: torch.dtype) -> None:
    """Against torch in float64; a mean of 3 shows whether it is taken away."""
    for rows, hidden, groups in ((2, 123, 1), (4, 64, 2)):
        options = norm_options(hidden, kind, dtype, groups)
        x, residual, bias = normal(2, rows, hidden), 3 + normal(rows, hidden, dtype=dtype), normal(hidden, dtype=dtype)

        def of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            weight = weight.double().repeat_interleave(len(x) // len(weight), 0)
            if kind == "layer":
                return F.layer_norm(x, x.shape[1:], eps=EPS) * weight
            return F.rms_norm(x, x.shape[1:], eps=EPS) * weight

        added = x.double().sum(0) + bias.double()
        if options["post_weight"] is not None:
            added = of(added, options["post_weight"])
        stream = residual.double() + added
        expected = of(stream.to(dtype).double(), options["weight"])
        if options["shift"] is not None:
            expected = expected + options["shift"].double().repeat_interleave(rows // groups, 0)
        out = normed(x, residual, bias=bias, **options)
        close(residual, stream)
        close(out, expected)
        assert out.dtype == dtype


@each_dtype
@triton_alone
@pytest.mark.parametrize("kind", ["rms_plus_one", "layer"])
def test_a_normed_row_has_the_same_bits_alone(kind: str, dtype: torch.dtype) -> None:
    x, stream, options = normal(3, 7, 122), normal(7, 122, dtype=dtype), norm_options(122, kind, dtype)
    residual = stream.clone()
    company = normed(x, residual, **options)
    for row in (0, 6):
        own = stream[row : row + 1].clone()
        assert torch.equal(normed(x[:, row : row + 1].clone(), own, **options)[0], company[row])
        assert torch.equal(own[0], residual[row])


# --- heads


def turned(
    qkv: torch.Tensor, num_heads: int, head_dim: int, norm: HeadNorm | None, rotates: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Q, and the layer's cache with the rows in slots 3, 4, ..; one KV head, positions 5, 6, .."""
    rows = qkv.shape[-2]
    dtype = torch.float32 if norm is None else norm.q_weight.dtype
    kv = torch.zeros(2, 1, 1, 16, head_dim, dtype=dtype, device=DEVICE)
    q = torch.full((rows, num_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    angle = torch.arange(32, device=DEVICE)[:, None] * 0.3 ** torch.arange(head_dim // 2, device=DEVICE)
    sin = angle.sin()
    table = torch.stack((torch.cat((angle.cos(), angle.cos()), 1), torch.cat((-sin, sin), 1)), 1) if rotates else None
    places = 5 + torch.arange(rows, dtype=torch.int32, device=DEVICE), 3 + torch.arange(rows, device=DEVICE)
    op = qkv_rope_ref if IMPLEMENTATION == "ref" else qkv_rope_triton
    op(qkv, table, *places, kv, q, norm=norm)
    return q, kv


@each_dtype
def test_norms_of_heads(dtype: torch.dtype) -> None:
    heads, head_dim = 5, 24
    qkv, weight = normal(2, 3, (heads + 2) * head_dim), 1 + normal(head_dim, dtype=dtype) / 4
    norm = HeadNorm(weight, weight.flip(0).contiguous(), EPS)
    q, kv = turned(qkv, heads, head_dim, norm, rotates=False)
    whole = qkv.sum(0).view(3, heads + 2, head_dim)
    unit = F.rms_norm(whole.double(), (head_dim,), eps=EPS)
    close(q, unit[:, :heads] * norm.q_weight.double())
    close(kv[0, 0, 0, 3:6], unit[:, heads] * norm.k_weight.double())
    close(kv[1, 0, 0, 3:6], whole[:, heads + 1])

    # Turning keeps the length of every pair.
    q_turned, kv_turned = turned(qkv, heads, head_dim, norm, rotates=True)
    for plain, other in ((q, q_turned), (kv[0, 0, 0, 3:6], kv_turned[0, 0, 0, 3:6])):
        pairs = [part.double().unflatten(-1, (2, -1)).square().sum(-2).sqrt() for part in (plain, other)]
        close(pairs[1].to(dtype), pairs[0])
        assert not torch.equal(plain, other)


@triton_alone
def test_norms_of_heads_by_group_and_by_row() -> None:
    heads, head_dim, rows = 3, 16, 4
    qkv, weights = normal(2, rows, (heads + 2) * head_dim), normal(2, head_dim)
    norm = HeadNorm(weights, weights.flip(1).contiguous(), EPS)
    q, _ = turned(qkv, heads, head_dim, norm, rotates=True)
    for row in range(rows):
        own = HeadNorm(*(part[row // 2].contiguous() for part in norm[:2]), EPS)
        fewer, _ = turned(qkv[:, : row + 1], heads, head_dim, own, rotates=True)
        assert torch.equal(fewer[row], q[row])


def test_without_positions_heads_are_copied() -> None:
    qkv = normal(3, 6 * 16)
    q, kv = turned(qkv, 4, 16, None, rotates=False)
    heads = qkv.view(3, 6, 16)
    assert torch.equal(q, heads[:, :4]) and torch.equal(kv[:, 0, 0, 3:6], heads[:, 4:].transpose(0, 1))


# --- the MLP


@each_dtype
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activations(activation: str, gated: bool, dtype: torch.dtype) -> None:
    """Behind the bias, in one launch and behind splits; as torch has them."""
    x, weight, bias = normal(3, 64, dtype=dtype), normal(38, 64, dtype=dtype) / 4, normal(38, dtype=dtype)
    known = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh")}
    y = F.linear(x.double(), weight.double(), bias.double())
    expected = known[activation](y[:, :19]) * y[:, 19:] if gated else known[activation](y)
    options: dict[str, Any] = {"bias": bias, "silu_gate": gated, "activation": activation}
    if IMPLEMENTATION == "ref":
        close(row_linear_ref(x, weight, **options), expected)
        return
    for split_k in (1, 2):
        config = RowLinearConfig(16, 32, 32, split_k, 4, 2)
        out = row_linear_triton(x, weight, **options, config=config)
        close(out, expected)
        assert torch.equal(row_linear_triton(x[2:], weight, **options, config=config)[0], out[2])


# --- caps


@each_dtype
def test_capped_logits(dtype: torch.dtype) -> None:
    x, weight = normal(3, 48, dtype=dtype), normal(70, 48, dtype=dtype)
    config = LmHeadConfig(16, 32, 32, 4, 2)
    op = lm_head_ref if IMPLEMENTATION == "ref" else lm_head_triton
    head = op(x, weight, config=config, logit_cap=4.0)
    expected = 4.0 * torch.tanh(x.double() @ weight.double().T / 4.0)
    assert expected.abs().max() > 3.5
    close(head.logits, expected)
    right = block_stats_ref(head.logits, 32)
    assert torch.equal(head.stats.values, right.values) and torch.equal(head.stats.tokens, right.tokens)
    assert isinstance(head.stats, BlockStats)


PARENTS = tree_parents("random", 4, torch.Generator().manual_seed(1))
SMALL = TreeAttentionConfig(16, 16, 4, 2, SegmentPartition(32, 64, 64))


@each_dtype
@pytest.mark.parametrize("window", [None, 19])
def test_capped_scores(window: int | None, dtype: torch.dtype) -> None:
    """The specification by its definition; the kernel by the specification."""
    shape = AttentionShape(2, 1, 16, dtype, window)
    inputs = tree_attention_inputs([37], [PARENTS], shape, device=DEVICE, seed=3)
    caches, rows = (inputs.k_cache, inputs.v_cache), inputs.rows | {"scale": 0.7, "window": window}
    expected = tree_attention_ref(inputs.q, *caches, **rows, score_cap=1.5)
    if IMPLEMENTATION == "ref":
        pages, length = rows["page_table"][0].long(), 37
        slots = torch.arange(length + 1 if window is None else window) + (0 if window is None else length + 1 - window)
        page_size = caches[0].shape[2]
        keys, values = (part[pages[slots // page_size], :, slots % page_size].double() for part in caches)
        scores = torch.einsum("hd,nhd->hn", inputs.q[0].double(), keys.repeat_interleave(2, 1)) * 0.7
        weights = (1.5 * torch.tanh(scores / 1.5)).softmax(-1)
        close(expected[0], torch.einsum("hn,nhd->hd", weights, values.repeat_interleave(2, 1)))
        return
    plan = plan_tree_attention(**inputs.plan, shape=shape, device=DEVICE, config=SMALL)
    close(tree_attention_triton(inputs.q, *caches, **rows, score_cap=1.5, plan=plan), expected)
