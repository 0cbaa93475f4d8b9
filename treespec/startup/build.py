"""Builds an engine: loads and tests its models, measures their costs and connects the parts."""

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from ctypes import CDLL
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from treespec.adapter.decoder import AdapterDecoder
from treespec.adapter.experts import has_routed_experts
from treespec.adapter.trace import AdapterConfig
from treespec.cache.kv_cache import KVCache, pages_for
from treespec.cache.prefix_cache import PrefixCache
from treespec.cache.state_pool import StatePool
from treespec.config.configs import EngineConfig
from treespec.config.engine_options import EngineOptions
from treespec.drafters.base import DraftSource
from treespec.drafters.cross_tokenizer.by_text import TextDrafter
from treespec.drafters.cross_tokenizer.cross_tokenizer_drafter import CrossTokenizerDrafter
from treespec.drafters.cross_tokenizer.retokenize import Translation
from treespec.drafters.cross_tokenizer.translated import TranslatedDrafter
from treespec.drafters.custom_source import CustomSource
from treespec.drafters.draft_sources import DraftSources
from treespec.drafters.lookup.lookup_drafter import LookupDrafter
from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.drafters.table.stored_table import StoredTable
from treespec.drafters.table.table_drafter import TableDrafter
from treespec.engine.engine import Engine
from treespec.engine.host_executor import HostExecutor
from treespec.engine.runner import Runner
from treespec.engine.scheduler import Scheduler
from treespec.errors import ConfigError, ExactnessError, KernelError
from treespec.graphs.capture import Rounds, captured_rounds, runs_on_device
from treespec.graphs.graph_executor import GraphExecutor
from treespec.lora import Lora, LoraCache
from treespec.models.adapter_slots import SlotLimits
from treespec.models.attention import make_attention
from treespec.models.decoder import Decoder
from treespec.models.group_model import GroupModel
from treespec.models.low_rank import Updates
from treespec.models.model_config import ModelConfig
from treespec.planning.planner import Planner
from treespec.request import Request
from treespec.startup.cost_measurement import load_planner
from treespec.startup.load import libraries_folder
from treespec.startup.memory import MemoryPlan, plan_memory
from treespec.startup.options import Resolved, local_folder, resolve
from treespec.startup.selftest import differing_rows, proven_rounds
from treespec.utils.torch_state import one_thread, own_passes
from treespec_kernels.attention.tree_batch import PAGE_SIZE
from treespec_kernels.cpu.cpu_library import CompileError, find_compiler
from treespec_kernels.cpu.lookup_cpu import lookup_library
from treespec_kernels.cpu.table_cpu import table_library
from treespec_kernels.launch.triton_launch import is_interpreted, is_triton_error, known_issue
from treespec_kernels.tuning.tuned import KernelConfigs
from treespec_weights.lora import load_lora

logger = logging.getLogger("treespec")

_EXPERTS = re.compile(r"experts|moe", re.IGNORECASE)  # matches class names of mixture-of-experts modules
ADAPTER_ROWS = 32  # rows of every pass of an adapter if no weaker padding is exact


@dataclass(frozen=True)
class Built:
    """An engine and the settings it was built with. It adds no references to models."""

    engine: Engine
    config: EngineConfig
    target: ModelConfig | AdapterConfig
    exactness: str  # guarantee about the output tokens
    memory: dict[str, int]  # bytes in use, by purpose
    kernels: KernelConfigs | None  # None without Triton
    connections: dict[str, str]  # how each draft model proposes tokens for the target, by name
    loras: LoraCache | None  # None without `enable_lora`

    def stats(self) -> dict[str, Any]:
        config, sources, kernels = self.config, self.engine.sources, self.kernels
        drafts, curve = sources.ssms.names if sources.ssms else (), self.engine.host.planner.costs.curve
        return self.engine.stats.as_dict() | {
            "frozen": {  # settings that affect bits
                "dtype": str(config.dtype).removeprefix("torch."),
                "device": str(config.device),
                "threads": config.num_threads,
                "exact": config.exact,
                "exactness": self.exactness,
                "backend": self.engine.runner.target.backend,
                "attention": config.attention,
                "linear": config.linear,
                "compile": config.compile,
                "quantization": config.quantization,
                "attention_tile": PAGE_SIZE,
                "fixed_rows": self.engine.runner.max_rows,
                "rounds": "on the device" if self.engine.captured is not None else "step by step",
                "tuned_file": None if kernels is None else kernels.file,
                "default_kernels": [] if kernels is None else list(kernels.fallbacks),
            },
            "suffix_tokens": sum(source.remembered for source in sources.others),
            "drafts": [*drafts, *(source.name for source in sources.others if source.name != "lookup")],
            "draft_vocabularies": dict(self.connections),
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "memory": self.memory | ({} if self.loras is None else {"loras": self.loras.nbytes}),
            "cost_curve": {
                "rows": list(curve.rows),
                "verify_seconds": list(curve.verify_seconds),
                "draft_seconds": curve.draft_seconds,
                "draft_start_seconds": curve.draft_start_seconds,
            },
        }


