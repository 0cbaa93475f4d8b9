"""Load the target of an engine with its KV cache, and test it for bit equality on this machine."""

import dataclasses
import logging
from dataclasses import dataclass

import torch

from treespec.adapter.decoder import AdapterDecoder
from treespec.adapter.make_decoder import find_exact_adapter
from treespec.adapter.trace import AdapterConfig
from treespec.cache import KVCache
from treespec.engine_options import EngineOptions
from treespec.errors import ExactnessError, KernelError
from treespec.models.attention import make_attention
from treespec.models.decoder import Decoder
from treespec.startup.plan_memory import MemoryPlan
from treespec.startup.resolve import Resolved
from treespec.startup.selftest import differing_rows
from treespec_kernels.launch.triton_launch import is_triton_error

logger = logging.getLogger("treespec")

ADAPTER_ROWS = 32  # rows of every pass of an adapter if no weaker padding is exact


@dataclass(frozen=True)
class Target:
    """A loaded target.

    Attributes:
        decoder: decoder of the target.
        cache: KV cache of the engine; the self-test leaves it zeroed.
        fixed_rows: rows of every pass if exactness needs padding, else None.
        exactness: guarantee about the output tokens, for `stats` and the log.
    """

    decoder: Decoder
    cache: KVCache
    fixed_rows: int | None
    exactness: str


def load_target(resolved: Resolved, plan: MemoryPlan) -> Target:
    """Load the target, allocate the KV cache, and run the self-test unless exact=False.

    Raises:
        ExactnessError: trees are not bit-identical to plain decoding. KernelError: a kernel does not run, or the target
            returns no hidden states for its draft heads.
    """
    loader, config, fixed_rows = resolved.loader, resolved.target, resolved.fixed_rows
    min_rows = fixed_rows or 2
    decoder = loader.load(config, config.shape.vocab_size, plan.positions, min_rows, resolved.quantization)
    if plan.features is not None:
        decoder.check_states(plan.features.layers)
    cache = plan.make_cache(loader.device)
    if resolved.options.exact and isinstance(config, AdapterConfig):
        decoder, fixed_rows = _exact_adapter(resolved, plan, config, cache)
    elif resolved.options.exact:
        check_exact(decoder, cache, resolved.options.attention, plan.largest_pass)
    exactness = _describe_exactness(decoder, fixed_rows) if resolved.options.exact else "not guaranteed"
    if isinstance(config, AdapterConfig):
        logger.info(
            "%s runs through transformers' own code, linear=%s, exactness: %s", config.folder, decoder.linear, exactness
        )
    return Target(decoder, cache, fixed_rows, exactness)


def check_exact(decoder: Decoder, cache: KVCache, attention: str, largest_pass: int) -> None:
    """Run the self-test on a native decoder. attention="auto" falls back from packed to gathered attention.

    Raises:
        ExactnessError: the self-test fails. KernelError: a Triton kernel does not compile or launch.
    """
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
        logger.warning("packed attention is not exact on this machine (%s); using gathered attention", found[0])
        decoder.attention = make_attention("cpu-gathered", decoder.config.shape, decoder.dtype, decoder.device)
        found = differing_rows(decoder, cache.pools[0], largest_pass)
    if found:
        raise ExactnessError(
            f"trees would not be bit-identical to plain decoding with attention={decoder.attention.name!r}, "
            f"linear={decoder.linear!r}, {decoder.dtype}, {torch.get_num_threads()} threads: {'; '.join(found[:3])}. "
            "Use exact=False to continue"
        )


def fallback_options(resolved: Resolved, error: ExactnessError) -> EngineOptions:
    """Return options that replace an "auto" choice rejected by the self-test.

    Raises `error` if there is no other choice.
    """
    options = resolved.options
    if isinstance(resolved.target, AdapterConfig):  # `find_exact_adapter` has tried all alternatives
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
    """Find the cheapest attention and padding with which an adapter passes the self-test."""
    loader, vocab_size = resolved.loader, config.shape.vocab_size
    attentions = [loader.attention]
    if resolved.options.attention == "auto" and loader.attention == "cpu-packed":
        attentions.append("cpu-gathered")
    return find_exact_adapter(
        lambda attention, *padding: loader.adapt(config, vocab_size, plan.positions, attention, *padding),
        lambda decoder: differing_rows(decoder, cache.pools[0], plan.largest_pass),
        attentions,
        max(ADAPTER_ROWS, resolved.spec.max_nodes),
    )


def _describe_exactness(decoder: Decoder, fixed_rows: int | None) -> str:
    if fixed_rows is not None:
        return f"bit-identical at {fixed_rows} fixed rows"
    if isinstance(decoder, AdapterDecoder) and decoder.multiple > 1:
        return f"bit-identical at multiples of {decoder.multiple} rows"
    return "bit-identical"
