"""Logit transforms: penalties, logit bias, allowed tokens, min_tokens, temperature, top-k, top-p and min-p, by row.

In this order, which is that of `SamplingParams`. Rows belong to requests, `nodes` consecutive ones to each. A row's
scores depend neither on the other rows nor on their number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.rows import FLOAT_TYPES, check_contiguous
from treespec_kernels.launch.triton_launch import check_last_strides, check_launch, require_triton

IN_PROMPT = 1 << 30  # added to the count of a token that occurs in the prompt
SCORE_BLOCK, SCORE_WARPS = 1024, 4  # tokens per program of `transform_scores`: many programs for few rows
BLOCK, NUM_WARPS = 2048, 8  # tokens per step of a program of `truncate_scores`, which owns a row
MARGIN = 10.0  # scores that far below the best one are searched first: exp(-10) is 1 / 22,000


class TransformInputs(NamedTuple):
    """Parameters of R requests, and what their penalties depend on.

    Attributes:
        numbers: float32 [R, 6], by request: temperature (0 = argmax, not truncated), top_p, log(min_p) (-inf without),
            repetition, frequency and presence penalty.
        options: int32 [R, 3], by request: slot of `biases` and `counts`, or -1 for neither; top_k, 0 = all; first
            position at which an end token may be chosen.
        end_tokens: int32 [R, num_ends], -1 for none.
        positions: int64 [rows], position of the token that is chosen from a row.
        paths: int32 [rows, width], tokens between the root and a row's node, its own included; -1 for none.
        biases: float32 [slots, vocab], added to the logits; -inf excludes a token.
        counts: int32 [slots, vocab], occurrences of a token in the output up to the root, plus `IN_PROMPT` if it occurs
            in the prompt.
    """

    numbers: torch.Tensor
    options: torch.Tensor
    end_tokens: torch.Tensor
    positions: torch.Tensor
    paths: torch.Tensor
    biases: torch.Tensor
    counts: torch.Tensor


def logit_transforms_ref(logits: torch.Tensor, inputs: TransformInputs) -> torch.Tensor:
    """Compute the scores (reference: eager torch, one row after another).

    Args:
        logits: [rows, vocab], float32, bfloat16 or float16; rows are a multiple of the requests.
        inputs: parameters of the requests and rows.

    Returns:
        float32 [rows, vocab]: log-probabilities up to a constant, -inf for excluded tokens. NaN stays.

    Raises:
        ValueError: a shape, dtype or device does not match.
    """
    nodes = check_logit_transforms(logits, inputs)
    scores = [_row_ref(row, inputs, i, i // nodes) for i, row in enumerate(logits.float())]
    return torch.stack(scores) if scores else logits.float()


def _row_ref(values: torch.Tensor, inputs: TransformInputs, row: int, request: int) -> torch.Tensor:
    temperature, top_p, log_min_p, repetition, frequency, presence = inputs.numbers[request].unbind()
    slot, top_k, least_position = inputs.options[request].tolist()
    if slot >= 0:
        bias = inputs.biases[slot]
        values = torch.where(bias == -torch.inf, bias, values + bias)
    if int(inputs.positions[row]) < least_position:
        values = values.index_fill(0, inputs.end_tokens[request][inputs.end_tokens[request] >= 0].long(), -torch.inf)
    if slot >= 0 and (float(repetition), float(frequency), float(presence)) != (1, 0, 0):
        known, path = inputs.counts[slot], inputs.paths[row][inputs.paths[row] >= 0]
        written = (known & (IN_PROMPT - 1)) + torch.bincount(path, minlength=len(values))
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where((known != 0) | (written > 0), repeated, values)
        values = torch.where(written > 0, values - written.float() * frequency - presence, values)
    if temperature == 0:
        return values
    values = values / temperature
    plain = values.masked_fill(values.isnan(), torch.inf)
    order = plain.argsort(descending=True, stable=True)
    kept = order[:top_k] if top_k else order
    if top_p < 1:
        mass = torch.exp(plain[kept] - plain.max()).double()
        kept = kept[: int((mass.cumsum(0) - mass < float(top_p) * mass.sum()).sum().clamp(min=1))]
    truncated = torch.full_like(values, -torch.inf).index_copy(0, kept, values[kept])
    if log_min_p > -torch.inf:
        truncated = truncated.masked_fill(values < plain.max() + log_min_p, -torch.inf)
    return torch.where(values.isnan(), values, truncated)


def logit_transforms_triton(logits: torch.Tensor, inputs: TransformInputs, truncates: bool = True) -> torch.Tensor:
    """Compute `logit_transforms_ref` on a GPU, in two launches and without a host sync.

    The last dimension of `logits` must be contiguous; its row stride is arbitrary.

    Args:
        logits, inputs: as in `logit_transforms_ref`.
        truncates: False skips the launch for top-k, top-p and min-p if no request has them.

    Raises:
        ValueError: a shape, dtype, stride or device does not match, or triton cannot run on the tensors.
    """
    nodes = check_logit_transforms(logits, inputs)
    check_last_strides(logits=logits)
    require_triton("logit_transforms")
    from treespec_kernels.sampling import logit_transforms_kernels as kernels

    # All arithmetic is in float32; the interpreter also widens bfloat16 correctly.
    rows, vocab = logits.shape
    scores = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    check_launch("logit_transforms", kernels.transform_scores, scores)
    if rows == 0:
        return scores
    sizes = {"NODES": nodes, "VOCAB": vocab}
    block = block_of(vocab, SCORE_BLOCK)
    kernels.transform_scores[(rows, -(-vocab // block))](
        logits,
        *inputs,
        scores,
        logits.stride(0),
        NUM_ENDS=inputs.end_tokens.shape[1],
        WIDTH=inputs.paths.shape[1],
        IN_PROMPT=IN_PROMPT,
        BLOCK=block,
        num_warps=SCORE_WARPS,
        enable_fp_fusion=False,
        **sizes,
    )
    if truncates:
        block = block_of(vocab, BLOCK)
        kernels.truncate_scores[(rows,)](
            inputs.numbers,
            inputs.options,
            scores,
            torch.empty(rows, block, dtype=torch.float32, device=logits.device),
            BLOCK=block,
            MARGIN=MARGIN,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
            **sizes,
        )
    return scores


def block_of(vocab: int, most: int) -> int:
    """Return the tokens per block: `most`, or the vocabulary rounded up to a power of two."""
    return min(most, 1 << (vocab - 1).bit_length())


def check_logit_transforms(logits: torch.Tensor, inputs: TransformInputs) -> int:
    """Return the rows per request; raise ValueError if a shape, dtype or device does not match."""
    sizes = check_arguments(
        logits=(logits, "rows vocab+", FLOAT_TYPES),
        numbers=(inputs.numbers, "requests+ 6", torch.float32),
        options=(inputs.options, "requests 3", torch.int32),
        end_tokens=(inputs.end_tokens, "requests _", torch.int32),
        positions=(inputs.positions, "rows", torch.int64),
        paths=(inputs.paths, "rows _", torch.int32),
        biases=(inputs.biases, "slots vocab", torch.float32),
        counts=(inputs.counts, "slots vocab", torch.int32),
    )
    check_contiguous(**inputs._asdict())
    if sizes["rows"] % sizes["requests"]:
        raise ValueError(
            f"numbers has {sizes['requests']} requests, of which {sizes['rows']} rows of logits are no multiple"
        )
    return sizes["rows"] // sizes["requests"]