def load_target(resolved: Resolved, plan: MemoryPlan) -> tuple[Decoder, KVCache, int | None, str]:
    """Load the target, allocate the KV cache and, unless exact=False, run the self-test, which zeroes the cache again.

    Also returns the number of rows to which exactness pads every pass (None without padding), and the guarantee about
    output tokens.
    """
    loader, config, fixed_rows = resolved.loader, resolved.target, resolved.fixed_rows
    min_rows = fixed_rows or 2
    sizes = config.shape.vocab_size, plan.positions, min_rows
    decoder = loader.load(config, *sizes, resolved.quantization, shared=resolved.shared_tokens)
    if plan.features is not None:
        decoder.check_states(plan.features.layers)
    cache = KVCache(plan.shapes, plan.num_pages, plan.cache_dtype, loader.device, plan.stacks, plan.features)
    if plan.state is not None:
        num_states = max(resolved.options.max_num_seqs, 2), plan.num_kept_states
        cache.states = StatePool(plan.state, *num_states, loader.device)
    if resolved.options.exact and isinstance(config, AdapterConfig):
        decoder, fixed_rows = _exact_adapter(resolved, plan, config, cache)
    elif resolved.options.exact:
        check_exact(decoder, cache, resolved.options.attention, plan.largest_pass)
    exactness = "bit-identical" if resolved.options.exact else "not guaranteed"
    if resolved.options.exact and fixed_rows is not None:
        exactness += f" at {fixed_rows} fixed rows"
    elif resolved.options.exact and isinstance(decoder, AdapterDecoder) and decoder.multiple > 1:
        exactness += f" at multiples of {decoder.multiple} rows"
    if isinstance(config, AdapterConfig):
        logger.info(
            "%s runs through transformers' own code, linear=%s, exactness: %s", config.folder, decoder.linear, exactness
        )
    return decoder, cache, fixed_rows, exactness


def check_exact(decoder: Decoder, cache: KVCache, attention: str, largest_pass: int) -> None:
    """Run the self-test on a native decoder. attention="auto" falls back from packed to gathered attention."""
    try:
        # torch computes little in compiled passes; waking up its threads would take CPUs from these passes.
        with nullcontext() if decoder.compiled is None else one_thread():
            differences = differing_rows(decoder, cache.pools[0], largest_pass)
    except Exception as error:
        if not is_triton_error(error):
            raise
        raise KernelError(
            f"a kernel does not run on {decoder.device}: {error}; `treespec autotune` looks for one that does, or use "
            'device="cpu"'
        ) from error
    if decoder.embed_blocks is not None:
        decoder.embed_blocks.release()  # the test's random tokens have read many of its pages
    if differences and attention == "auto" and decoder.attention.name == "cpu-packed":
        logger.warning("packed attention is not exact on this machine (%s); using gathered attention", differences[0])
        decoder.attention = make_attention("cpu-gathered", decoder.config.shape, decoder.dtype, decoder.device)
        differences = differing_rows(decoder, cache.pools[0], largest_pass)
    if differences:
        examples = "; ".join(differences[:3])
        raise ExactnessError(
            f"trees would not be bit-identical to plain decoding with attention={decoder.attention.name!r}, "
            f"linear={decoder.linear!r}, {decoder.dtype}, {torch.get_num_threads()} threads: {examples}. "
            "Use exact=False to continue"
        )


