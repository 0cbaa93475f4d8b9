"""Reference implementation of the verification rules, in float64 on full probability arrays.

`verify.py` documents the rules, their papers and their requirements on a tree. The two implementations share no code,
so each one tests the other.
"""

from collections.abc import Sequence

import numpy as np

from treespec.errors import ConfigError, reject_unknown
from treespec.verification.oracle import Oracle

RULES = ("naive", "rejection", "traversal")
MAX_DEPTH = 256  # the traversal recurses once per level
SUM_TOLERANCE = 1e-6  # loose enough for float32 rows cast to float64

Draw = tuple[int, int, int | None]


def verify_tree(
    rule: str,  # "naive", "rejection" or "traversal"
    # [num_nodes]; node 0 is the root, the last committed token. Siblings have distinct tokens: a token drawn twice is
    # one node with two draws
    tokens: Sequence[int],
    parents: Sequence[int],  # [num_nodes], -1 for the root, otherwise less than the node's index
    # (parent, child, q), in draw order at each parent. q is the row of `draft_probs` that the child's token was sampled
    # from, or None for a deterministic proposal
    draws: Sequence[Draw],
    target_probs: np.ndarray,  # float64 [num_nodes, vocab], the target's distribution after each node
    draft_probs: np.ndarray,  # float64 [num_rows, vocab] of the drafts; [0, vocab] if all proposals are deterministic
    oracle: Oracle,  # such as `treespec.verification.verify.RandomOracle`
) -> tuple[list[int], int]:
    """Decide which nodes of a token tree the target accepts, and sample the token after them.

    Accepted path and next token follow the target's distribution for any drafts, provided that each draw was sampled
    from its stated distribution (requirements: `treespec.verification.verify`).

    Returns:
        The accepted node indices, root first, and the token after them.

    Raises:
        ConfigError (a ValueError): an argument violates these conditions.
    """
    reject_unknown("verification rule", [rule], RULES)
    target_probs, draft_probs = np.asarray(target_probs, np.float64), np.asarray(draft_probs, np.float64)
    _check_tree(tokens, parents, target_probs)
    _check_probs("target_probs", target_probs)
    _check_probs("draft_probs", draft_probs)
    _check_draws(tokens, parents, draws, target_probs.shape[1], draft_probs)
    draws_at: list[list[tuple[int, np.ndarray]]] = [[] for _ in tokens]
    for parent, child, q in draws:
        probs = np.zeros(target_probs.shape[1]) if q is None else draft_probs[q]
        if q is None:
            probs[tokens[child]] = 1.0
        draws_at[parent].append((child, probs))
    if rule == "naive":
        return _naive(tokens, parents, target_probs, oracle)
    if rule == "rejection":
        return _rejection(tokens, draws_at, target_probs, oracle)
    result = _traversal(0, 1.0, tokens, draws_at, target_probs, oracle)
    assert result is not None, "the root is accepted with probability 1"
    return result


def _naive(
    tokens: Sequence[int], parents: Sequence[int], target_probs: np.ndarray, oracle: Oracle
) -> tuple[list[int], int]:
    path = [0]
    while True:
        token = oracle.choose(target_probs[path[-1]])
        onward = [n for n in range(1, len(tokens)) if parents[n] == path[-1] and tokens[n] == token]
        if not onward:
            return path, token
        path += onward


def _rejection(
    tokens: Sequence[int], draws_at: list[list[tuple[int, np.ndarray]]], target_probs: np.ndarray, oracle: Oracle
) -> tuple[list[int], int]:
    path = [0]
    while True:
        r = target_probs[path[-1]]
        for child, q in draws_at[path[-1]]:
            x = tokens[child]
            if r[x] > 0 and oracle.flip(min(1.0, r[x] / q[x])):
                path.append(child)
                break
            residual = np.maximum(r - q, 0.0)
            residual[x] = 0.0  # 0 up to rounding
            if residual.sum() > 0:
                r = residual / residual.sum()
            elif r[x] > 0:  # r = q up to rounding; in that limit the draw is accepted with probability 1
                path.append(child)
                break
        else:
            return path, oracle.choose(r)


