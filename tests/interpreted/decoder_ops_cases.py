"""A decoder's layers from rms_norm and qkv_rope, against the CPU's decoder."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.interpreted.common import DEVICE, IMPLEMENTATION
from treespec.models.decoder import Decoder
from treespec.models.layer_kinds import LayerKind, Rope
from treespec.models.model_config import ModelConfig
from treespec_kernels.attention.qkv_rope import qkv_rope_ref, qkv_rope_triton
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.linear.rms_norm import Norm, rms_norm_ref, rms_norm_triton
from treespec_kernels.tuning.testing import assert_close
from treespec_weights import LLAMA

rms_norm: Any = {"ref": rms_norm_ref, "triton": rms_norm_triton}[IMPLEMENTATION]
qkv_rope: Any = {"ref": qkv_rope_ref, "triton": qkv_rope_triton}[IMPLEMENTATION]

VOCAB, HIDDEN, INTERMEDIATE, LAYERS, EPS = 50, 36, 40, 2, 1e-5


class Echo:
    """An attention that returns its queries and keeps them, as the layers after it need an answer but no keys."""

    name, cache_dtype = "echo", torch.float32

    def __init__(self) -> None:
        self.queries: list[torch.Tensor] = []

    def plan(self, requests: list[RequestRows], num_rows: int, window: int | None = None) -> None:
        return None

    def __call__(self, q: torch.Tensor, *_: Any) -> torch.Tensor:
        self.queries.append(q)
        return q


def config_of(shape: Any, inv_freq: torch.Tensor, scale: float) -> ModelConfig:
    """A Llama of that shape and rope."""
    rope = Rope(inv_freq, torch.full_like(inv_freq, scale), 2 * len(inv_freq))
    return ModelConfig(
        folder=Path("random"),
        rules=LLAMA,
        shape=shape,
        norm_eps=EPS,
        activation="silu",
        parallel=False,
        query_scale=shape.head_dim**-0.5,
        score_cap=None,
        logit_cap=None,
        embed_scale=1.0,
        ropes=(rope,),
        layers=(LayerKind(0, None),) * LAYERS,
        max_positions=256,
        dtype=torch.float32,
        eos_token_ids=(),
    )


def random_weights(num_heads: int, num_kv_heads: int, head_dim: int, bias: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(head_dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    weights = {"embed": normal(VOCAB, HIDDEN) * 6, "final_norm": 1 + normal(HIDDEN)}
    for i in range(LAYERS):
        sizes = {
            "q": (num_heads * head_dim, HIDDEN),
            "k": (num_kv_heads * head_dim, HIDDEN),
            "v": (num_kv_heads * head_dim, HIDDEN),
            "o": (HIDDEN, num_heads * head_dim),
            "gate": (INTERMEDIATE, HIDDEN),
            "up": (INTERMEDIATE, HIDDEN),
            "down": (HIDDEN, INTERMEDIATE),
        }
        for name, size in sizes.items():
            weights[f"layers.{i}.{name}"] = normal(*size)
            if bias:
                weights[f"layers.{i}.{name}_bias"] = normal(size[0])
        for name in ("attn_norm", "mlp_norm"):
            weights[f"layers.{i}.{name}"] = 1 + normal(HIDDEN)
    return weights


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (3, 3, 24), (5, 1, 10)])
def test_layers_agree_with_the_cpu_decoder(num_heads: int, num_kv_heads: int, head_dim: int, bias: bool) -> None:
    weights = random_weights(num_heads, num_kv_heads, head_dim, bias)
    shape = SimpleNamespace(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=VOCAB,
        num_layers=LAYERS,
        tied=True,
        gated=True,
    )
    config = config_of(shape, 50.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2)), 1.2)
    echo = Echo()
    decoder = Decoder(config, dict(weights), echo, "torch", min_rows=8)
    # A chain behind 62 positions, over a border of pages, then a tree's root; a row of padding.
    requests = [
        RequestRows.chain(62, 6, np.array([2, 1])),
        RequestRows.chain(0, 1, np.array([3])),
    ]
    pool = torch.full((LAYERS, 2, 4, num_kv_heads, PAGE_SIZE, head_dim), float("nan"))
    tokens = torch.randint(VOCAB, (7,), generator=torch.Generator().manual_seed(0))
    layout = decoder.plan(requests, pool)
    expected = decoder.forward(tokens, layout, pool)

    weights = {name: weight.to(DEVICE) for name, weight in weights.items()}
    positions = torch.tensor([62, 63, 64, 65, 66, 67, 0, 0], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([190, 191, 64, 65, 66, 67, 192, 0], device=DEVICE)
    rotation = decoder.rotations[0].lookup(np.arange(68)).to(DEVICE)
    own_pool = torch.full_like(pool, float("nan"), device=DEVICE)
    stream = F.embedding(F.pad(tokens, (0, 1)).to(DEVICE), weights["embed"])
    normed = rms_norm(stream, Norm(weights["layers.0.attn_norm"], EPS))
    for i in range(LAYERS):
        own = {name.split(".")[2]: w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        biases = {name: own.get(f"{name}_bias") for name in ("o", "down")}
        qkv = normed @ torch.cat((own["q"], own["k"], own["v"])).T
        qkv_bias = torch.cat((own["q_bias"], own["k_bias"], own["v_bias"])) if bias else None
        q = torch.full((8, num_heads, head_dim), float("nan"), device=DEVICE)
        qkv_rope(qkv, rotation, positions, slots, own_pool[i], q, bias=qkv_bias)
        assert_close(q.cpu(), echo.queries[i], max_error=2e-5, rms_error=2e-6)
        # As a layer split over its inputs would hand them on.
        halves = (q.view(8, -1) @ own["o"].T).repeat(2, 1, 1) / 2
        normed = rms_norm(halves, Norm(own["mlp_norm"], EPS), residual=stream, bias=biases["o"])
        gate, up = (F.linear(normed, own[name], own.get(f"{name}_bias")) for name in ("gate", "up"))
        down = (F.silu(gate) * up) @ own["down"].T
        following = weights["final_norm"] if i + 1 == LAYERS else weights[f"layers.{i + 1}.attn_norm"]
        normed = rms_norm(down, Norm(following, EPS), residual=stream, bias=biases["down"])
    assert_close(normed.cpu(), expected, max_error=2e-5, rms_error=2e-6)

    own_pool = own_pool.cpu()
    assert torch.equal(own_pool.isnan(), pool.isnan())
    assert_close(own_pool.nan_to_num(), pool.nan_to_num(), max_error=2e-5, rms_error=2e-6)


def test_a_turn_has_the_bits_of_the_cpu_decoder() -> None:
    num_heads, num_kv_heads, head_dim = 4, 2, 24
    rows = RequestRows.chain(60, 9, np.array([1, 2]))
    qkv = torch.randn(9, (num_heads + 2 * num_kv_heads) * head_dim, generator=torch.Generator().manual_seed(0))
    shape = SimpleNamespace(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, vocab_size=VOCAB, num_layers=0, tied=True
    )
    config = config_of(shape, 50.0 ** -(torch.arange(12) / 12), 1.0)
    weights = {"embed": torch.zeros(VOCAB, HIDDEN), "final_norm": torch.zeros(HIDDEN)}
    echo = Echo()
    decoder = Decoder(config, weights, echo, "torch")
    pool = torch.zeros(1, 2, 3, num_kv_heads, PAGE_SIZE, head_dim)
    layout = decoder.plan([rows], pool)
    layer: Any = SimpleNamespace(o=lambda x: x, head_norm=None, rope=0, window=0)
    decoder._attend(layer, qkv.clone(), layout.rotation.split(1, 1), layout, pool[0])

    own_pool, q = torch.zeros_like(pool, device=DEVICE), torch.zeros(9, num_heads, head_dim, device=DEVICE)
    pages, offsets = rows.slots
    slots = torch.from_numpy(pages * PAGE_SIZE + offsets).to(DEVICE)
    positions = torch.from_numpy(rows.positions).int().to(DEVICE)
    rotation = decoder.rotations[0].lookup(np.arange(80)).to(DEVICE)
    qkv_rope(qkv.to(DEVICE), rotation, positions, slots, own_pool[0], q)
    assert torch.equal(q.cpu(), echo.queries[0])
    assert torch.equal(own_pool.cpu(), pool)
