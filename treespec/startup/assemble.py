"""From options to an engine: everything is resolved and checked here, before the first request."""

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from treespec.adapter.decoder import AdapterDecoder
from treespec.adapter.make_decoder import check_adapters, prove_adapter, read_model
from treespec.adapter.source import Source
from treespec.adapter.trace import AdapterConfig
from treespec.cache import KVCache, pages_for
from treespec.config import EngineConfig, ModelConfig, SpecConfig
from treespec.drafters.base import Drafter
from treespec.drafters.foreign.foreign_drafter import ROOM
from treespec.drafters.foreign.vocabularies import connect_drafts, foreign_drafters
from treespec.drafters.lookup.lookup_drafter import MAX_SUFFIX_TOKENS, LookupDrafter
from treespec.drafters.ssm.ssm_drafter import MAX_SLOTS, SsmDrafter
from treespec.engine import Engine
from treespec.errors import ConfigError, ExactnessError, KernelError
from treespec.graphs.capture import SLOTS, captured_rounds, planned_bytes, round_limits, stack_sizes
from treespec.graphs.graph_engine import GraphEngine
from treespec.graphs.proof import proven_rounds
from treespec.models.attention import make_attention
from treespec.models.decoder import Decoder
from treespec.models.quantized_weights import resolve_quantization, weight_bytes
from treespec.planning import cost_measurement as costs
from treespec.planning.planner import Planner
from treespec.planning.round_costs import CostCurve
from treespec.runner import Runner
from treespec.scheduler import Scheduler
from treespec.startup.load_models import Loader
from treespec.startup.resolve import (
    resolve_attention,
    resolve_compile,
    resolve_device,
    resolve_drafts,
    resolve_dtype,
    resolve_linear,
    resolve_lookup,
    resolve_max_model_len,
    resolve_model,
)
from treespec.startup.selftest import differing_rows
from treespec_kernels.attention.tree_batch import PAGE_SIZE
from treespec_kernels.launch.triton_launch import doubts_about, is_interpreted, is_triton_error
from treespec_kernels.tuning.tuned import KernelConfigs

logger = logging.getLogger("treespec")

START_SECONDS = 0.5  # for measuring costs where `treespec autotune` has stored none
THREADS_MARGIN = 0.9  # another number of threads is named where it takes less of the time than this
ADAPTER_ROWS = 32  # rows of every pass of a model that transformers runs, where nothing less has equal bits


@dataclass(frozen=True)
class Built:
    """An engine and what it was built from."""

    engine: Engine
    config: EngineConfig
    target: ModelConfig | AdapterConfig
    backend: str  # of the target: "native" or "transformers"
    exactness: str  # what of plain decoding a tree is proven to have
    memory: dict[str, int]  # the plan, in bytes
    tuned_file: str | None  # that the kernels' configurations were read from
    default_kernels: tuple[str, ...]  # shapes that it says nothing of
    connections: dict[str, str]  # how each draft guesses for the target, by name

    def stats(self) -> dict[str, Any]:
        """Totals since the start, and what is frozen for bit equality."""
        config, curve = self.config, self.engine.planner.costs.curve
        drafts = self.engine.ssms.names if self.engine.ssms else ()
        return self.engine.stats.as_dict() | {
            "frozen": {
                "dtype": str(config.dtype).removeprefix("torch."),
                "device": str(config.device),
                "threads": config.num_threads,
                "exact": config.exact,
                "exactness": self.exactness,
                "backend": self.backend,
                "attention": config.attention,
                "linear": config.linear,
                "compile": config.compile,
                "quantization": config.quantization,
                "attention_tile": PAGE_SIZE,
                "fixed_rows": self.engine.runner.max_rows,
                "rounds": "on the device" if isinstance(self.engine, GraphEngine) else "step by step",
                "tuned_file": self.tuned_file,
                "default_kernels": list(self.default_kernels),
            },
            "suffix_tokens": 0 if self.engine.lookup is None else self.engine.lookup.remembered,
            "drafts": [*drafts, *(drafter.name for drafter in self.engine.drafters)],
            "draft_vocabularies": dict(self.connections),
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "memory": dict(self.memory),
            "cost_curve": {
                "rows": list(curve.rows),
                "verify_seconds": list(curve.verify_seconds),
                "draft_seconds": curve.draft_seconds,
                "draft_start_seconds": curve.draft_start_seconds,
            },
        }


