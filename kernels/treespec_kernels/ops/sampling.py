"""Entries of the sampling ops: row top-k and logit transforms."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from treespec_kernels.ops.linear import key_of
from treespec_kernels.ops.op import Case, Inputs, Op
from treespec_kernels.ops.shapes import Setting
from treespec_kernels.sampling.coupled_choice import RowNoise
from treespec_kernels.sampling.logit_transforms import (
    IN_PROMPT,
    TransformInputs,
    logit_transforms_ref,
    logit_transforms_triton,
)
from treespec_kernels.sampling.row_topk import MAX_K, row_topk_ref, row_topk_triton

K = 4  # k of the timed top-k


def _noise(setting: Setting, rows: int) -> RowNoise:
    """Return temperature 0.8 and the noise keys of consecutive positions."""
    positions = torch.arange(rows, device=setting.device)
    temperatures = torch.full((rows,), 0.8, device=setting.device, dtype=torch.float32)
    return RowNoise(temperatures, torch.full_like(positions, 7), torch.zeros_like(positions), positions)


def _case(
    op: Op,
    setting: Setting,
    rows: int,
    load: str,
    complete: Callable[[torch.Tensor], dict[str, Any]],
    weight: float = 1.0,
    **key: int,
) -> Case:
    """Return a case over rows of logits; `complete` adds the op's other arguments."""
    vocab = setting.shape.vocab_size

    def make(generator: torch.Generator) -> Inputs:
        return Inputs(complete(setting.random(generator, rows, vocab, scale=2.0)))

    moved = rows * vocab * setting.dtype.itemsize
    return Case(op, setting, key_of(setting, vocab_size=vocab, **key), load, make, moved, weight, rows)


def _topk_arguments(setting: Setting, k: int, noisy: bool, logits: torch.Tensor) -> dict[str, Any]:
    return {"logits": logits, "k": k} | ({"noise": _noise(setting, len(logits))} if noisy else {})


def _topk_cases(op: Op, setting: Setting) -> Iterator[Case]:
    """Yield cases with and without noise, of draft passes, and of the smallest and largest k."""
    k, nodes = min(K, setting.shape.vocab_size), setting.nodes
    for noisy in (False, True):
        label = f"temperature {0.8 if noisy else 0:g}"
        for rows in dict.fromkeys((1, nodes)):
            complete = partial(_topk_arguments, setting, k, noisy)
            yield _case(op, setting, rows, f"rows {rows}, {label}", complete, k=k)
        for other in (1, min(MAX_K, setting.shape.vocab_size)):
            complete = partial(_topk_arguments, setting, other, noisy)
            yield _case(op, setting, nodes, f"rows {nodes}, {label}, k {other}", complete, 0.0, k=k)


def _torch_topk(inputs: Inputs) -> Any:
    """Compute torch's top-k and log-sum-exp of the logits, without noise."""
    logits = inputs.arguments["logits"]
    return logits.topk(inputs.arguments["k"], dim=1), logits.float().logsumexp(1)


# Logarithms of the values may differ in their last bits.
ROW_TOPK = Op(
    "row_topk",
    row_topk_ref,
    row_topk_triton,
    _topk_cases,
    rows={"logits": 0, "noise": 0},
    baselines={"torch topk and logsumexp": _torch_topk},
)


def _transform_inputs(setting: Setting, logits: torch.Tensor) -> dict[str, Any]:
    """Return penalties, top-k, top-p and a bias for every request of a tree pass."""
    requests, vocab, device = len(logits) // setting.nodes, setting.shape.vocab_size, logits.device

    def integers(values: list[int], *leading: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device).repeat(*leading, 1)

    numbers = torch.tensor([0.8, 0.9, -4.0, 1.2, 0.3, 0.1], device=device, dtype=torch.float32).repeat(requests, 1)
    counts = torch.arange(vocab, dtype=torch.int32, device=device).remainder(5).sub(2).clamp(min=0)
    counts[::7] += IN_PROMPT
    inputs = TransformInputs(
        numbers,
        integers([0, min(50, vocab), 3], requests),
        integers([0, 1, -1], requests),
        torch.arange(len(logits), device=device) % setting.nodes,
        integers([*range(min(4, vocab)), -1], len(logits)),
        torch.zeros(1, vocab, device=device, dtype=torch.float32),
        counts[None],
    )
    return {"logits": logits, "inputs": inputs}


def _transform_cases(op: Op, setting: Setting) -> list[Case]:
    nodes, complete = setting.nodes, partial(_transform_inputs, setting)
    return [_case(op, setting, n * nodes, f"requests {n}", complete, nodes=nodes) for n in setting.batches]


LOGIT_TRANSFORMS = Op("logit_transforms", logit_transforms_ref, logit_transforms_triton, _transform_cases, exact=True)

OPS = (ROW_TOPK, LOGIT_TRANSFORMS)
