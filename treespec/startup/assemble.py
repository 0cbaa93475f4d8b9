"""Build an engine: resolve the options, plan the memory, assemble the parts."""

import functools
import logging
from collections.abc import Callable

import torch

from treespec.cache import KVCache, pages_for
from treespec.config import EngineConfig
from treespec.drafters.draft_sources import DraftSources
from treespec.drafters.foreign.foreign_drafter import ForeignDrafter
from treespec.drafters.foreign.vocabularies import Draft, foreign_drafters
from treespec.drafters.lookup.lookup_drafter import LookupDrafter
from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.engine import Engine
from treespec.engine_options import EngineOptions
from treespec.errors import ExactnessError
from treespec.executors.host_executor import HostExecutor
from treespec.graphs.capture import Rounds, captured_rounds, runs_on_device
from treespec.graphs.graph_executor import GraphExecutor
from treespec.models.decoder import Decoder
from treespec.models.group_model import GroupModel
from treespec.planning.planner import Planner
from treespec.prefix_cache import PrefixCache
from treespec.runner import Runner
from treespec.scheduler import Scheduler
from treespec.startup.built import Built
from treespec.startup.implementations import resolve_lookup
from treespec.startup.plan_memory import MemoryPlan, plan_memory
from treespec.startup.proof import proven_rounds
from treespec.startup.resolve import Resolved, resolve
from treespec.startup.start_costs import load_costs
from treespec.startup.target import Target, fallback_options, load_target
from treespec_kernels.launch.triton_launch import is_interpreted, known_issue

logger = logging.getLogger("treespec")


def build(options: EngineOptions) -> Built:
    """Build an engine. Raises the errors of `LLM`."""
    resolved = resolve(options)
    plan = plan_memory(resolved)
    try:
        return assemble(resolved, plan)
    except ExactnessError as error:
        options = fallback_options(resolved, error)
    # Outside of the `except` block, because the error's traceback keeps the rejected decoder and its cache in memory.
    del resolved, plan
    return build(options)


def assemble(resolved: Resolved, plan: MemoryPlan) -> Built:
    """Load and test the models, measure their costs, and create the engine.

    Raises:
        ExactnessError: trees are not bit-identical to plain decoding. KernelError: a kernel does not run.
    """
    target = load_target(resolved, plan)
    runner = Runner(target.decoder, target.cache, target.fixed_rows)
    ssms = _load_ssms(resolved, plan, target)
    config = _engine_config(resolved, plan, target)
    planner = _make_planner(resolved, runner, ssms, config)
    limits = config.max_num_seqs, config.prefill_chunk, plan.scratch
    scheduler = Scheduler(target.cache, *limits, resolved.target.short_context)
    foreign = _load_foreign(resolved, plan, planner, ssms)
    sources = DraftSources(ssms, _make_lookup(resolved), [*resolved.drafters, *foreign])
    host = HostExecutor(runner, planner, sources, plan.max_model_len)
    engine, rounds = _make_engine(
        Engine(runner, scheduler, sources, host), _capture(resolved, plan, runner, ssms), config
    )
    if resolved.options.enable_prefix_caching:  # from now on, so that measurements and proofs compute their prompts
        target.cache.prefixes = PrefixCache(plan.num_pages + 1, 0 if ssms is None else len(ssms.models))
    return Built(
        engine=engine,
        config=config,
        target=resolved.target,
        backend=target.decoder.backend,
        exactness=target.exactness,
        memory=_memory_in_use(target, sources, foreign, rounds),
        kernels=resolved.loader.configs,
        connections={draft.name: str(draft.connection) for draft in resolved.drafts}
        | {name: str(head) for name, head in resolved.heads},
    )


def _load_ssms(resolved: Resolved, plan: MemoryPlan, target: Target) -> SsmDrafter | None:
    """Load the drafts that share the target's token ids, and the draft heads."""
    drafts, loader, features = resolved.ssms, resolved.loader, plan.features
    models: list[GroupModel] = [loader.load_draft(draft, plan.positions) for draft in drafts]
    models += [loader.load_head(head, target.decoder, features, plan.positions) for _, head in resolved.heads]
    names = [*(draft.name for draft in drafts), *(name for name, _ in resolved.heads)]
    return SsmDrafter(models, names, target.cache) if models else None