def build(
    model: str | os.PathLike[str] | nn.Module | None,
    drafts: Sequence[Any] | None,
    spec: SpecConfig,
    device: str | torch.device,
    dtype: str | torch.dtype,
    exact: bool,
    max_num_seqs: int,
    max_model_len: int | None,
    attention: str,
    prefill_chunk: int,
    compile: bool | str = "auto",
    linear: str = "auto",
    cuda_graphs: bool = True,
    backend: str = "auto",
    quantization: str | None = None,
    suffix_tokens: int = 0,
) -> Built:
    """Build an engine. Arguments and errors as `LLM`."""
    asked: dict[str, Any] = dict(locals())
    _check_types(model, max_num_seqs, max_model_len, prefill_chunk, exact, compile, cuda_graphs, suffix_tokens)
    where = resolve_device(device)
    given = read_model(model if isinstance(model, nn.Module) else resolve_model(model), max_model_len, backend)
    places, drafters = resolve_drafts(model, drafts)
    spec.check_sources([name for name, _ in places], bool(suffix_tokens), [drafter.name for drafter in drafters])
    given_ssms = [
        (name, read_model(place, max_model_len, backend)) for name, place in places if spec.allows("ssm", name)
    ]
    computed = resolve_dtype(dtype, given.dtype, where)
    kind = resolve_attention(attention, where)
    adapts = isinstance(given, Source)
    read = [given, *(each for _, each in given_ssms)]
    check_adapters(read, linear, where)
    compiles = resolve_compile(compile, read, attention, linear, computed, where)
    quantization = resolve_quantization(quantization, given, computed)
    products, fixed_rows = resolve_linear(
        "torch" if adapts and where.type == "cuda" else linear,
        kind,
        computed,
        where,
        exact and not adapts,
        spec,
        compiles,
    )
    configs = KernelConfigs.load(where) if products == "triton" else None
    loader = Loader(where, computed, kind, products, exact, configs)
    target = loader.open(given)
    drafts_read = connect_drafts(target, [(name, loader.open(each)) for name, each in given_ssms])
    group, foreign = ([draft for draft in drafts_read if draft.is_foreign is apart] for apart in (False, True))
    natives = [each for each in (target, *(draft.config for draft in group)) if isinstance(each, ModelConfig)]

    shapes = [target.shape, *(draft.config.shape for draft in group)]
    scratch = max(spec.max_nodes, MAX_SLOTS, SLOTS if products == "triton" else 0)
    cache_dtype = computed if compiles else make_attention(kind, target.shape, computed, where).cache_dtype
    page = KVCache.bytes_per_page(shapes, cache_dtype)
    page += int(ROOM * KVCache.bytes_per_page([draft.config.shape for draft in foreign], cache_dtype))
    held = {}
    if products == "triton" and where.type == "cuda":  # a CPU's memory is not divided so closely
        longest = min(max_model_len or target.max_positions, target.max_positions)
        limits = round_limits(spec, longest, scratch, len(group))
        held = {
            "weights": weight_bytes(target, computed, quantization)
            + sum(weight_bytes(draft.config, computed, None) for draft in drafts_read),
            "rounds": planned_bytes(natives, limits, max_num_seqs, prefill_chunk, computed),
        }
    length = resolve_max_model_len(max_model_len, target, page, max_num_seqs, scratch, where, sum(held.values()))

    room, size = length + scratch, target.shape.vocab_size
    decoder = loader.load(target, size, room, fixed_rows or 2, quantization)
    stacks = None if configs is None else [1, *stack_sizes(natives[1:])]
    cache = KVCache(shapes, max_num_seqs * pages_for(room), cache_dtype, where, stacks)
    largest = max(prefill_chunk, max_num_seqs * spec.max_nodes)
    if exact and isinstance(target, AdapterConfig):
        kinds = (kind, "cpu-gathered") if attention == "auto" and kind == "cpu-packed" else (kind,)
        decoder, fixed_rows = prove_adapter(
            lambda kind, *padding: loader.adapt(target, size, room, kind, *padding),
            lambda each: differing_rows(each, cache.pools[0], largest),
            kinds,
            max(ADAPTER_ROWS, spec.max_nodes),
        )
    elif exact:
        other: dict[str, Any] = {}
        try:
            _prove(decoder, cache, attention, largest)
        except ExactnessError as error:
            if compiles and compile == "auto":
                other, words = {"compile": False}, "compiled passes are not exact on this machine; computing eagerly"
            elif products == "onednn" and linear == "auto":
                other, words = {"linear": "torch"}, "oneDNN's linear layers are not row-invariant here; taking torch's"
            else:
                raise
            logger.warning("%s (%s)", words, str(error))
        if other:  # not before: the error's traceback holds what is to make room
            del decoder, cache
            return build(**asked | other)
    exactness = _exactness(decoder, exact, fixed_rows)
    if adapts:
        logger.info(
            "%s runs through transformers' own code, linear=%s, exactness: %s", target.folder, decoder.linear, exactness
        )
    runner = Runner(decoder, cache, fixed_rows)
    ssms = None
    if group:  # a draft's bits decide nothing, so its rows are never padded
        models = [loader.load(draft.config, draft.known, room, 2) for draft in group]
        ssms = SsmDrafter(models, [draft.name for draft in group], cache, [draft.known for draft in group])
    config = EngineConfig(
        device=where,
        dtype=computed,
        exact=exact,
        max_num_seqs=max_num_seqs,
        max_model_len=length,
        prefill_chunk=min(prefill_chunk, fixed_rows or prefill_chunk),
        max_tree_slots=scratch,
        num_threads=torch.get_num_threads(),
        linear=decoder.linear,
        attention=decoder.attention.name,
        compile=compiles,
        quantization=decoder.quantization,
    )
    planner = Planner(_cost_curve(runner, ssms, config.num_threads, kind == "triton" and where.type == "cpu"))
    if configs is not None:
        logger.info("%s", configs.describe())
        if doubts := doubts_about(where):
            logger.warning("%s", doubts)
    scheduler = Scheduler(cache, max_num_seqs, config.prefill_chunk, scratch)
    lookup = None
    if suffix_tokens or spec.allows("lookup", "lookup"):
        lookup = LookupDrafter(resolve_lookup(compile), suffix_tokens)
    foreigners = foreign_drafters(
        foreign,
        lambda draft, room: loader.load(draft.config, draft.known, room, 2),
        target,
        cache_dtype,
        length,
        scratch,
        max_num_seqs,
        planner,
        ssms,
        bool(drafters),
    )
    sources: list[Drafter] = [*drafters, *foreigners]
    parts = (runner, scheduler, planner, ssms, lookup, sources, length)
    engine, captured_bytes = Engine(*parts), 0
    if configs is not None:
        capture = functools.partial(
            captured_rounds, runner, ssms, configs, spec, length, scratch, max_num_seqs, cuda_graphs
        )
        proves = where.type == "cuda" and not is_interpreted()  # there it would take long
        rounds = proven_rounds(engine, capture, exact) if proves else capture()
        if rounds is not None:
            engine, captured_bytes = GraphEngine(*parts, rounds), rounds.nbytes
    memory = {
        "target_weights": decoder.nbytes,
        "draft_weights": sum(m.nbytes for m in (*(ssms.models if ssms else ()), *(each.model for each in foreigners))),
        "kv_cache": cache.nbytes + sum(each.cache.nbytes for each in foreigners),
        "captured_rounds": captured_bytes,
        "suffix": 0 if lookup is None else lookup.nbytes,
    }
    tuned_file = None if configs is None or configs.file is None else str(configs.file)
    fallbacks = tuple(configs.fallbacks) if configs is not None else ()
    connections = {draft.name: str(draft.connection) for draft in drafts_read}
    return Built(engine, config, target, decoder.backend, exactness, memory, tuned_file, fallbacks, connections)


