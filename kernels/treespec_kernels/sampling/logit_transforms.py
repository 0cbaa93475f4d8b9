"""Logit transforms: penalties, logit bias, allowed tokens, min_tokens, temperature, top-k, top-p and min-p, by row.

The order is that of `SamplingParams`. Rows belong to requests, `nodes` consecutive rows each. A row's scores depend
neither on the other rows nor on their number.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from treespec_kernels.launch.arguments import check_arguments
from treespec_kernels.launch.rows import FLOAT_TYPES
from treespec_kernels.launch.triton_launch import block_of, load_kernels

IN_PROMPT = 1 << 30  # added to the count of tokens that occur in the prompt
SCORE_BLOCK, SCORE_WARPS = 1024, 4  # tokens per program of `transform_scores`: many programs for few rows
BLOCK, NUM_WARPS = 2048, 8  # tokens per step of `truncate_scores`, with one program per row
MARGIN = 10.0  # scores up to this far below the best one are searched first: exp(-10) is 1 / 22,000


class TransformInputs(NamedTuple):
    """Parameters of R requests, and the inputs of their penalties."""

    # float32 [R, 6]: temperature (0 = argmax, not truncated), top_p, log(min_p) (-inf without min_p), repetition,
    # frequency and presence penalty
    numbers: Tensor
    # int32 [R, 3]: slot of `biases` and `counts`, or -1 for neither; top_k, 0 for all; first position at which an end
    # token is allowed
    options: Tensor
    end_tokens: Tensor  # int32 [R, num_ends], -1 for none
    positions: Tensor  # int64 [rows], position of the token to choose from each row
    paths: Tensor  # int32 [rows, width], tokens from the root (exclusive) to a row's node (inclusive); -1 for none
    biases: Tensor  # float32 [slots, vocab], added to the logits; -inf excludes a token
    counts: Tensor  # int32 [slots, vocab], occurrences in the output up to the root, plus `IN_PROMPT` if in the prompt


def logit_transforms_ref(logits: Tensor, inputs: TransformInputs) -> Tensor:
    """Compute the scores (reference: eager torch, one row after another, with the functions of the host's sampler).

    Args:
        logits: [rows, vocab], float32, bfloat16 or float16; rows are a multiple of the requests.
        inputs: parameters of the requests and rows.

    Returns:
        float32 [rows, vocab]: log-probabilities up to a constant, -inf for excluded tokens. NaN stays.
    """
    nodes = len(logits) // len(inputs.numbers)  # rows per request
    scores = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    for row, values in enumerate(logits.float()):
        request, path = row // nodes, inputs.paths[row]
        temperature, top_p, log_min_p, *penalties = inputs.numbers[request].tolist()
        slot, top_k, least_position = inputs.options[request].tolist()
        state = (inputs.biases[slot], inputs.counts[slot]) if slot >= 0 else None
        ends = inputs.end_tokens[request] if int(inputs.positions[row]) < least_position else path[:0]
        values = penalised_row(values, state, path[path >= 0].long(), ends[ends >= 0].long(), *penalties)
        scores[row] = truncated_row(values, temperature, top_k, top_p, log_min_p)
    return scores


def penalised_row(
    values: Tensor,
    state: tuple[Tensor, Tensor] | None,
    path: Tensor,
    ends: Tensor,
    repetition: float,
    frequency: float,
    presence: float,
) -> Tensor:
    """Add the bias to a row of logits, exclude end tokens and apply the penalties, in vLLM's order.

    Args:
        values: float32 [vocab], not modified.
        state: the request's rows of `TransformInputs.biases` and `counts`; None for neither.
        path: int64, tokens between the root and the row's node.
        ends: int64, tokens to exclude.
        repetition, frequency, presence: penalties; only with a state.
    """
    if state is not None:
        values = torch.where(state[0] == -torch.inf, -torch.inf, values + state[0])
    if len(ends):
        values = values.index_fill(0, ends, -torch.inf)
    if state is None or (repetition, frequency, presence) == (1, 0, 0):
        return values
    seen = torch.cat((state[1].nonzero()[:, 0], path)).unique()  # small part of the vocabulary
    written = (state[1][seen] & (IN_PROMPT - 1)) + (seen[:, None] == path).sum(1)
    old = values[seen]
    new = torch.where(old > 0, _quotient(old, repetition), old * repetition)
    new = torch.where(written > 0, new - written.float() * frequency - presence, new)
    return values.index_copy(0, seen, new)


def _quotient(values: Tensor, divisor: float) -> Tensor:
    """Divide with correct rounding. On a GPU, torch divides by a number by multiplying with its reciprocal."""
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)


def truncated_row(values: Tensor, temperature: float, top_k: int, top_p: float, log_min_p: float) -> Tensor:
    """Divide float32 [vocab] by the temperature, and exclude tokens by top-k, top-p and min-p; unchanged at 0."""
    if temperature == 0:
        return values
    values = _quotient(values, temperature)
    if top_k > 0:
        values = keep_best(values, top_k)
    if top_p < 1:
        values = keep_best(values, nucleus_size(values, top_p))
    if log_min_p > -torch.inf:
        values = values.masked_fill(values < values.max() + log_min_p, -torch.inf)
    return values


def topk_rows(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of each row, descending, and their columns. x: [num_rows, width].

    First selects the k blocks with the largest maxima, which contain the k largest values. With 24 rows, k = 8 and one
    thread it takes 62 us vs. torch.topk's 84 us at width 4,096, and 452 us vs. 2,283 us at 131,072.
    """
    rows, width = x.shape
    block = 64
    k = min(k, width)
    if width % block or width // block <= k:
        return x.topk(k, dim=1)
    blocks = x.view(rows, width // block, block)
    best = blocks.amax(2).topk(k, dim=1, sorted=False).indices
    narrowed = blocks.gather(1, best[:, :, None].expand(-1, -1, block)).view(rows, k * block)
    values, columns = narrowed.topk(k, dim=1)
    return values, best.gather(1, columns // block) * block + columns % block


def keep_best(scores: Tensor, count: int) -> Tensor:
    """Set all but the `count` best scores ([vocab]) to -inf. Ties prefer lower ids. NaN is kept."""
    if count >= len(scores):
        return scores
    least = topk_rows(scores[None], count)[0][0, -1]
    best = ~(scores < least)
    spare = int(best.sum()) - count
    if spare > 0:  # bfloat16 logits tie in several percent of rows
        best[torch.nonzero(scores == least)[-spare:, 0]] = False
    return scores.masked_fill(~best, -torch.inf)


def nucleus_size(scores: Tensor, top_p: float) -> int:
    """Return the number of most likely tokens (at least 1) with total probability `top_p`. scores: [vocab].

    Probabilities are float32, and their sums float64.
    """
    shares = torch.softmax(scores, 0)  # torch.exp of a long row would run on MKL's threads
    wanted, count = top_p * float(shares.sum(dtype=torch.float64)), 64
    while True:  # sorting all 131,072 tokens takes 9 ms; a few hundred usually suffice
        best = topk_rows(shares[None], count)[0][0].double().cumsum(0)
        reached = best >= wanted
        if bool(reached[-1]):
            return int(reached.to(torch.int64).argmax()) + 1
        if count >= len(scores):
            return len(scores)  # the two sums may round differently
        count *= 4


def logit_transforms_triton(logits: Tensor, inputs: TransformInputs, truncates: bool = True) -> Tensor:
    """Compute `logit_transforms_ref` on a GPU, in two launches without a host sync.

    Args:
        logits, inputs: as in `logit_transforms_ref`.
        truncates: False skips the launch for top-k, top-p and min-p if no request has them.
    """
    sizes = check_arguments(
        logits=(logits, "rows vocab+", FLOAT_TYPES),
        numbers=(inputs.numbers, "[requests+ 6]", torch.float32),
        options=(inputs.options, "[requests 3]", torch.int32),
        end_tokens=(inputs.end_tokens, "[requests _]", torch.int32),
        positions=(inputs.positions, "[rows]", torch.int64),
        paths=(inputs.paths, "[rows _]", torch.int32),
        biases=(inputs.biases, "[slots vocab]", torch.float32),
        counts=(inputs.counts, "[slots vocab]", torch.int32),
    )
    assert sizes["rows"] % sizes["requests"] == 0, f"{sizes['rows']} rows of {sizes['requests']} requests"
    # All arithmetic is in float32; the interpreter also widens bfloat16 correctly.
    rows, vocab = logits.shape
    scores = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    kernels = load_kernels("sampling.logit_transforms", scores)
    constants = {"NODES": rows // sizes["requests"], "VOCAB": vocab, "enable_fp_fusion": False}
    block = min(block_of(vocab), SCORE_BLOCK)
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
        **constants,
    )
    if truncates:
        block = min(block_of(vocab), BLOCK)
        kernels.truncate_scores[(rows,)](
            inputs.numbers,
            inputs.options,
            scores,
            torch.empty(rows, block, dtype=torch.float32, device=logits.device),
            BLOCK=block,
            MARGIN=MARGIN,
            num_warps=NUM_WARPS,
            **constants,
        )
    return scores