def fallback_options(resolved: Resolved, error: ExactnessError) -> EngineOptions:
    """Return options that replace an "auto" choice rejected by the self-test. Raises `error` if there is none."""
    options = resolved.options
    if isinstance(resolved.target, AdapterConfig):  # `_exact_adapter` has tried all alternatives
        raise error
    if resolved.compile and options.compile == "auto":
        logger.warning("compiled passes are not exact on this machine; computing eagerly (%s)", error)
        return dataclasses.replace(options, compile=False)
    if resolved.loader.linear == "onednn" and options.linear == "auto":
        logger.warning("oneDNN's linear layers are not row-invariant here; using torch's (%s)", error)
        return dataclasses.replace(options, linear="torch")
    raise error


def _exact_adapter(
    resolved: Resolved, plan: MemoryPlan, config: AdapterConfig, cache: KVCache
) -> tuple[AdapterDecoder, int | None]:
    """Return the adapter with the cheapest attention and padding that are exact, and its fixed rows, or None."""
    loader, rows = resolved.loader, max(ADAPTER_ROWS, resolved.spec.max_nodes)
    adapt = partial(loader.adapt, config, config.shape.vocab_size, plan.positions)
    attentions = [loader.attention]
    if resolved.options.attention == "auto" and loader.attention == "cpu-packed":
        attentions.append("cpu-gathered")
    decoder = adapt(attentions[0], 2, 1)
    experts = sorted({type(m).__name__ for m in decoder.model.modules() if _EXPERTS.search(type(m).__name__)})
    if experts and not has_routed_experts(decoder.model):
        raise ExactnessError(
            f"{config.folder} has experts ({', '.join(experts)}) that transformers' experts interface does not "
            "reach; their bits depend on the number of rows routed to each. Use exact=False to continue"
        )
    # torch's matrix products are not row-invariant in float32 or on a GPU, so only a fixed number of rows can be exact.
    is_row_invariant = decoder.linear == "onednn" or (decoder.device.type == "cpu" and decoder.dtype == torch.bfloat16)
    differences: list[str] = []
    for attention in attentions:
        for min_rows, multiple in [*([(2, 1), (2, 16)] if is_row_invariant else []), (rows, 1)]:
            decoder = adapt(attention, min_rows, multiple)
            differences = differing_rows(decoder, cache.pools[0], plan.largest_pass)
            if not differences:
                return decoder, rows if min_rows == rows else None
            padded = f"multiples of {multiple}" if multiple > 1 else f"at least {min_rows}"
            logger.info("%s, %s, passes of %s rows: %s", config.folder, attention, padded, differences[0])
    raise ExactnessError(
        f"{config.folder} run by transformers' code is not bit-identical to plain decoding, with "
        f"attention={decoder.attention.name!r}, {decoder.dtype}, {torch.get_num_threads()} threads, even with {rows} "
        f"rows in every pass: {'; '.join(differences[:3])}. Use exact=False to continue"
    )


def build(options: EngineOptions) -> Built:
    """Build an engine. Raises the errors of `LLM`."""
    resolved = resolve(options)
    plan = plan_memory(resolved)
    try:
        return assemble(resolved, plan)
    except ExactnessError as error:
        options = fallback_options(resolved, error)
    # Not in the `except` block: the traceback would keep the rejected decoder and its cache in memory.
    del resolved, plan
    return build(options)


