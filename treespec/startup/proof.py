"""Self-test of captured rounds: they emit the tokens of plain decoding on this GPU.

selftest.py proves that the target's passes have the same bits in any batch. The other steps of a captured round
(draft, merge, select, walk and commit on the device) are tested by the tokens that they emit: a few requests are
decoded plainly step by step, and then by captured rounds, plainly and with trees.
"""

import copy
import itertools
import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch

from treespec.config import SpecConfig
from treespec.drafters.draft_sources import DraftSources
from treespec.drafters.lookup.lookup_drafter import LookupDrafter
from treespec.engine import Engine
from treespec.errors import TreespecError
from treespec.executors.host_executor import HostExecutor
from treespec.graphs.capture import Rounds
from treespec.graphs.graph_executor import GraphExecutor
from treespec.request import Request
from treespec.sampling.sampler import Sampler
from treespec.sampling_params import SamplingParams

logger = logging.getLogger("treespec")

_PROMPTS = (60, 3)  # lengths in tokens; the first repeats, so that lookup proposes; outputs cross a page boundary
_PERIOD = 16  # tokens after which a prompt repeats
_NODES = 16  # tree size, unless the largest of the rounds is smaller
_TEMPERATURES = (0.0, 0.8)


def proven_rounds(engine: Engine, capture: Callable[[], Rounds], exact: bool) -> Rounds | None:
    """Capture the rounds of an engine and compare their tokens with plain decoding.

    Returns None and logs a warning if they do not run on this GPU, or if they emit other tokens and `exact` is set. The
    engine then goes step by step, which uses none of the graphs and passed the self-test of its own passes.
    """
    try:
        rounds = capture()
        found = differing_rounds(engine, rounds)
    except (AssertionError, TreespecError):
        raise
    except Exception as error:  # any error of a driver or compiler on which these kernels have never run
        torch.cuda.synchronize(engine.runner.target.device)  # raises if the device is lost, so that nothing can run
        logger.warning("captured rounds do not run here; going step by step, which is slower", exc_info=error)
    else:
        if not found or not exact:
            return rounds
        words = "captured rounds give other tokens than plain decoding here; going step by step, which is slower: %s"
        logger.warning(words, "; ".join(found))
    # Failed rounds may have left NaN in the cache, which must not reach the next holder of the pages.
    engine.cache.scrub(np.arange(engine.cache.num_pages + 1))
    return None


def differing_rounds(engine: Engine, rounds: Rounds, max_tokens: int = 12, seed: int = 0) -> list[str]:
    """Compare captured rounds with plain decoding, greedy and sampled, for one request and for two.

    Args:
        engine: an idle engine whose models and cache are used. Its learned state and counters do not change, and custom
            drafters are not asked.
        rounds: captured rounds of this engine.
        max_tokens: tokens that each request emits.
        seed: seed of prompts and noise.

    Returns:
        One line per difference; empty if all tokens are equal.
    """
    sources = DraftSources(engine.sources.ssms, None if engine.sources.lookup is None else LookupDrafter())
    planner, length = copy.deepcopy(engine.host.planner), engine.host.max_model_len
    host = HostExecutor(engine.runner, planner, sources, length)
    captured = GraphExecutor(engine.runner, sources, rounds._replace(planners=copy.deepcopy(rounds.planners)), length)
    trials = [Engine(engine.runner, engine.scheduler, sources, host, each) for each in (None, captured)]
    try:
        return _differing(trials[0], trials[1], min(_NODES, rounds.limits.nodes[-1]), max_tokens, seed)
    finally:
        for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
            trials[0].finish(request, "abort")


def _differing(host: Engine, captured: Engine, nodes: int, max_tokens: int, seed: int) -> list[str]:
    """Return the differences between an engine without and one with captured rounds of `nodes` nodes."""
    rng = np.random.default_rng(seed)
    longest = host.host.max_model_len
    max_tokens = min(max_tokens, longest - 1)
    lengths = [min(length, longest - max_tokens) for length in _PROMPTS]
    period = rng.integers(host.runner.target.vocab_size, size=_PERIOD)
    prompts = [np.resize(period, length).tolist() for length in lengths]
    plain = SpecConfig.resolve("off", SpecConfig())
    specs = {"plain decoding": plain}
    if nodes > 1:
        specs[f"trees of {nodes} nodes"] = SpecConfig(nodes=nodes)
    found = []
    counts = range(1, 1 + min(len(prompts), host.scheduler.max_num_seqs))
    for count, temperature in itertools.product(counts, _TEMPERATURES):
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True)
        expected = _decode(host, prompts[:count], params, plain)
        for name, spec in specs.items():
            if _decode(captured, prompts[:count], params, spec) != expected:
                found.append(f"{name} at temperature {temperature} for {count} of {len(prompts)} requests")
    return found


def _decode(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, spec: SpecConfig
) -> list[tuple[list[int], str | None]]:
    """Return the output tokens and the finish reason of each prompt's request."""
    target, requests = engine.runner.target, []
    for prompt in prompts:
        request = Request(list(prompt), params, spec, seed=params.seed)
        if params.temperature:
            request.sampler = Sampler(
                params, prompt, (), (), target.vocab_size, target.device, params.seed or 0, kernel_noise=True
            )
        engine.scheduler.add(request)
        requests.append(request)
    while not engine.scheduler.is_idle:
        engine.step()
    return [(request.output_token_ids, request.finish_reason) for request in requests]
