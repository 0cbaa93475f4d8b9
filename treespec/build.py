"""From folders to an engine: everything is resolved and checked here, before the first request."""

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from treespec import costs
from treespec.cache import KVCache, pages_for
from treespec.config import EngineConfig, ModelConfig, SpecConfig
from treespec.drafters.base import Drafter
from treespec.drafters.lookup import LookupDrafter
from treespec.drafters.ssm import MAX_SLOTS, SsmDrafter
from treespec.engine import Engine
from treespec.errors import ConfigError, DraftError, ExactnessError, KernelError, ModelError
from treespec.models.attention import ATTENTIONS, make_attention
from treespec.models.attention_triton import TritonAttention
from treespec.models.compiled import CompiledDecoder, check_compiled
from treespec.models.decoder import Decoder
from treespec.models.triton_decoder import TritonDecoder
from treespec.planner import CostCurve, Planner
from treespec.rounds.build import captured_rounds, planned_bytes, release_cached, round_limits, stack_sizes
from treespec.rounds.engine import GraphEngine
from treespec.runner import Runner
from treespec.scheduler import Scheduler
from treespec.selftest import differing_rows
from treespec_kernels.linear import LinearImpl, onednn_available
from treespec_kernels.tree_batch import PAGE_SIZE
from treespec_kernels.tuned import KernelConfigs
from treespec_weights import default_folder, default_names, load_weights, read_vocabulary

logger = logging.getLogger("treespec")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LINEARS = ("onednn", "torch", "triton")
START_SECONDS = 0.5  # for measuring costs where `treespec autotune` has stored none
THREADS_MARGIN = 0.9  # another number of threads is named where it takes less of the time than this
FIXED_ROWS = 64  # rows of every pass where the linear layers are not row-invariant


@dataclass(frozen=True)
class Built:
    """An engine and what it was built from."""

    engine: Engine
    config: EngineConfig
    target: ModelConfig
    memory: dict[str, int]  # the plan, in bytes
    tuned_file: str | None  # that the kernels' configurations were read from
    default_kernels: tuple[str, ...]  # shapes that it says nothing of


def resolve_model(model: str | os.PathLike[str] | None) -> Path:
    """The folder of a model: the embedded target, a folder, or a hub id's files (cached, or fetched where online)."""
    if model is None:
        return default_folder("target")
    folder = Path(model).expanduser()
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)):
        return folder  # a missing folder is refused by the loader, with its name
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(model), allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{str(model)!r} is no folder here, and the hub did not give it ({type(error).__name__}); "
            "name a folder with config.json and *.safetensors"
        ) from error


def resolve_drafts(model: object, drafts: Sequence[Any] | None) -> tuple[list[tuple[str, Path]], list[Drafter]]:
    """Names and folders of the SSMs, and the drafter objects, that `drafts` stands for."""
    if isinstance(drafts, str | os.PathLike):
        raise ConfigError(f"drafts={drafts!r}; valid: a list, such as [{str(drafts)!r}]")
    if drafts is not None and not isinstance(drafts, Sequence):
        raise ConfigError(f"drafts={drafts!r}; valid: None, or a list of folders, hub ids or Drafter objects")
    if drafts is None:
        names = [name for name in default_names() if name.startswith("ssm-")] if model is None else []
        return [(name, default_folder(name)) for name in names], []
    folders: list[tuple[str, Path]] = []
    objects: list[Drafter] = []
    for draft in drafts:
        if isinstance(draft, str | os.PathLike):
            embedded = str(draft) in default_names() and not Path(draft).exists()
            folder = default_folder(str(draft)) if embedded else resolve_model(draft)
            name = folder.resolve().name
            taken = sum(1 for known, _ in folders if known == name or known.startswith(f"{name}#"))
            folders.append((name if not taken else f"{name}#{taken + 1}", folder))
        elif isinstance(draft, Drafter):
            objects.append(draft)
        else:
            raise ConfigError(
                f"drafts: {draft!r} is neither a folder, a hub id nor a Drafter (name, propose, commit, release)"
            )
    return folders, objects