def assemble(resolved: Resolved, plan: MemoryPlan) -> Built:
    """Load and test the models, measure their costs, and create the engine."""
    options, loader, length = resolved.options, resolved.loader, plan.max_model_len
    decoder, cache, fixed_rows, exactness = load_target(resolved, plan)
    chunk = min(plan.prefill_chunk, fixed_rows or plan.prefill_chunk)
    runner = Runner(decoder, cache, fixed_rows)
    ssms = _load_ssms(resolved, plan, decoder, cache)
    without_gpu = loader.attention == "triton" and loader.device.type == "cpu"
    planner = load_planner(runner, ssms, torch.get_num_threads(), without_gpu)
    if loader.configs is not None:
        logger.info("%s", loader.configs.describe())
        if issue := known_issue(loader.device):
            logger.warning("%s", issue)
    sizes_of_steps = options.max_num_seqs, chunk, plan.scratch
    scheduler = Scheduler(cache, *sizes_of_steps, resolved.target.short_context, options.max_loras)
    cross_tokenizer = _load_cross_tokenizer(resolved, plan, planner, ssms)
    custom = [CustomSource(drafter, decoder.vocab_size) for drafter in resolved.drafters]
    sources = DraftSources(ssms, [*custom, *cross_tokenizer, *_model_free_sources(resolved)])
    host = HostExecutor(runner, planner, sources, length)
    captured = None
    if rounds := _capture_rounds(resolved, plan, host, scheduler):
        runner = Runner(decoder, cache, fixed_rows, rounds.target_pass)
        host = HostExecutor(runner, planner, sources, length)
        captured = GraphExecutor(runner, sources, rounds, length)
    if options.enable_prefix_caching:  # only now: measurements and self-tests must compute their prompts
        cache.prefixes = PrefixCache(plan.num_pages + 1, 0 if ssms is None else len(ssms.models))
    drafts = [*(ssms.models if ssms else ()), *(drafter.model for drafter in cross_tokenizer)]
    state_pools = [*([] if cache.states is None else [cache.states]), *(ssms.state_pools.values() if ssms else ())]
    return Built(
        engine=Engine(runner, scheduler, sources, host, captured),
        config=EngineConfig(
            device=loader.device,
            dtype=loader.dtype,
            exact=options.exact,
            max_num_seqs=options.max_num_seqs,
            max_model_len=length,
            scheduling_policy=options.scheduling_policy,
            max_num_batched_tokens=chunk,
            max_tree_slots=plan.max_nodes,
            num_threads=torch.get_num_threads(),
            linear=decoder.linear,
            attention=decoder.attention.name,
            compile=resolved.compile,
            quantization=decoder.quantization,
        ),
        target=resolved.target,
        exactness=exactness,
        memory={
            "target_weights": decoder.nbytes,
            "draft_weights": sum(model.nbytes for model in drafts),
            "kv_cache": cache.nbytes + sum(drafter.cache.nbytes for drafter in cross_tokenizer),
            "recurrent_states": sum(states.nbytes for states in state_pools),
            "captured_rounds": 0 if rounds is None else rounds.nbytes,
            "suffix": sum(source.nbytes for source in sources.others if source.name == "lookup"),
            "table": sum(source.nbytes for source in sources.others if source.name == "table"),
        },
        kernels=loader.configs,
        connections={draft.name: str(draft) for draft in resolved.drafts}
        | {name: str(head) for name, head in resolved.heads},
        loras=_lora_cache(options, resolved.target, decoder, loader.adapters),
    )


def _lora_cache(
    options: EngineOptions, config: ModelConfig | AdapterConfig, target: Decoder, limits: SlotLimits | None
) -> LoraCache | None:
    """Return the cache that loads the target's adapters, or None without `enable_lora`."""
    if not options.enable_lora or isinstance(config, AdapterConfig):
        return None
    limit, exact = options.max_lora_rank if limits is None else limits.rank, options.exact

    def load(path: str) -> Lora:
        # In small operations, OpenMP's threads would compete with those of the passes.
        with own_passes(target.device), nullcontext() if target.compiled is None else one_thread():
            weights = load_lora(local_folder(path), config.shape, config.rules, target.dtype)
            if limit is not None and weights.rank > limit:
                raise ConfigError(f"{path}: an adapter of rank {weights.rank}, above max_lora_rank={limit}; raise it")
            updates = target.updates(weights.matrices)
            if exact and isinstance(updates, Updates) and target.min_rows <= 2:  # else all passes have `min_rows` rows
                updates.check_rows(target.dtype)
            return Lora(weights.digest, updates)

    return LoraCache(load, options.max_cpu_loras or options.max_loras)


def _load_ssms(resolved: Resolved, plan: MemoryPlan, target: Decoder, cache: KVCache) -> SsmDrafter | None:
    """Load the drafts that share the target's token ids, and the draft heads."""
    drafts, loader, features = resolved.ssms, resolved.loader, plan.features
    models: list[GroupModel] = [loader.load_draft(draft, plan.positions) for draft in drafts]
    models += [loader.load_head(head, target, features, plan.positions, cache.pools[0]) for _, head in resolved.heads]
    loader.forget_shared()
    names = [*(draft.name for draft in drafts), *(name for name, _ in resolved.heads)]
    count = resolved.options.max_num_seqs
    states = {ssm: StatePool(shape, count, count, loader.device) for ssm, shape in plan.draft_states.items()}
    return SsmDrafter(models, names, cache, states) if models else None


