"""Workload of KV commit: accepted paths in all layers of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from treespec_kernels.attention.kv_commit import kv_commit_ref, kv_commit_triton
from treespec_kernels.tuning.testing import KvCommitInputs, kv_commit_inputs

from .base import Setting, Tensors, Workload

CONTEXT = 64  # maximum of committed positions, which do not move; copies of a long context would fill a GPU


class KvCommitWorkload(Workload[KvCommitInputs]):
    """Commit of a path of every second node of each request's tree, so that all nodes but the root move.

    Repeated commits of the same path move other values between the same slots, which takes the same time.
    """

    op, exact = "kv_commit", ("the cache",)

    def __init__(self, setting: Setting, requests: int, path: int):
        super().__init__(setting)
        shape, self.requests = setting.shape, requests
        self.path = list(range(0, 2 * path, 2))
        self.key = self.key_of(head_dim=shape.head_dim, kv_heads=shape.num_kv_heads, layers=setting.layers)
        self.load = f"requests {requests}, path {path}"
        moved = requests * (path - 1) * setting.layers * 2 * shape.num_kv_heads * shape.head_dim
        self.bytes = 2 * moved * shape.dtype.itemsize

    def make(self, generator: torch.Generator) -> KvCommitInputs:
        setting, shape = self.setting, self.setting.shape
        inputs = kv_commit_inputs(
            [min(setting.context, CONTEXT) + 17 * i for i in range(self.requests)],
            [self.path] * self.requests,
            num_layers=setting.layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_size=64,
            dtype=torch.int16 if shape.dtype.itemsize == 2 else torch.int32,
            seed=generator.initial_seed(),
        )
        cache = inputs.kv_cache.view(shape.dtype).to(self.device)
        rest = (inputs.page_table, inputs.context_lens, inputs.paths, inputs.path_lens)
        return KvCommitInputs(cache, *(tensor.to(self.device) for tensor in rest))

    def reset(self, inputs: KvCommitInputs) -> None:
        cache = self._integers(inputs.kv_cache)
        cache.copy_(torch.arange(cache.numel(), device=self.device).view(cache.shape).to(cache.dtype))

    def run(self, config: Any, copy: int = 0) -> Tensors:
        kv_commit_triton(*_arguments(self.inputs[copy]))
        return (self._integers(self.inputs[copy].kv_cache),)

    def expected(self) -> Tensors:
        inputs = self.inputs[0]
        cache = inputs.kv_cache.clone()
        kv_commit_ref(cache, *_arguments(inputs)[1:])
        return (self._integers(cache),)

    def baselines(self) -> dict[str, Callable[[int], Any]]:
        return {"torch": lambda copy: kv_commit_ref(*_arguments(self.inputs[copy]))}

    @staticmethod
    def _integers(cache: torch.Tensor) -> torch.Tensor:
        """Return the cache as integers, since some of its bit patterns are NaN."""
        return cache.view(torch.int16 if cache.element_size() == 2 else torch.int32)


def _arguments(inputs: KvCommitInputs) -> Tensors:
    return inputs.kv_cache, inputs.page_table, inputs.context_lens, inputs.paths, inputs.path_lens


def workloads(setting: Setting) -> list[Workload]:
    path = max(2, min(6, setting.nodes // 2))
    return [KvCommitWorkload(setting, requests, path) for requests in (1, setting.requests)]
