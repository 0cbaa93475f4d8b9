"""Entries of the sampling ops: coupled choice, row top-k and logit transforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from treespec_kernels.ops.linear import key_of
from treespec_kernels.ops.op import Case, Inputs, Op
from treespec_kernels.ops.shapes import Setting
from treespec_kernels.sampling.coupled_choice import coupled_choice_ref, coupled_choice_triton
from treespec_kernels.sampling.logit_transforms import (
    IN_PROMPT,
    TransformInputs,
    logit_transforms_ref,
    logit_transforms_triton,
)
from treespec_kernels.sampling.row_topk import MAX_K, row_topk_ref, row_topk_triton

K = 4  # of the timed top-k


def _noise(setting: Setting, rows: int) -> dict[str, torch.Tensor]:
    """Return the temperature 0.8 and the seeds of the noise of consecutive positions."""
    positions = torch.arange(rows, device=setting.device)
    temperatures = torch.full((rows,), 0.8, device=setting.device, dtype=torch.float32)
    seeds = {"seeds": torch.full_like(positions, 7), "samples": torch.zeros_like(positions)}
    return {"temperatures": temperatures, **seeds, "positions": positions}


def _case(
    op: Op,
    setting: Setting,
    rows: int,
    load: str,
    make: Callable[[torch.Tensor], dict[str, Any]],
    weight: float,
    **key: int,
) -> Case:
    """Return a case over rows of logits, which `make` completes to the op's arguments."""
    vocab = setting.shape.vocab_size

    def inputs(generator: torch.Generator) -> Inputs:
        return Inputs(make(setting.random(generator, rows, vocab, scale=2.0)))

    key = key_of(setting, vocab_size=vocab, **key)
    return Case(op, setting, key, load, inputs, rows * vocab * setting.dtype.itemsize, weight=weight, num_rows=rows)


def _choice_cases(setting: Setting) -> list[Case]:
    """`flops` is 0, because the noise uses integer arithmetic, about 40 instructions per token."""
    return [
        _case(
            COUPLED_CHOICE,
            setting,
            rows,
            f"rows {rows}",
            lambda scores, rows=rows: {"scores": scores, **_noise(setting, rows)},
            1.0,
        )
        for rows in dict.fromkeys((1, setting.nodes))
    ]


_ROWS = dict.fromkeys(("temperatures", "seeds", "samples", "positions"), 0)

COUPLED_CHOICE = Op(
    "coupled_choice",
    coupled_choice_ref,
    coupled_choice_triton,
    _choice_cases,
    rows={"scores": 0} | _ROWS,
    exact=True,
)


def _topk_cases(setting: Setting) -> list[Case]:
    """Return cases with and without noise, of draft passes, and of the smallest and largest k."""
    vocab = setting.shape.vocab_size

    def case(rows: int, k: int, noisy: bool, weight: float) -> Case:
        def make(logits: torch.Tensor) -> dict[str, Any]:
            return {"logits": logits, "k": k} | (_noise(setting, rows) if noisy else {})

        load = f"rows {rows}, temperature {0.8 if noisy else 0:g}" + ("" if weight else f", k {k}")
        return _case(ROW_TOPK, setting, rows, load, make, weight, k=min(K, vocab))

    timed = [
        case(rows, min(K, vocab), noisy, 1.0) for noisy in (False, True) for rows in dict.fromkeys((1, setting.nodes))
    ]
    ks = sorted({1, min(MAX_K, vocab)})
    return timed + [case(setting.nodes, k, noisy, 0.0) for noisy in (False, True) for k in ks]


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
    rows={"logits": 0} | _ROWS,
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


def _transform_cases(setting: Setting) -> list[Case]:
    make = partial(_transform_inputs, setting)
    return [
        _case(LOGIT_TRANSFORMS, setting, count * setting.nodes, f"requests {count}", make, 1.0, nodes=setting.nodes)
        for count in setting.batches
    ]


LOGIT_TRANSFORMS = Op("logit_transforms", logit_transforms_ref, logit_transforms_triton, _transform_cases, exact=True)

OPS = (COUPLED_CHOICE, ROW_TOPK, LOGIT_TRANSFORMS)
