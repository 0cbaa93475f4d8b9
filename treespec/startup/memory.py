"""Divides the device's memory between weights, captured rounds and the KV cache."""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from treespec.adapter.trace import AdapterConfig
from treespec.cache.kv_cache import FeatureShape, KVCache, pages_for
from treespec.cache.state_pool import StatePool
from treespec.config.engine_options import EngineOptions
from treespec.drafters.cross_tokenizer.cross_tokenizer_drafter import CAPACITY_FACTOR
from treespec.errors import CacheMemoryError, ConfigError
from treespec.graphs.capture import SLOTS, planned_bytes, round_limits, stack_sizes
from treespec.models.attention import make_attention
from treespec.models.model_config import ModelConfig
from treespec.models.recurrent import state_shape
from treespec.startup.options import Resolved
from treespec.utils.memory import free_memory
from treespec_kernels.attention.tree_batch import PAGE_SIZE
from treespec_kernels.recurrent.request_state import StateShape
from treespec_kernels.tree.growth_limits import MAX_EXPANDED
from treespec_weights.load import expected_tensors, quantizable, quantized_group
from treespec_weights.quant_schemes import Form
from treespec_weights.quantize import BITS
from treespec_weights.rules import ModelShape

logger = logging.getLogger("treespec")

PREFILL_CHUNK = 512
# Prefill rows on a GPU: with more rows, each read of the weights and each kernel launch does more work.
GPU_PREFILL_CHUNKS = (2048, 1024)
CHUNK_SHARE = 8  # buffers of a larger chunk may take 1 / CHUNK_SHARE of the free memory


@dataclass(frozen=True)
class MemoryPlan:
    """Memory sizes of an engine."""

    max_model_len: int  # maximum positions of a request
    max_nodes: int  # maximum nodes of a request's tree
    scratch: int  # KV slots after a request's committed slots, for its tree and its drafts
    prefill_chunk: int  # prompt rows per step
    largest_pass: int  # rows of the largest pass
    num_pages: int
    cache_dtype: torch.dtype
    shapes: list[ModelShape]  # shapes of the models in the KV cache, target first
    stacks: list[int] | None  # sizes of groups of models that share a tensor of the KV cache (see `KVCache`)
    features: FeatureShape | None  # hidden states of the target that draft heads read; None without heads
    state: StateShape | None  # shape of a request's recurrent state; None without recurrent layers
    num_kept_states: int  # number of copies of states after prompts and prefixes
    draft_states: dict[int, StateShape]  # state shapes of SSMs with recurrent layers, by index

    @property
    def positions(self) -> int:
        """Number of positions that models compute, including scratch slots."""
        return self.max_model_len + self.scratch


