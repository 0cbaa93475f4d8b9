"""Proof at start, on this machine: a tree node has the bits of plain decoding.

Rows of a real layer, the final norm and the head are computed in different company (alone, in a tree, in a batch, in
prompt chunks of other sizes) around the borders of attention tiles, and compared for equality.
"""

import numpy as np
import torch
from torch import Tensor

from treespec.models.decoder import Decoder
from treespec_kernels.tree_batch import PAGE_SIZE, RequestRows

_PREFIXES = (1, PAGE_SIZE - 4, 2 * PAGE_SIZE - 1, 2 * PAGE_SIZE + 30)
_PARENTS = np.array([-1, 0, 0, 0, 1, 1, 2, 4, 4, 7, 8, 9, 11])  # 13 nodes, 7 deep: it crosses tile borders
_PAGES = 4  # of one request


def differing_rows(model: Decoder, pool: Tensor, seed: int = 0) -> list[str]:
    """Compare plain decoding with trees, batches and chunks on one layer.

    Args:
        model: the target.
        pool: its K/V pool with nothing in it; the pages used are zeroed afterwards.
        seed: of the random tokens.

    Returns:
        What differed, a line each; empty where every comparison was equal.
    """
    rng = np.random.default_rng(seed)
    available = pool.shape[2] - 1
    pages = 1 + np.arange(min(_PAGES, available))
    other = 1 + len(pages) + np.arange(len(pages)) if available >= 2 * len(pages) else pages
    found = []
    for prefix in (p for p in _PREFIXES if p + len(_PARENTS) <= len(pages) * PAGE_SIZE):
        prompt, tree = (rng.integers(model.vocab_size, size=size) for size in (prefix, len(_PARENTS)))
        found += _differing_behind(model, pool[:1], prompt, tree, pages, other)
    pool[:, :, torch.from_numpy(np.union1d(pages, other)).to(pool.device)] = 0
    return found


def _differing_behind(
    model: Decoder, pool: Tensor, prompt: np.ndarray, tree: np.ndarray, pages: np.ndarray, other: np.ndarray
) -> list[str]:
    """What differs behind one prompt, with its pages and those of a twin in the same batch."""
    prefix, found = len(prompt), []
    depths = np.zeros(len(_PARENTS), dtype=np.int64)
    visible = np.eye(len(_PARENTS), dtype=bool)
    for node in range(1, len(_PARENTS)):
        depths[node] = depths[_PARENTS[node]] + 1
        visible[node] |= visible[_PARENTS[node]]

    def run(rows: list[RequestRows], tokens: np.ndarray) -> Tensor:
        hidden = model.forward(torch.from_numpy(tokens).to(model.device), model.plan(rows, pool), pool, num_layers=1)
        return model.logits(hidden[: len(tokens)])

    def prefill(chunk: int, pages: np.ndarray) -> Tensor:
        starts = range(0, prefix, chunk)
        parts = [RequestRows.chain(start, min(chunk, prefix - start), pages) for start in starts]
        return torch.cat([run([part], prompt[part.positions]) for part in parts])

    def tree_rows(pages: np.ndarray) -> RequestRows:
        return RequestRows(prefix, np.arange(len(tree)), depths, visible, depths, pages)

    largest = model.min_rows if model.min_rows > 2 else prefix  # where rows are fixed, no pass has more
    whole = prefill(largest, pages)
    for chunk in (1, 7):
        if not torch.equal(prefill(chunk, pages), whole):
            found.append(f"a prompt of {prefix} tokens in chunks of {chunk}")
    in_tree = run([tree_rows(pages)], tree)
    if other is not pages:
        prefill(largest, other)
        twins = run([tree_rows(other), tree_rows(pages)], np.concatenate([tree, tree]))
        if not torch.equal(twins[len(tree) :], in_tree):
            found.append(f"a tree behind {prefix} tokens, in a batch")
    for node in (0, 5, 10, 12):
        for depth, step in enumerate(np.flatnonzero(visible[node])):
            alone = run([RequestRows.chain(prefix + depth, 1, pages)], tree[step : step + 1])
        if not torch.equal(alone[0], in_tree[node]):
            found.append(f"node {node} of a tree behind {prefix} tokens")
    return found