def _engine_config(resolved: Resolved, plan: MemoryPlan, target: Target) -> EngineConfig:
    options, decoder = resolved.options, target.decoder
    return EngineConfig(
        device=resolved.device,
        dtype=resolved.loader.dtype,
        exact=options.exact,
        max_num_seqs=options.max_num_seqs,
        max_model_len=plan.max_model_len,
        prefill_chunk=min(plan.prefill_chunk, target.fixed_rows or plan.prefill_chunk),
        max_tree_slots=plan.scratch,
        num_threads=torch.get_num_threads(),
        linear=decoder.linear,
        attention=decoder.attention.name,
        compile=resolved.compile,
        quantization=decoder.quantization,
    )


def _make_planner(resolved: Resolved, runner: Runner, ssms: SsmDrafter | None, config: EngineConfig) -> Planner:
    """Create a planner with the costs of passes, and log the configuration of the Triton kernels."""
    loader = resolved.loader
    interpreted = loader.attention == "triton" and loader.device.type == "cpu"
    planner = Planner(load_costs(runner, ssms, config.num_threads, interpreted))
    if loader.configs is not None:
        logger.info("%s", loader.configs.describe())
        if issue := known_issue(loader.device):
            logger.warning("%s", issue)
    return planner


def _make_lookup(resolved: Resolved) -> LookupDrafter | None:
    options = resolved.options
    if options.suffix_tokens or resolved.spec.allows("lookup", "lookup"):
        return LookupDrafter(resolve_lookup(options.compile), options.suffix_tokens)
    return None


def _load_foreign(
    resolved: Resolved, plan: MemoryPlan, planner: Planner, ssms: SsmDrafter | None
) -> list[ForeignDrafter]:
    """Load the drafts with another tokenizer than the target's."""

    def load(draft: Draft, positions: int) -> tuple[Decoder, KVCache]:
        model = resolved.loader.load_draft(draft, positions)
        pages = resolved.options.max_num_seqs * pages_for(positions)
        return model, KVCache([draft.config.shape], pages, plan.cache_dtype, model.device)

    lengths = plan.max_model_len, plan.scratch
    return foreign_drafters(
        resolved.foreign, load, resolved.target, *lengths, planner, ssms, has_others=bool(resolved.drafters)
    )


def _capture(
    resolved: Resolved, plan: MemoryPlan, runner: Runner, ssms: SsmDrafter | None
) -> Callable[[], Rounds] | None:
    """Return a function that captures the engine's rounds, or None without Triton."""
    configs, options = resolved.loader.configs, resolved.options
    if configs is None:
        return None
    drafts = {} if ssms is None else dict(zip(ssms.names, ssms.models, strict=True))
    if others := [name for name, model in drafts.items() if not runs_on_device(model)]:
        logger.info("rounds are not captured: %s draft step by step", ", ".join(others))
        return None
    sizes = plan.max_model_len, plan.scratch, options.max_num_seqs
    return functools.partial(captured_rounds, runner, ssms, configs, resolved.spec, *sizes, options.cuda_graphs)


def _make_engine(
    engine: Engine, capture: Callable[[], Rounds] | None, config: EngineConfig
) -> tuple[Engine, Rounds | None]:
    """Add captured rounds to an engine if they run and are exact."""
    if capture is None:
        return engine, None
    if config.device.type == "cuda" and not is_interpreted():
        rounds = proven_rounds(engine, capture, config.exact)
    else:
        rounds = capture()  # proving them takes minutes in the interpreter
    if rounds is None:
        return engine, None
    engine.runner.captured = rounds.target_pass
    captured = GraphExecutor(engine.runner, engine.sources, rounds, config.max_model_len)
    return Engine(engine.runner, engine.scheduler, engine.sources, engine.host, captured), rounds


def _memory_in_use(
    target: Target, sources: DraftSources, foreign: list[ForeignDrafter], rounds: Rounds | None
) -> dict[str, int]:
    """Return the bytes in use, by purpose."""
    drafts = [*(sources.ssms.models if sources.ssms else ()), *(drafter.model for drafter in foreign)]
    return {
        "target_weights": target.decoder.nbytes,
        "draft_weights": sum(model.nbytes for model in drafts),
        "kv_cache": target.cache.nbytes + sum(drafter.cache.nbytes for drafter in foreign),
        "captured_rounds": 0 if rounds is None else rounds.nbytes,
        "suffix": 0 if sources.lookup is None else sources.lookup.nbytes,
    }