def resolve_device(device: str | torch.device) -> torch.device:
    try:
        chosen = (
            torch.device("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else torch.device(device)
        )
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f'device={device!r}; valid: "auto", "cpu", "cuda", "cuda:0"') from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f'device={device!r} is not supported; valid: "auto", "cpu", "cuda"')
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f'device={device!r}, but torch sees no GPU here; use device="cpu" or "auto"')
    if chosen.type == "cuda" and chosen.index not in (None, torch.cuda.current_device()):
        raise ConfigError(
            f"device={device!r}, but this process's current GPU is {torch.cuda.current_device()}; choose one by "
            "CUDA_VISIBLE_DEVICES, or by torch.cuda.set_device before"
        )
    return chosen


def resolve_dtype(dtype: str | torch.dtype, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """auto = the checkpoint's; on a CPU without bf16 instructions float32, said once."""
    if isinstance(dtype, torch.dtype):
        chosen = dtype
    elif dtype == "auto":
        chosen = stored
        if device.type == "cpu" and stored != torch.float32 and not onednn_available(stored):
            logger.warning("%s has no fast %s here; computing in float32", device, stored)
            chosen = torch.float32
    elif dtype in DTYPES:
        chosen = DTYPES[dtype]
    else:
        raise ConfigError(f'dtype={dtype!r}; valid: "auto", {", ".join(map(repr, DTYPES))} or a torch dtype')
    if chosen not in DTYPES.values():
        raise ConfigError(f"dtype={dtype!r}; valid: {', '.join(DTYPES)}")
    return chosen


def free_memory(device: torch.device) -> int:
    """Bytes that are free now; on a CPU within the limit of the control group."""
    if device.type == "cuda":
        release_cached(device)  # an engine before this one may have left some
        return torch.cuda.mem_get_info(device)[0]
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # macOS has the first two and not the third, Windows none
        free = 8 << 30
        logger.warning("the free memory is unknown here; assuming %d GiB", free >> 30)
    try:
        group = Path("/sys/fs/cgroup")
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or no limit
        return free
    return max(min(free, left), 0)


def resolve_max_model_len(
    asked: int | None,
    target: ModelConfig,
    bytes_per_page: int,
    seqs: int,
    scratch: int,
    device: torch.device,
    held: int = 0,
) -> int:
    """None = the smaller of the config's and what half of the free memory holds for `seqs` requests.

    `held`: bytes that are to be taken for other things. Raises ConfigError where the cache does not fit into memory.
    """
    free = free_memory(device) - held
    if free <= 0:
        raise ConfigError(
            f"weights and captured rounds need {held / 2**30:.1f} GiB, and {(free + held) / 2**30:.1f} GiB of {device} "
            "are free; take a smaller model, or lower max_num_seqs, max_model_len or nodes"
        )
    if asked is not None:
        if not 2 <= asked <= target.max_positions:
            raise ConfigError(f"max_model_len={asked!r}; valid: an int from 2 to the model's {target.max_positions}")
        needed = seqs * pages_for(asked + scratch) * bytes_per_page
        if needed > free:
            raise ConfigError(
                f"max_num_seqs={seqs} requests of max_model_len={asked} need {needed / 2**30:.1f} GiB of cache, and "
                f"{free / 2**30:.1f} GiB are free; lower one of them"
            )
        return asked
    holds = free // 2 // bytes_per_page // seqs * PAGE_SIZE - scratch
    if holds < 2:
        raise ConfigError(f"half of the free memory holds no context for max_num_seqs={seqs}; lower max_num_seqs")
    length = min(target.max_positions, holds)
    logger.info("max_model_len=%d (the model's %d, memory for %d)", length, target.max_positions, holds)
    return length


def build(
    model: str | os.PathLike[str] | None,
    drafts: Sequence[Any] | None,
    spec: SpecConfig,
    device: str | torch.device,
    dtype: str | torch.dtype,
    exact: bool,
    max_num_seqs: int,
    max_model_len: int | None,
    attention: str,
    prefill_chunk: int,
    compile: bool = False,
    linear: str = "auto",
    cuda_graphs: bool = True,
) -> Built:
    """Build an engine. Arguments and errors as `LLM`."""
    for name, value in (("max_num_seqs", max_num_seqs), ("prefill_chunk", prefill_chunk)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r}; valid: an int of at least 1")
    if max_model_len is not None and (isinstance(max_model_len, bool) or not isinstance(max_model_len, int)):
        raise ConfigError(f"max_model_len={max_model_len!r}; valid: an int of at least 2, or None")
    for name, flag in (("exact", exact), ("compile", compile), ("cuda_graphs", cuda_graphs)):
        if not isinstance(flag, bool):
            raise ConfigError(f"{name}={flag!r}; valid: True or False")
    if model is not None and not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model={model!r}; valid: a folder, a hub id, or None for the embedded target")
    where = resolve_device(device)
    target = ModelConfig.from_hf(resolve_model(model), max_model_len)
    ssm_folders, drafters = resolve_drafts(model, drafts)
    spec.check_sources([name for name, _ in ssm_folders])
    if spec.sources is not None:
        ssm_folders = [(name, folder) for name, folder in ssm_folders if spec.allows("ssm", name)]
    ssm_configs = [(name, ModelConfig.from_hf(path, max_model_len)) for name, path in ssm_folders]
    _check_vocabularies(target, ssm_configs)
    computed = resolve_dtype(dtype, target.dtype, where)
    kind = resolve_attention(attention, where)
    products, fixed_rows = resolve_linear(linear, kind, computed, where, exact, spec, compile)
    if compile:
        for name, asked in (("attention", attention), ("linear", linear)):
            if asked != "auto":
                raise KernelError(f"{name}={asked!r}, but compile=True has its own; leave it at 'auto'")
        for model_config in (target, *(draft for _, draft in ssm_configs)):
            check_compiled(model_config, computed, where)
    shapes = [target.shape, *(config.shape for _, config in ssm_configs)]
    scratch = max(spec.max_nodes, MAX_SLOTS)
    cache_dtype = make_attention(kind, target.shape, computed, where).cache_dtype
    page = KVCache.bytes_per_page(shapes, cache_dtype)
    held = {}
    if products == "triton" and where.type == "cuda":  # a CPU's memory is not divided so closely
        longest = min(max_model_len or target.max_positions, target.max_positions)
        held = {
            "weights": sum(shape.num_parameters() for shape in shapes) * computed.itemsize,
            "rounds": planned_bytes(
                shapes, round_limits(spec, longest, scratch, len(ssm_configs)), max_num_seqs, prefill_chunk, computed
            ),
        }
    length = resolve_max_model_len(max_model_len, target, page, max_num_seqs, scratch, where, sum(held.values()))

    configs = KernelConfigs.load(where) if products == "triton" else None

    def load(config: ModelConfig, min_rows: int) -> Decoder:
        weights = load_weights(config.folder, config.shape, config.rules, computed, where)
        if compile:
            return CompiledDecoder(config, weights, costs.cache_folder() / "compiled")
        op = make_attention(kind, config.shape, computed, where, configs, exact)
        if configs is not None:
            assert isinstance(op, TritonAttention)
            return TritonDecoder(config, weights, op, configs, exact, length + scratch)
        assert products != "triton"
        return Decoder(config, weights, op, products, min_rows)

    decoder = load(target, fixed_rows or 2)
    num_pages = max_num_seqs * pages_for(length + scratch)
    stacks = None if configs is None else [1, *stack_sizes([config for _, config in ssm_configs])]
    cache = KVCache(shapes, num_pages, cache_dtype, where, stacks)
    runner = Runner(decoder, cache, fixed_rows)
    if exact:
        _prove(decoder, cache, attention, max(prefill_chunk, max_num_seqs * spec.max_nodes))
    ssms = None
    if ssm_configs:  # a draft's bits decide nothing, so its rows are never padded
        ssms = SsmDrafter([load(config, 2) for _, config in ssm_configs], [name for name, _ in ssm_configs], cache)
    config = EngineConfig(
        device=where,
        dtype=computed,
        exact=exact,
        max_num_seqs=max_num_seqs,
        max_model_len=length,
        prefill_chunk=min(prefill_chunk, fixed_rows or prefill_chunk),
        max_tree_slots=scratch,
        num_threads=torch.get_num_threads(),
        linear=products,
        attention=decoder.attention.name,
        compile=compile,
    )
    if kind == "triton" and where.type == "cpu":
        curve = CostCurve((1,), (1.0,), 0.1)  # times in Triton's interpreter say nothing, and take long
    else:
        key = costs.cost_key(runner, ssms, config.num_threads)
        known = costs.load(key)
        curve = known if known is not None else costs.measure(runner, ssms, START_SECONDS)
        if known is not None and where.type == "cpu":
            _compare_threads(costs.by_threads(key), config.num_threads)
    if configs is not None:
        logger.info("%s", configs.describe())
    scheduler = Scheduler(cache, max_num_seqs, config.prefill_chunk, scratch)
    lookup = LookupDrafter() if spec.allows("lookup", "lookup") else None
    captured_bytes = 0
    parts = (runner, scheduler, Planner(curve), ssms, lookup, drafters, length)
    if configs is None:
        engine = Engine(*parts)
    else:
        rounds = captured_rounds(runner, ssms, configs, spec, length, scratch, max_num_seqs, cuda_graphs)
        engine = GraphEngine(*parts, rounds)
        captured_bytes = rounds.nbytes
    memory = {
        "target_weights": decoder.nbytes,
        "draft_weights": sum(draft.nbytes for draft in ssms.models) if ssms else 0,
        "kv_cache": cache.nbytes,
        "captured_rounds": captured_bytes,
    }
    tuned_file = None if configs is None or configs.file is None else str(configs.file)
    return Built(engine, config, target, memory, tuned_file, tuple(configs.fallbacks) if configs is not None else ())


def resolve_linear(
    linear: str, attention: str, dtype: torch.dtype, device: torch.device, exact: bool, spec: SpecConfig, compile: bool
) -> tuple[LinearImpl | Literal["compiled", "triton"], int | None]:
    """The implementation of linear layers, and the fixed number of rows of every pass where exactness needs one."""
    if linear not in ("auto", *LINEARS):
        raise KernelError(f"linear={linear!r}; valid: 'auto', {', '.join(map(repr, LINEARS))}")
    if compile:
        return "compiled", None
    available = device.type == "cpu" and onednn_available(dtype)
    if linear == "onednn" and not available:
        raise KernelError(f"linear='onednn' needs a CPU with fast {dtype}, the device is {device}; use linear='auto'")
    if linear == "triton" and attention != "triton":
        raise KernelError(f"linear='triton' goes with attention='triton', not with {attention!r}")
    if linear == "triton" or (linear == "auto" and device.type == "cuda"):
        return "triton", None
    if linear in ("auto", "onednn") and available:
        return "onednn", None
    if not exact:
        return "torch", None
    rows = max(FIXED_ROWS, spec.max_nodes)
    logger.warning("%s on %s has no row-invariant linear layers: every pass has %d rows", dtype, device, rows)
    return "torch", rows


def resolve_attention(attention: str, device: torch.device) -> str:
    """The name of an implementation of tree attention."""
    if attention not in ("auto", *ATTENTIONS):
        raise KernelError(f"attention={attention!r}; valid: 'auto', {', '.join(map(repr, ATTENTIONS))}")
    return attention if attention != "auto" else "cpu-packed" if device.type == "cpu" else "triton"


def _prove(decoder: Decoder, cache: KVCache, attention: str, largest_pass: int) -> None:
    """Run the self-test; where packed attention fails it and was not asked for, take the gathered one and say so."""
    found = differing_rows(decoder, cache.pools[0], largest_pass)
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
            threads, 1000 * seconds[threads], best, 1000 * seconds[best], best, best,
        )  # fmt: skip


def _check_vocabularies(target: ModelConfig, drafts: Sequence[tuple[str, ModelConfig]]) -> None:
    """An SSM must speak the target's tokens."""
    own = read_vocabulary(target.folder)
    for name, config in drafts:
        if config.shape.vocab_size != target.shape.vocab_size:
            raise DraftError(
                f"draft {name} ({config.folder}) has a vocabulary of {config.shape.vocab_size} tokens, the target "
                f"{target.folder} one of {target.shape.vocab_size}; use a draft with the target's tokenizer"
            )
        other = read_vocabulary(config.folder)
        if own is not None and other is not None and own.sha256 != other.sha256:
            raise DraftError(
                f"draft {name} ({config.folder}) has another tokenizer than {target.folder}: the same ids mean other "
                "tokens; use a draft with the target's tokenizer"
            )
