"""Start-up self-test: tree nodes are bit-identical to plain decoding on this machine.

Computes one layer of each kind, the final norm and the head for the same rows alone, in a tree, in a batch and in
prompt chunks of several sizes, around the boundaries of attention tiles and windows, and compares the bits.
"""

import numpy as np
import torch
from torch import Tensor

from treespec.models.decoder import Decoder
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows

# Around tile boundaries, and six tiles, because torch sums more than four tiles in another order.
_PREFIXES = (1, PAGE_SIZE - 4, 2 * PAGE_SIZE - 1, 5 * PAGE_SIZE + 30)
_PARENTS = np.array([-1, 0, 0, 0, 1, 1, 2, 4, 4, 7, 8, 9, 11])  # 13 nodes of up to 7 levels, to cross tile boundaries
_WIDE = np.maximum(np.arange(2 * PAGE_SIZE) - 9, 0)  # parents of a tree too large for packed attention
_WIDE[0] = -1
_PAGES = 8  # pages per request
_FEW = 24  # rows of a small matrix product; AMX kernels block the sum of more than 32 rows differently
_WINDOW = 90  # maximum window in the test; sums within a tile do not depend on the number of tiles


def differing_rows(model: Decoder, pool: Tensor, largest_pass: int = 512, seed: int = 0) -> list[str]:
    """Compare plain decoding with trees, batches and prompt chunks, on one layer of each kind.

    Args:
        model: the target.
        pool: the target's empty KV pool. The used pages are zeroed afterwards.
        largest_pass: rows of the engine's largest pass.
        seed: seed of the random tokens.

    Returns:
        One line for each difference, or an empty list.
    """
    rng = np.random.default_rng(seed)
    whole, (model, num_layers, windows) = pool, model.layer_subset(_WINDOW)
    pool = pool[:num_layers]
    available = pool.shape[2] - 1
    pages = 1 + np.arange(min(_PAGES, available))
    twin = 1 + len(pages) + np.arange(len(pages)) if available >= 2 * len(pages) else None
    room = len(pages) * PAGE_SIZE
    found = []
    ends = [end for window in windows if window is not None for end in (window, window + PAGE_SIZE)]
    borders = {end - 4 for end in ends if end > 4}  # so that the first position leaves the window of deeper nodes
    for prefix in (p for p in sorted({*_PREFIXES, *borders}) if p + len(_PARENTS) <= room):
        found += _compare_after_prompt(model, pool, rng.integers(model.vocab_size, size=prefix), _PARENTS, pages, twin)
    if model.min_rows <= 2:  # with fixed rows, no pass is larger
        if 30 + len(_WIDE) <= room:
            found += _compare_after_prompt(model, pool, rng.integers(model.vocab_size, size=30), _WIDE, pages, None)
        prompt = rng.integers(model.vocab_size, size=min(largest_pass, room))
        if not torch.equal(_prefill(model, pool, prompt, _FEW, pages), _prefill(model, pool, prompt, room, pages)):
            found.append(f"a pass of {len(prompt)} rows")
    touched = pages if twin is None else np.union1d(pages, twin)
    whole[:, :, torch.from_numpy(touched).to(pool.device)] = 0
    return found


def _hidden(model: Decoder, pool: Tensor, rows: list[RequestRows], tokens: np.ndarray) -> Tensor:
    """Return hidden states after all layers of `pool`, [num tokens, hidden_size].

    NaN, which never compares equal, becomes 0.
    """
    ids = torch.from_numpy(tokens).to(model.device)
    return model.forward(ids, model.plan(rows, pool), pool, len(pool))[: len(tokens)].nan_to_num()


def _prefill(model: Decoder, pool: Tensor, prompt: np.ndarray, chunk: int, pages: np.ndarray) -> Tensor:
    starts = range(0, len(prompt), chunk)
    parts = [RequestRows.chain(start, min(chunk, len(prompt) - start), pages) for start in starts]
    return torch.cat([_hidden(model, pool, [part], prompt[part.positions]) for part in parts])


def _compare_after_prompt(
    model: Decoder, pool: Tensor, prompt: np.ndarray, parents: np.ndarray, pages: np.ndarray, twin: np.ndarray | None
) -> list[str]:
    """Compare a prompt and a tree after it. `twin` holds the pages of a second request in the batch."""
    prefix, found = len(prompt), []
    tree = (np.arange(len(parents)) * 7919 + prefix) % model.vocab_size
    depths = np.zeros(len(parents), dtype=np.int64)
    visible = np.eye(len(parents), dtype=bool)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
        visible[node] |= visible[parents[node]]

    def tree_rows(pages: np.ndarray) -> RequestRows:
        return RequestRows(prefix, np.arange(len(tree)), depths, visible, depths, pages)

    largest = model.min_rows if model.min_rows > 2 else prefix
    whole = _prefill(model, pool, prompt, largest, pages)
    for chunk in (1, 7) if prefix <= 2 * PAGE_SIZE else (7, 64):  # single tokens are too slow for a large model
        if chunk > largest:  # with fixed rows, no pass is larger
            continue
        if not torch.equal(_prefill(model, pool, prompt, chunk, pages), whole):
            found.append(f"a prompt of {prefix} tokens in chunks of {chunk}")
    hidden = _hidden(model, pool, [tree_rows(pages)], tree)
    logits = model.logits(hidden)
    if twin is not None:
        _prefill(model, pool, prompt, largest, twin)
        both = _hidden(model, pool, [tree_rows(twin), tree_rows(pages)], np.concatenate([tree, tree]))
        if not torch.equal(both[len(tree) :], hidden) or not torch.equal(model.logits(both)[len(tree) :], logits):
            found.append(f"a tree of {len(tree)} nodes after {prefix} tokens, in a batch")
    for node in (0, 5, 10, len(tree) - 1):
        for depth, step in enumerate(np.flatnonzero(visible[node])):
            alone = _hidden(model, pool, [RequestRows.chain(prefix + depth, 1, pages)], tree[step : step + 1])
        if not torch.equal(alone[0], hidden[node]) or not torch.equal(model.logits(alone)[0], logits[node]):
            found.append(f"node {node} of a tree of {len(tree)} nodes after {prefix} tokens")
    return found