def _check_types(
    model: object,
    max_num_seqs: object,
    max_model_len: object,
    prefill_chunk: object,
    exact: object,
    compile: object,
    cuda_graphs: object,
    suffix_tokens: object,
) -> None:
    """Refuse options of another kind than they should be."""
    most = MAX_SUFFIX_TOKENS
    if isinstance(suffix_tokens, bool) or not isinstance(suffix_tokens, int) or not 0 <= suffix_tokens <= most:
        raise ConfigError(f"suffix_tokens={suffix_tokens!r}; valid: an int from 0 to {most}")
    for name, value in (("max_num_seqs", max_num_seqs), ("prefill_chunk", prefill_chunk)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r}; valid: an int of at least 1")
    if max_model_len is not None and (isinstance(max_model_len, bool) or not isinstance(max_model_len, int)):
        raise ConfigError(f"max_model_len={max_model_len!r}; valid: an int of at least 2, or None")
    if compile != "auto" and not isinstance(compile, bool):
        raise ConfigError(f'compile={compile!r}; valid: True, False or "auto"')
    for name, flag in (("exact", exact), ("cuda_graphs", cuda_graphs)):
        if not isinstance(flag, bool):
            raise ConfigError(f"{name}={flag!r}; valid: True or False")
    if model is not None and not isinstance(model, str | os.PathLike | nn.Module):
        raise ConfigError(f"model={model!r}; valid: a folder, a hub id, a model, or None for the embedded target")


