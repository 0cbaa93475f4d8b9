"""Start-up self-test: tree nodes are bit-identical to plain decoding on this machine.

The same rows are computed alone, in a tree, in a batch and in prompt chunks of several sizes, around the boundaries of
attention tiles and windows, by one layer of each kind, the final norm and the head; their bits must be equal. The other
steps of a captured round (draft, merge, select, walk and commit on the device) are tested by their tokens: a few
requests are decoded plainly by the host executor, and then by captured rounds, plainly and with trees.
"""

import copy
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.config.configs import SpecConfig
from treespec.drafters.draft_sources import DraftSources
from treespec.drafters.lookup.lookup_drafter import LookupDrafter
from treespec.engine.engine import Engine
from treespec.engine.host_executor import HostExecutor
from treespec.engine.scheduler import Scheduler
from treespec.errors import ModelError, TreespecError
from treespec.graphs.capture import Rounds
from treespec.graphs.graph_executor import GraphExecutor
from treespec.models.decoder import Decoder
from treespec.models.model_config import ModelConfig
from treespec.request import Request
from treespec.sampling.sampler import Sampler
from treespec.sampling.transforms import Transforms
from treespec.sampling_params import SamplingParams
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.recurrent.request_state import RecurrentState, StateRows

logger = logging.getLogger("treespec")

# Prefix lengths around tile boundaries, up to six tiles, because torch sums more than four tiles in another order.
PREFIXES = (1, PAGE_SIZE - 4, 2 * PAGE_SIZE - 1, 5 * PAGE_SIZE + 30)
_PARENTS = np.array([-1, 0, 0, 0, 1, 1, 2, 4, 4, 7, 8, 9, 11])  # 13 nodes of up to 7 levels, to cross tile boundaries
_WIDE = np.maximum(np.arange(2 * PAGE_SIZE) - 9, 0)  # parents of a tree too large for packed attention
_WIDE[0] = -1
_ALONE = (10, 5)  # leaves decoded one token at a time, besides the last node
_PAGES = 8  # pages per request
_FEW = 24  # rows of a small matrix product; AMX kernels block the sum of more than 32 rows differently
# Rows of the passes that compute a prompt's last tokens. Kernels differ by the number of rows.
_SPLITS = ((1, 2, 3, 4, 5, 6, 7, 8), (9, 16, 17, 28))
_LAST = max(map(sum, _SPLITS))
_HEAD_ROWS = 40  # largest product of a compiled head; more rows have the same tiles
_WINDOW = 90  # maximum window in the test; sums within a tile do not depend on the number of tiles
# For captured rounds:
PROMPTS = (60, 3)  # prompt lengths; the first prompt repeats itself, for lookup; its output crosses a page boundary
_PERIOD = 16  # tokens after which a prompt repeats itself
_NODES = 16  # maximum tree size
_TEMPERATURES = (0.0, 0.8)


