"""Workload of RoPE and the KV cache write, from the partial sums of a split QKV layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from treespec_kernels.aot.kernel_spec import PAGE_SIZE
from treespec_kernels.attention.qkv_rope import qkv_rope_ref, qkv_rope_triton

from .base import Setting, Tensors, Workload

SPLITS = 4


class RopeInputs(NamedTuple):
    qkv: torch.Tensor  # [splits, rows, (heads + 2 * kv_heads) * head_dim] fp32
    rotation: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    kv_layer: torch.Tensor
    q_out: torch.Tensor


class QkvRopeWorkload(Workload[RopeInputs]):
    """Rows at consecutive positions after `context`, with slots scattered over the pages of a cache."""

    op = "qkv_rope"

    def __init__(self, setting: Setting, rows: int):
        super().__init__(setting)
        shape = setting.shape
        self.shape, self.rows, self.context = shape, rows, setting.context
        self.heads = shape.num_heads + 2 * shape.num_kv_heads
        self.key = self.key_of(
            head_dim=shape.head_dim, heads=shape.num_heads, kv_heads=shape.num_kv_heads, splits=SPLITS
        )
        self.load = f"rows {rows}"
        numbers = rows * self.heads * shape.head_dim
        self.bytes = numbers * (4 * SPLITS + setting.dtype.itemsize) + rows * 2 * shape.head_dim * 4
        self.flops = numbers * (SPLITS + 3)

    def make(self, generator: torch.Generator) -> RopeInputs:
        shape, rows = self.shape, self.rows
        fp32: dict[str, Any] = {"generator": generator, "device": self.device, "dtype": torch.float32}
        qkv = torch.randn(SPLITS, rows, self.heads * shape.head_dim, **fp32)
        rotation = torch.randn(self.context + rows, 2, shape.head_dim, **fp32)
        pages = -(-rows // PAGE_SIZE) * 2 + 1
        slots = torch.randperm(pages * PAGE_SIZE, generator=generator, device=self.device)[:rows]
        positions = torch.arange(self.context, self.context + rows, dtype=torch.int32, device=self.device)
        kv_layer = self.random(generator, 2, pages, shape.num_kv_heads, PAGE_SIZE, shape.head_dim)
        q_out = torch.empty(rows, shape.num_heads, shape.head_dim, dtype=self.dtype, device=self.device)
        return RopeInputs(qkv, rotation, positions, slots, kv_layer, q_out)

    def run(self, config: Any, copy: int = 0) -> Tensors:
        """Return Q and the cache."""
        inputs = self.inputs[copy]
        qkv_rope_triton(*inputs)
        return inputs.q_out, inputs.kv_layer

    def expected(self) -> Tensors:
        inputs = self.inputs[0]
        written = inputs._replace(kv_layer=inputs.kv_layer.clone(), q_out=torch.empty_like(inputs.q_out))
        qkv_rope_ref(*written)
        return written.q_out, written.kv_layer

    def invariance_pairs(self, config: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        inputs = self.inputs[0]
        q, cache = self.run(config)
        for row in {0, self.rows - 1}:
            one = slice(row, row + 1)
            q_out, kv_layer = torch.empty_like(q[one]), torch.zeros_like(cache)
            positions, slots = inputs.positions[one], inputs.slots[one]
            qkv_rope_triton(inputs.qkv[:, one].contiguous(), inputs.rotation, positions, slots, kv_layer, q_out)
            page, offset = int(slots) // PAGE_SIZE, int(slots) % PAGE_SIZE
            yield q[one], q_out
            yield cache[:, page, :, offset], kv_layer[:, page, :, offset]

    def baselines(self) -> dict[str, Callable[[int], Any]]:
        """Return the reference in eager torch."""
        return {"torch": lambda copy: qkv_rope_ref(*self.inputs[copy])}


def workloads(setting: Setting) -> list[Workload]:
    rows = dict.fromkeys((1, setting.nodes, setting.requests * setting.nodes))
    return [QkvRopeWorkload(setting, n) for n in rows]