def _traversal(
    node: int,
    accept: float,
    tokens: Sequence[int],
    draws_at: list[list[tuple[int, np.ndarray]]],
    target_probs: np.ndarray,
    oracle: Oracle,
) -> tuple[list[int], int] | None:
    """With probability `accept`, return the path from `node` on and the token after it, otherwise None."""
    probs = target_probs[node]
    for child, q in draws_at[node]:
        x = tokens[child]
        result = None
        chance = min(1.0, accept * probs[x] / q[x])
        if chance > 0:
            result = _traversal(child, chance, tokens, draws_at, target_probs, oracle)
        residual = np.maximum(accept * probs - q, 0.0)
        residual[x] = 0.0
        mass = residual.sum()
        if result is None and chance > 0 and accept == 1 and not mass > 0:  # same limit as in `_rejection`
            result = _traversal(child, 1.0, tokens, draws_at, target_probs, oracle)
        if result is not None:
            return [node, *result[0]], result[1]
        if mass > 0:
            accept, probs = mass / (mass + (1.0 - accept)), residual / mass
        elif accept < 1:
            return None
    return ([node], oracle.choose(probs)) if oracle.flip(accept) else None


def _check_tree(tokens: Sequence[int], parents: Sequence[int], target_probs: np.ndarray) -> None:
    if not len(tokens) == len(parents) > 0:
        raise ConfigError(f"tokens and parents must have one entry per node, not {len(tokens)} and {len(parents)}")
    if target_probs.ndim != 2 or len(target_probs) != len(tokens):
        raise ConfigError(f"target_probs must be [{len(tokens)} nodes, vocab], not {list(target_probs.shape)}")
    if parents[0] != -1:
        raise ConfigError(f"parents[0] must be -1 (the root), not {parents[0]!r}")
    vocab, depths = target_probs.shape[1], [0]
    seen: dict[tuple[int, int], int] = {}
    for node in range(1, len(tokens)):
        parent, token = parents[node], tokens[node]
        if not 0 <= parent < node:
            raise ConfigError(f"parents[{node}] must be an earlier node (0 to {node - 1}), not {parent!r}")
        if not 0 <= token < vocab:
            raise ConfigError(f"tokens[{node}] must be less than the vocabulary size {vocab}, not {token!r}")
        if (parent, token) in seen:
            raise ConfigError(
                f"siblings {seen[parent, token]} and {node} under node {parent} both carry token {token}; "
                "a token drawn twice is one node with two draws"
            )
        seen[parent, token] = node
        depths.append(depths[parent] + 1)
        if depths[node] > MAX_DEPTH:
            raise ConfigError(f"node {node} is {depths[node]} deep; the maximum is {MAX_DEPTH}")


def _check_probs(name: str, rows: np.ndarray) -> None:
    for row, probs in enumerate(rows if rows.ndim == 2 else ()):
        smallest, total = probs.min(initial=np.inf), probs.sum()
        if not smallest >= 0:  # or NaN
            raise ConfigError(f"{name}[{row}] must be probabilities, but contains {smallest}")
        if not abs(total - 1) <= SUM_TOLERANCE:
            raise ConfigError(f"{name}[{row}] must sum to 1, not {total}")


def _check_draws(
    tokens: Sequence[int], parents: Sequence[int], draws: Sequence[Draw], vocab: int, draft_probs: np.ndarray
) -> None:
    if draft_probs.ndim != 2 or draft_probs.shape[1] != vocab:
        raise ConfigError(f"draft_probs must be [rows, vocab {vocab}], not {list(draft_probs.shape)}")
    for i, (parent, child, q) in enumerate(draws):
        if not 0 < child < len(tokens) or parents[child] != parent:
            raise ConfigError(f"draws[{i}]: node {child!r} is not a child of node {parent!r}")
        if q is None:
            continue
        if not 0 <= q < len(draft_probs):
            raise ConfigError(f"draws[{i}]: q must be a row of draft_probs (0 to {len(draft_probs) - 1}), not {q!r}")
        if not draft_probs[q][tokens[child]] > 0:
            raise ConfigError(f"draws[{i}]: token {tokens[child]} cannot come from row {q}, where its probability is 0")
    undrawn = sorted(set(range(1, len(tokens))) - {child for _, child, _ in draws})
    if undrawn:
        raise ConfigError(f"every node below the root needs a draw; nodes without one: {undrawn}")