def _exactness(decoder: Decoder, exact: bool, fixed_rows: int | None) -> str:
    """What of plain decoding a tree is proven to have."""
    if not exact:
        return "not guaranteed"
    if fixed_rows is not None:
        return f"bit-identical at {fixed_rows} fixed rows"
    if isinstance(decoder, AdapterDecoder) and decoder.multiple > 1:
        return f"bit-identical at multiples of {decoder.multiple} rows"
    return "bit-identical"


def _cost_curve(runner: Runner, ssms: SsmDrafter | None, threads: int, interpreted: bool) -> CostCurve:
    """What passes cost: as it is stored, or measured now."""
    if interpreted:
        return CostCurve((1,), (1.0,), 0.1)  # times in Triton's interpreter say nothing, and take long
    key = costs.cost_key(runner, ssms, threads)
    known = costs.load(key)
    if known is None:
        with costs.measuring_alone():
            return costs.load(key) or costs.measure(runner, ssms, START_SECONDS)
    if runner.target.device.type == "cpu":
        _compare_threads(costs.by_threads(key), threads)
    return known


def _prove(decoder: Decoder, cache: KVCache, attention: str, largest_pass: int) -> None:
    """Run the self-test; where packed attention fails it and was not asked for, take the gathered one and say so."""
    try:
        found = differing_rows(decoder, cache.pools[0], largest_pass)
    except Exception as error:
        if not is_triton_error(error):
            raise
        raise KernelError(
            f"a kernel does not run on {decoder.device}: {error}; `treespec autotune` looks for one that does, or use "
            'device="cpu"'
        ) from error
    if found and attention == "auto" and decoder.attention.name == "cpu-packed":
        logger.warning("packed attention is not exact on this machine (%s); using the gathered one", found[0])
        decoder.attention = make_attention("cpu-gathered", decoder.config.shape, decoder.dtype, decoder.device)
        found = differing_rows(decoder, cache.pools[0], largest_pass)
    if found:
        raise ExactnessError(
            f"trees would not have the bits of plain decoding with attention={decoder.attention.name!r}, "
            f"linear={decoder.linear!r}, {decoder.dtype}, {torch.get_num_threads()} threads: {'; '.join(found[:3])}. "
            "Use exact=False to go on"
        )


def _compare_threads(seconds: dict[int, float], threads: int) -> None:
    """Says where another number of threads was measured to be faster. None is chosen: bits may change with it."""
    if threads not in seconds:
        return
    best = min(seconds, key=lambda number: seconds[number])
    if seconds[best] < THREADS_MARGIN * seconds[threads]:
        logger.warning(
            "with %d threads a round took %.3g ms here, with %d %.3g ms (treespec autotune); "
            "set OMP_NUM_THREADS=%d, or call torch.set_num_threads(%d) before LLM",
            threads,
            1000 * seconds[threads],
            best,
            1000 * seconds[best],
            best,
            best,
        )