def plan_memory(resolved: Resolved) -> MemoryPlan:
    """Choose the maximum request length and the size of the KV cache."""
    options, spec, loader, target = resolved.options, resolved.spec, resolved.loader, resolved.target
    triton = loader.configs is not None
    shapes = [target.shape, *(config.shape for config in resolved.group)]
    features = None
    if layers := sorted({layer for _, head in resolved.heads for layer in head.layers}):
        features = FeatureShape(tuple(layers), target.shape.hidden_size)
    max_nodes = max(spec.max_nodes, MAX_EXPANDED)
    scratch = max(max_nodes, SLOTS if triton else 0)
    cache_dtype = loader.dtype
    if not resolved.compile:
        cache_dtype = make_attention(loader.attention, target.shape, loader.dtype, loader.device).cache_dtype
    page = KVCache.bytes_per_page([*shapes, *([features] if features else [])], cache_dtype)
    cross_tokenizer_page = int(
        CAPACITY_FACTOR
        * KVCache.bytes_per_page([draft.config.shape for draft in resolved.cross_tokenizer], cache_dtype)
    )
    reserved, chunk = 0, options.max_num_batched_tokens or PREFILL_CHUNK
    if triton and loader.device.type == "cuda":  # a CPU's memory is not budgeted this closely
        if options.max_num_batched_tokens is None:
            chunk = _prefill_chunk(resolved, scratch)
        reserved = _weight_bytes(resolved) + _round_bytes(resolved, scratch, chunk)
        if loader.adapters is not None and isinstance(target, ModelConfig):
            reserved += loader.adapters.nbytes(target, loader.dtype)
    max_num_seqs, cache_bytes = options.max_num_seqs, options.kv_cache_memory_bytes
    state = None if isinstance(target, AdapterConfig) else state_shape(target, max_nodes, loader.dtype)
    num_kept = max_num_seqs * (2 if options.enable_prefix_caching else 1)  # after prompts, and after prefixes
    reserved += 0 if state is None else StatePool.size(state, max_num_seqs, num_kept)
    ssms = _natives(draft.config for draft in resolved.ssms)
    draft_states = {
        i: shape
        for i, draft in enumerate(resolved.ssms)
        if isinstance(draft.config, ModelConfig) and (shape := state_shape(draft.config, max_nodes, loader.dtype))
    }
    reserved += sum(StatePool.size(shape, max_num_seqs, max_num_seqs) for shape in draft_states.values())
    bytes_per_page = page + (0 if cache_bytes else cross_tokenizer_page)
    length = _max_model_len(options, target, loader.device, bytes_per_page, scratch, reserved)
    num_pages = max_num_seqs * pages_for(length + scratch)
    if cache_bytes is not None:
        num_pages = min(num_pages, cache_bytes // page)
    return MemoryPlan(
        max_model_len=length,
        max_nodes=max_nodes,
        scratch=scratch,
        prefill_chunk=chunk,
        largest_pass=max(chunk, max_num_seqs * spec.max_nodes),
        num_pages=num_pages,
        cache_dtype=cache_dtype,
        shapes=shapes,
        stacks=[1, *stack_sizes(ssms), *[1] * len(resolved.heads)] if triton else None,  # heads share nothing
        features=features,
        state=state,
        num_kept_states=num_kept,
        draft_states=draft_states,
    )


def _max_model_len(
    options: EngineOptions,
    target: ModelConfig | AdapterConfig,
    device: torch.device,
    bytes_per_page: int,  # bytes per page of all models in the KV cache
    scratch: int,  # slots after each request
    reserved: int,  # bytes reserved for weights, captured rounds and recurrent states
) -> int:
    """Return the maximum positions of a request: if not given, the model's, or as many as half of free memory holds."""
    value, seqs, cache_bytes = options.max_model_len, options.max_num_seqs, options.kv_cache_memory_bytes
    free = free_memory(device) - reserved
    if free <= 0:
        raise CacheMemoryError(
            f"weights, captured rounds and recurrent states need {reserved / 2**30:.1f} GiB, and "
            f"{(free + reserved) / 2**30:.1f} GiB of {device} are free; use a smaller model, or lower max_num_seqs, "
            "max_model_len or nodes"
        )
    share = 2  # the cache may take half of the free memory
    if cache_bytes is not None:
        if cache_bytes > free:
            raise CacheMemoryError(
                f"kv_cache_memory_bytes={cache_bytes}, and {free / 2**30:.1f} GiB of {device} are free; lower it"
            )
        free, share, seqs = cache_bytes, 1, 1  # the cache must hold one request
    if value is not None:
        if not 2 <= value <= target.max_positions:
            raise ConfigError(f"max_model_len={value!r}; valid: an int from 2 to the model's {target.max_positions}")
        needed = seqs * pages_for(value + scratch) * bytes_per_page
        if needed > free:
            raise CacheMemoryError(
                f"max_num_seqs={seqs} requests of max_model_len={value} need {needed / 2**30:.1f} GiB of cache, and "
                f"{free / 2**30:.1f} GiB are free; lower one of them, or let them share kv_cache_memory_bytes"
                if cache_bytes is None
                else f"a request of max_model_len={value} needs {needed} bytes of cache; kv_cache_memory_bytes={free}"
            )
        return value
    fitting = free // share // bytes_per_page // seqs * PAGE_SIZE - scratch
    if fitting < 2 and cache_bytes is not None:
        least = pages_for(2 + scratch) * bytes_per_page
        raise ConfigError(f"kv_cache_memory_bytes={cache_bytes} holds no context; valid: {least} or more")
    if fitting < 2:
        raise ConfigError(f"half of the free memory holds no context for max_num_seqs={seqs}; lower max_num_seqs")
    length = min(target.max_positions, fitting)
    logger.info("max_model_len=%d (the model's %d, memory for %d)", length, target.max_positions, fitting)
    return length


def _weight_bytes(resolved: Resolved) -> int:
    dtype = resolved.loader.dtype
    drafts = sum(weight_bytes(draft.config, dtype, None) for draft in resolved.drafts)
    drafts += sum(head.num_parameters * dtype.itemsize for _, head in resolved.heads)
    return drafts + weight_bytes(resolved.target, dtype, resolved.quantization)


def _prefill_chunk(resolved: Resolved, scratch: int) -> int:
    """Return the largest number of prefill rows on a GPU whose buffers leave enough memory."""
    spare = (free_memory(resolved.loader.device) - _weight_bytes(resolved)) // CHUNK_SHARE
    least = _round_bytes(resolved, scratch, PREFILL_CHUNK)
    fitting = (rows for rows in GPU_PREFILL_CHUNKS if _round_bytes(resolved, scratch, rows) - least <= spare)
    return next(fitting, PREFILL_CHUNK)


def _round_bytes(resolved: Resolved, scratch: int, prefill_chunk: int) -> int:
    """Return the bytes of captured rounds and of a prefill pass for the maximum context length."""
    options, max_positions, models = resolved.options, resolved.target.max_positions, [resolved.target, *resolved.group]
    max_context = min(options.max_model_len or max_positions, max_positions)
    limits, natives = round_limits(resolved.spec, max_context, scratch, len(resolved.group)), _natives(models)
    return planned_bytes(natives, limits, options.max_num_seqs, prefill_chunk, resolved.loader.dtype)


def _natives(configs: Iterable[ModelConfig | AdapterConfig]) -> list[ModelConfig]:
    return [config for config in configs if isinstance(config, ModelConfig)]


def weight_bytes(config: ModelConfig | AdapterConfig, dtype: torch.dtype, quantization: str | None) -> int:
    """Estimate a model's weight memory in bytes, with float32 scales and zero points."""
    if isinstance(config, AdapterConfig):
        return config.shape.num_parameters() * dtype.itemsize
    sizes = tuple(layer._replace(has_v=True) for layer in config.shape.sizes)  # K that is V, too, is held as both
    config = replace(config, shape=replace(config.shape, sizes=sizes))
    total = config.num_parameters * dtype.itemsize
    forms: list[tuple[tuple[int, ...], Form]] = []  # shape and form of every quantised matrix
    if quantization is not None:
        form = Form(BITS[quantization], quantized_group(config.shape, quantization), False)
        forms = [(size, form) for size in quantizable(config.shape).values()]
    elif config.quantization is not None:
        placements = expected_tensors(config.shape, config.rules, config.quantization)
        forms = [(placement.shape, placement.form) for placement in placements if placement.form is not None]
    for size, (bits, group, has_zero) in forms:
        count = math.prod(size)
        factors = (2 if has_zero else 1) * (count // (group or size[1]))
        total += count * bits // 8 + 4 * factors - count * dtype.itemsize
    return total
