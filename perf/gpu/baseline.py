"""Static-cache Llama in plain torch, to be compiled as a whole, as gpt-fast does (github.com/meta-pytorch/gpt-fast).

Decodes one token per request. QKV and gate-up are fused weights, the cache has a fixed size, and SDPA masks it by
position. The query heads of a KV head are rows of one matrix product, so K and V are read once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treespec.config import ModelConfig


class StaticLlama(nn.Module):
    """Llama with a cache of `length` positions for `batch` requests.

    Args:
        config: the model's configuration.
        weights: tensors by the names of `ModelShape.parameters`; they are used up.
        batch, length: of the cache.
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], batch: int, length: int):
        super().__init__()
        shape, self.eps, [rope] = config.shape, config.norm_eps, config.ropes
        embed = weights.pop("embed")
        angles = torch.arange(length, device=embed.device, dtype=torch.float32)[:, None] * rope.inv_freq.to(
            embed.device
        )
        tensors = {"embed": embed, "norm": weights.pop("final_norm"), "cos": angles.cos(), "sin": angles.sin()}
        tensors["head"] = embed if shape.tied else weights.pop("lm_head")
        tensors["all_positions"] = torch.arange(length, device=embed.device, dtype=torch.int64)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.layers = nn.ModuleList(
            StaticLayer(config, {name: weights.pop(f"layers.{i}.{name}") for name in NAMES}, batch, length)
            for i in range(shape.num_layers)
        )

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Return the logits of tokens [batch] at one position, int64 [1], as [batch, vocab_size]."""
        stream, visible = F.embedding(tokens, self.embed), self.all_positions <= position
        cos, sin = self.cos[position], self.sin[position]  # fp32 [1, head_dim / 2]
        for layer in self.layers:
            stream = layer(stream, position, visible, cos, sin)
        return F.linear(rms_norm(stream, self.norm, self.eps), self.head)


class StaticLayer(nn.Module):
    """Layer of `StaticLlama`. Buffers have fixed addresses, so CUDA graphs read them in place."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], batch: int, length: int):
        super().__init__()
        shape, self.eps = config.shape, config.norm_eps
        self.heads, self.kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        tensors = {name: weights[name] for name in ("attn_norm", "o", "mlp_norm", "down")}
        tensors["qkv"] = torch.cat([weights[name] for name in "qkv"])
        tensors["gate_up"] = torch.cat([weights[name] for name in ("gate", "up")])
        tensors["cache"] = weights["q"].new_zeros(2, batch, self.kv_heads, length, self.head_dim)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, stream: Tensor, position: Tensor, visible: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch = len(stream)
        qkv = F.linear(rms_norm(stream, self.attn_norm, self.eps), self.qkv).view(batch, -1, self.head_dim)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        self.cache[:, :, :, position] = torch.stack([rotated(k, cos, sin), v])[:, :, :, None]
        q = rotated(q, cos, sin).view(batch, self.kv_heads, -1, self.head_dim)
        mixed = F.scaled_dot_product_attention(q, self.cache[0], self.cache[1], attn_mask=visible[None, None, None])
        stream = stream + F.linear(mixed.reshape(batch, -1), self.o)
        gate, up = F.linear(rms_norm(stream, self.mlp_norm, self.eps), self.gate_up).chunk(2, dim=-1)
        return stream + F.linear(F.silu(gate) * up, self.down)


NAMES = ("attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) * weight


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to heads [batch, heads, head_dim]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