def differing_rows(
    model: Decoder, pool: Tensor, largest_pass: int = 512, prefixes: Sequence[int] = PREFIXES
) -> list[str]:
    """Compare passes on one layer of each kind; returns a line for each difference. Zeroes the pages that it uses.

    Trees follow prompts of `prefixes` tokens, and of lengths around the ends of windows.
    """
    rng = np.random.default_rng(0)
    model, num_layers = model.layer_subset(_WINDOW)
    pool = pool[:num_layers]
    available = pool.shape[2] - 1
    count = min(_PAGES, available)
    room, shape = count * PAGE_SIZE, model.state_shape(len(_WIDE))
    states: list[RecurrentState] | list[None] = [None, None] if shape is None else shape.allocate(2, model.device)
    place = _Place(1 + np.arange(count), states[0])
    twin = _Place(place.pages + count, states[1]) if available >= 2 * count else None
    differences = []
    ends = [end for window in model.windows if window is not None for end in (window, window + PAGE_SIZE)]
    borders = {end - 4 for end in ends if end > 4}  # position 0 leaves the window within the tree
    prefixes = [p for p in sorted({*prefixes, *borders}) if p + len(_PARENTS) <= room]
    for prefix in prefixes:  # one prompt suffices for the head, which does not read the context
        prompt, head_rows = rng.integers(model.vocab_size, size=prefix), len(_PARENTS) * (prefix == prefixes[0])
        differences += _compare_after_prompt(model, pool, prompt, _PARENTS, place, twin, head_rows)
    if model.min_rows <= 2 and 30 + len(_WIDE) <= room:  # with fixed rows, no pass is larger
        prompt = rng.integers(model.vocab_size, size=30)
        head_rows = len(_WIDE) if model.compiled is None else _HEAD_ROWS
        differences += _compare_after_prompt(model, pool, prompt, _WIDE, place, None, head_rows)
    if model.min_rows <= 2 and model.compiled is None:  # compiled products have the same tiles for more than `_WIDE`
        prompt = rng.integers(model.vocab_size, size=min(largest_pass, room))
        chunks = [_FEW] * (len(prompt) // _FEW)
        if not torch.equal(_prefill(model, pool, prompt, chunks, place), _prefill(model, pool, prompt, (), place)):
            differences.append(f"a pass of {len(prompt)} rows")
    touched = place.pages if twin is None else np.union1d(place.pages, twin.pages)
    pool[:, :, torch.from_numpy(touched).to(pool.device)] = 0
    return differences


class _Place(NamedTuple):
    """Memory of a request."""

    pages: np.ndarray
    state: RecurrentState | None  # state of recurrent layers, if the model has any

    def chain(self, context_len: int, num_rows: int, commits: bool = False) -> RequestRows:
        return RequestRows.chain(context_len, num_rows, self.pages, state=self.rows(num_rows if commits else 0))

    def rows(self, commits: int = 0) -> StateRows | None:
        return None if self.state is None else StateRows(self.state, commits)

    def saved(self) -> RecurrentState | None:
        return None if self.state is None else self.state.clone()

    def restore(self, saved: RecurrentState | None) -> None:
        if self.state is not None and saved is not None:
            self.state.copy_from(saved)


def _hidden(model: Decoder, pool: Tensor, rows: list[RequestRows], tokens: np.ndarray) -> Tensor:
    """Return hidden states after all layers of `pool`, [num tokens, hidden_size]; NaN, never equal, becomes 0."""
    ids = torch.from_numpy(tokens).to(model.device)
    shape = model.config.shape
    num_layers = None if shape.recurrent or shape.sizes else len(pool)  # `layer_subset` has shortened such a model
    return model.forward(ids, model.plan(rows, pool), pool, num_layers)[: len(tokens)].nan_to_num()


def _prefill(
    model: Decoder, pool: Tensor, prompt: np.ndarray, split: Sequence[int], place: _Place, begin: int = 0
) -> Tensor:
    """Return the hidden states of a prompt's tokens from `begin` on; earlier ones are in the cache.

    Computes the last tokens in passes of `split` rows and any others in one pass; with fixed rows, no pass is larger.
    """
    if place.state is not None and not begin:
        place.state.reset()
    largest = model.min_rows if model.min_rows > 2 else len(prompt)
    ends, end = [len(prompt)], len(prompt)
    for size in [*reversed(split), *[largest] * len(prompt)]:
        if end > begin:
            end = max(end - min(size, largest), begin)
            ends.append(end)
    passes = [place.chain(start, stop - start, commits=True) for stop, start in itertools.pairwise(ends)]
    return torch.cat([_hidden(model, pool, [rows], prompt[rows.positions]) for rows in reversed(passes)])


def _fill(model: Decoder, pool: Tensor, prompt: np.ndarray, place: _Place) -> int:
    """Fill the cache up to a prompt's last tokens, and return the number of filled positions.

    Copies K and V of the first page to the others, to save time: sums over them still depend on their order.
    """
    filled = max(len(prompt) - _LAST, 0)
    if filled:
        _prefill(model, pool, prompt[: min(filled, PAGE_SIZE)], (), place)
    for page in place.pages[1 : -(-filled // PAGE_SIZE)]:
        pool[:, :, page] = pool[:, :, place.pages[0]]
    if place.state is not None:
        place.state.length = filled
    return filled


def _compare_after_prompt(
    model: Decoder,
    pool: Tensor,
    prompt: np.ndarray,
    parents: np.ndarray,
    place: _Place,
    twin: _Place | None,  # memory of a second request in the batch
    head_rows: int,  # number of last nodes whose logits are also compared
) -> list[str]:
    """Compare a prompt and a tree after it."""
    prefix, differences = len(prompt), []
    tree = (np.arange(len(parents)) * 7919 + prefix) % model.vocab_size
    rows = RequestRows.tree(prefix, parents, place.pages, state=place.rows())
    assert rows.visible is not None
    begin = _fill(model, pool, prompt, place)
    filled = place.saved()
    reference = _prefill(model, pool, prompt, (), place, begin)
    state_after = place.saved()
    for split in _SPLITS:
        first = max(prefix - sum(split), 0)
        if state_after is not None and first > begin:
            place.restore(filled)
            _prefill(model, pool, prompt[:first], (), place, begin)
        elif first:
            place.restore(filled)
        if not torch.equal(_prefill(model, pool, prompt, split, place, first), reference[first - begin :]):
            differences.append(f"a prompt of {prefix} tokens in passes of {', '.join(map(str, split))}")
    place.restore(state_after)
    hidden = _hidden(model, pool, [rows], tree)
    head_slice = slice(len(tree) - head_rows, len(tree))
    logits = model.logits(hidden[head_slice]) if head_rows else None
    if logits is not None:
        _check_head(model, logits[hidden[head_slice].isfinite().all(1)])
    if twin is not None:
        for source, copied in zip(place.pages, twin.pages, strict=True):
            pool[:, :, copied] = pool[:, :, source]
        twin.restore(state_after)
        twin_rows = replace(rows, pages=twin.pages, state=twin.rows())
        batched = _hidden(model, pool, [twin_rows, rows], np.concatenate([tree, tree]))
        is_equal = torch.equal(batched[len(tree) :], hidden)
        if logits is not None:
            is_equal = is_equal and torch.equal(model.logits(batched)[len(tree) :][head_slice], logits)
        if not is_equal:
            differences.append(f"a tree of {len(tree)} nodes after {prefix} tokens, in a batch")
    computed: list[int] = []  # nodes whose K/V are in the slots after the prompt
    for leaf in (len(tree) - 1, *_ALONE):
        path = np.flatnonzero(rows.visible[leaf]).tolist()
        if state_after is not None:
            computed = []
            place.restore(state_after)
        pairs = zip(computed, path, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        for depth, node in enumerate(path[shared:], shared):
            decoded = _hidden(model, pool, [place.chain(prefix + depth, 1)], tree[node : node + 1])
            is_equal = torch.equal(decoded[0], hidden[node])
            if logits is not None and node == leaf >= head_slice.start:
                is_equal = is_equal and torch.equal(model.logits(decoded)[0], logits[node - head_slice.start])
            if not is_equal:
                differences.append(f"node {node} of a tree of {len(tree)} nodes after {prefix} tokens")
        computed = path
    return differences


def _check_head(model: Decoder, logits: Tensor) -> None:
    """Raise ModelError if a token's logit is NaN in every row, although all states are finite."""
    if not len(logits) or not bool((broken := logits.isnan().all(0)).any()):
        return
    config, name = model.config, "its output head"
    if isinstance(config, ModelConfig):
        head = "embed" if config.shape.tied else "lm_head"
        name = next(rule.name for rule in config.rules.tensors if rule.params == (head,))
        name = f"{name} (in GGUF: {'token_embd' if config.shape.tied else 'output'}.weight)"
    raise ModelError(
        f"{config.folder}: the logits of {int(broken.sum())} tokens are NaN, beginning with token "
        f"{int(broken.int().argmax())}; these rows of {name} likely hold NaN. Download or convert the model again"
    )


def proven_rounds(
    host: HostExecutor, scheduler: Scheduler, capture: Callable[[], Rounds], exact: bool
) -> Rounds | None:
    """Capture the rounds of an engine and compare their tokens with plain decoding.

    Returns None and logs a warning if they do not run on this GPU, or if `exact` is set and they emit other tokens. The
    engine then uses the host executor, whose passes have their own self-test.
    """
    try:
        rounds = capture()
        differences = differing_rounds(host, scheduler, rounds)
    except (AssertionError, TreespecError):
        raise
    except Exception as error:  # any error of a driver or compiler on which these kernels have never run
        torch.cuda.synchronize(host.runner.target.device)  # raises if the device is lost, so that nothing can run
        logger.warning("captured rounds do not run here; going step by step, which is slower", exc_info=error)
    else:
        if not differences or not exact:
            return rounds
        message = "captured rounds give other tokens than plain decoding here; going step by step, which is slower: %s"
        logger.warning(message, "; ".join(differences))
    # Failed rounds may have left NaN in the cache, which must not reach the pages' next holder.
    host.runner.cache.scrub(np.arange(host.runner.cache.num_pages + 1))
    return None


def differing_rounds(
    host: HostExecutor,
    scheduler: Scheduler,
    rounds: Rounds,
    max_tokens: int = 12,
    lengths: Sequence[int] = PROMPTS,  # prompt lengths
) -> list[str]:
    """Compare captured rounds with plain decoding on an idle engine; returns a line for each difference."""
    runner, length = host.runner, host.max_model_len
    looks_up = any(isinstance(source, LookupDrafter) for source in host.sources.others)
    sources = DraftSources(host.sources.ssms, [LookupDrafter()] if looks_up else [])
    trial = HostExecutor(runner, copy.deepcopy(host.planner), sources, length)
    captured = GraphExecutor(runner, sources, rounds._replace(planners=copy.deepcopy(rounds.planners)), length)
    plainly, by_rounds = (Engine(runner, scheduler, sources, trial, executor) for executor in (None, captured))
    try:
        return _differing(plainly, by_rounds, min(_NODES, rounds.limits.nodes[-1]), max_tokens, lengths)
    finally:
        for request in [*scheduler.running, *scheduler.waiting]:
            plainly.finish(request, "abort")


def _differing(host: Engine, captured: Engine, nodes: int, max_tokens: int, lengths: Sequence[int]) -> list[str]:
    """Return the differences between engines without and with captured rounds of `nodes` nodes."""
    max_model_len = host.host.max_model_len
    max_tokens = min(max_tokens, max_model_len - 1)
    lengths = [min(length, max_model_len - max_tokens) for length in lengths]
    period = np.random.default_rng(0).integers(host.runner.target.vocab_size, size=_PERIOD)
    prompts = [np.resize(period, length).tolist() for length in lengths]
    plain = SpecConfig.resolve("off", SpecConfig())
    specs = {"plain decoding": plain}
    if nodes > 1:
        specs[f"trees of {nodes} nodes"] = SpecConfig(nodes=nodes)
    differences = []
    counts = range(1, 1 + min(len(prompts), host.scheduler.max_num_seqs))
    for count, temperature in itertools.product(counts, _TEMPERATURES):
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0, ignore_eos=True)
        expected = _decode(host, prompts[:count], params, plain)
        for name, spec in specs.items():
            if _decode(captured, prompts[:count], params, spec) != expected:
                differences.append(f"{name} at temperature {temperature} for {count} of {len(prompts)} requests")
    return differences


def _decode(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, spec: SpecConfig
) -> list[tuple[list[int], str | None]]:
    """Return the output tokens and the finish reason of each prompt's request."""
    target, requests = engine.runner.target, []
    for prompt in prompts:
        request = Request(list(prompt), params, spec, seed=params.seed)
        if params.temperature:
            logits_of = target.vocab_size, target.device
            transforms = Transforms(params, len(prompt), (), (), *logits_of, by_kernel=True)
            request.sampler = Sampler(params, transforms, (), *logits_of, params.seed or 0, kernel_noise=True)
        engine.scheduler.add(request)
        requests.append(request)
    while not engine.scheduler.is_idle:
        engine.step()
    return [(request.output_token_ids, request.finish_reason) for request in requests]