def _load_cross_tokenizer(
    resolved: Resolved, plan: MemoryPlan, planner: Planner, ssms: SsmDrafter | None
) -> list[CrossTokenizerDrafter]:
    """Load the drafts with another tokenizer than the target's, translated ones first, each with its own KV cache."""
    target, drafters = resolved.target, list[CrossTokenizerDrafter]()

    def draws_for(name: str, request: Request) -> bool:
        """Return whether a translated draft draws at random for a request; depends only on the request."""
        # Random draws cannot be pruned to a node budget, so only one source may draw: a custom drafter, the SSMs or the
        # first draft.
        if resolved.drafters or (ssms is not None and ssms.may_draft(request)):
            return False
        translated = (d for d in drafters if isinstance(d, TranslatedDrafter) and d.may_draft(request))
        return (first := next(translated, None)) is not None and first.name == name

    for draft in sorted(resolved.cross_tokenizer, key=lambda draft: draft.connection.kind == "text"):
        codecs, capacity = draft.connection.codecs, draft.capacity(plan.max_model_len)
        assert codecs is not None
        positions = capacity + plan.scratch
        model = resolved.loader.load_draft(draft, positions)
        pages = resolved.options.max_num_seqs * pages_for(positions)
        cache = KVCache([draft.config.shape], pages, plan.cache_dtype, model.device)
        ends = (target.eos_token_ids, draft.config.eos_token_ids)
        translation = Translation(*codecs, target.shape.vocab_size, draft.vocab_size, ends)
        arguments = (draft.name, model, cache, translation, capacity, plan.scratch, planner)
        if draft.connection.kind == "translated":
            drafters.append(TranslatedDrafter(*arguments, draws_for=partial(draws_for, draft.name)))
        else:
            drafters.append(TextDrafter(*arguments))
    return drafters


def _model_free_sources(resolved: Resolved) -> Iterator[DraftSource]:
    """Yield lookup and the n-gram table, if the options enable them."""
    options = resolved.options
    if options.suffix_tokens or resolved.spec.allows("lookup", "lookup"):
        yield LookupDrafter(_search_library(options.compile, lookup_library), options.suffix_tokens)
    if resolved.table is not None:
        stored = StoredTable.empty()
        if isinstance(resolved.table, Path):
            stored = StoredTable.load(resolved.table, resolved.target.shape.vocab_size)
        yield TableDrafter(stored, _search_library(options.compile, table_library), options.suffix_tokens)


def _search_library(compile: bool | str, library: Callable[[tuple[str, ...], Path], CDLL]) -> CDLL | None:
    """Return the C++ library of a model-free source; None if it cannot be built, so that (slower) Python searches."""
    if compile is False:
        return None
    try:
        return library(find_compiler(), libraries_folder())
    except (CompileError, OSError) as error:
        logger.info("model-free drafts search in Python: %s", error)
        return None


def _capture_rounds(resolved: Resolved, plan: MemoryPlan, host: HostExecutor, scheduler: Scheduler) -> Rounds | None:
    """Capture an engine's rounds; None without Triton, or if they fail to run or are not exact."""
    configs, options, ssms = resolved.loader.configs, resolved.options, host.sources.ssms
    if configs is None:
        return None
    drafts = {} if ssms is None else dict(zip(ssms.names, ssms.models, strict=True))
    if uncapturable := [name for name, model in drafts.items() if not runs_on_device(model)]:
        logger.info("rounds are not captured: %s draft step by step", ", ".join(uncapturable))
        return None
    sizes = plan.max_model_len, plan.scratch, options.max_num_seqs
    capture = partial(captured_rounds, host.runner, ssms, configs, resolved.spec, *sizes, options.cuda_graphs)
    if resolved.loader.device.type == "cuda" and not is_interpreted():
        return proven_rounds(host, scheduler, capture, options.exact)
    return capture()  # the self-test takes minutes in the interpreter
