"""Stage `bits`: checks that tree nodes are bit-identical to plain decoding on this device.

Compares attention (a tree row against a pass of that row alone over a compacted cache), linear layers (a row among 1 to
320 others, and in every tile), whole passes of large random models (tree logits against token-by-token decoding) and
the engine (tokens and logits of trees against plain decoding, greedy and sampled, in captured rounds and step by step).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu import attention
from gpu.engines import open_engine
from gpu.models import Passes
from gpu.rows import REPEAT_SECONDS, differing_nodes, differing_repeats, linear
from gpu.setting import Setting
from gpu.stage import Context, Measurement
from gpu.workers import in_workers
from treespec import LLM, SamplingParams
from treespec_kernels.attention.tree_attention import TreeAttentionConfig, plan_tree_attention, tree_attention_triton
from treespec_kernels.tuning.testing import path_to, tree_attention_inputs, tree_parents
from treespec_weights.rules import ModelShape


@dataclass(frozen=True)
class Sizes:
    """Sizes of the comparisons: prefix lengths for attention, row counts for linear layers, prompts for the engine."""

    heads: tuple[tuple[int, int, int], ...]  # (query heads, KV heads, head_dim)
    prefixes: tuple[int, ...]
    nodes: int
    rows: int
    linears: tuple[tuple[int, int, bool], ...]  # (rows of the weight, in, silu_gate)
    contexts: tuple[int, ...]  # context lengths of whole passes
    prompts: int
    max_tokens: int
    batches: tuple[int, ...]
    modes: tuple[str, ...] | None = None  # modes of perf/identity.py; None = all


# Boundaries of pages, tiles, and short and long segments; and arbitrary lengths.
_BORDERS = [
    0,
    1,
    15,
    16,
    17,
    33,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    191,
    192,
    193,
    250,
    255,
    256,
    257,
    300,
    383,
    384,
    500,
    511,
    512,
    513,
    700,
    767,
    768,
    1000,
    1023,
    1024,
    1025,
    1500,
    2047,
    2048,
    2049,
    3333,
    4095,
    4096,
    4097,
    6000,
    8180,
    8191,
    8192,
    8193,
    9215,
    9216,
    9217,
    10240,
    12000,
    16383,
    16384,
]
ENGINE_SECONDS = 90.0  # time after which no further mode starts
REPEATS = 2000  # repeats of one pass; many, since a race corrupts results only occasionally
REAL = Sizes(
    heads=((32, 8, 128), (32, 8, 64), (28, 4, 128), (8, 8, 64), (16, 2, 96)),
    prefixes=tuple(_BORDERS),
    nodes=32,
    rows=320,  # more than the largest tile has
    linears=(
        (6144, 4096, False),
        (4096, 4096, False),
        (28672, 4096, True),
        (4096, 14336, False),
        (2048, 8192, False),
        (16384, 2048, True),
        (1024, 1000, False),
    ),
    contexts=(37, 255, 256, 700, 2047),
    prompts=12,
    max_tokens=64,
    batches=(1, 8),
)
DRY = Sizes(
    heads=((2, 1, 16),),
    prefixes=(3, 17),
    nodes=3,
    rows=3,
    linears=((32, 32, False), (64, 32, True)),
    contexts=(5,),
    prompts=2,
    max_tokens=6,
    batches=(2,),
    modes=("ssm-1", "auto"),
)


# Time limit per measurement, of which twelve run in parallel. Cold engines are slowest: 180 s to compile next to eleven
# others, capture and check rounds, and decode without speculation; `ENGINE_SECONDS` for the modes, and 50 s for the
# last mode. Engines start first; queued measurements have the other 140 s of the stage's 460.
WORKER_SECONDS = 320.0


def measurements(setting: Setting) -> list[Measurement]:
    """Return the measurements. They are not timed, so on a GPU they run in parallel, each in its own process."""
    own = list(own_measurements(setting))
    return own if setting.dry else in_workers(own, WORKER_SECONDS, 2 * WORKER_SECONDS)


def own_measurements(setting: Setting) -> Iterator[Measurement]:
    """Yield every measurement, to be run in this process."""
    sizes = DRY if setting.dry else REAL
    dtypes = [setting.dtype] if setting.dry else [torch.bfloat16, torch.float16, torch.float32]
    for heads in sizes.heads:
        for dtype in dtypes if heads == sizes.heads[0] else dtypes[:1]:
            name = f"attention/{'x'.join(map(str, heads))}/{_name(dtype)}"
            yield Measurement(name, partial(_attention, sizes, heads, dtype), 60.0)
    for out_features, in_features, gate in sizes.linears:
        name = f"row_linear/{out_features}x{in_features}{' silu_gate' if gate else ''}"
        yield Measurement(name, partial(linear, sizes.rows, out_features, in_features, gate), 45.0)
    for name, shape in {"8B": setting.target, "1B": setting.small}.items():
        yield Measurement(f"decoder/{name}", partial(_decoder, sizes, shape), 90.0 + REPEAT_SECONDS)
    for batch in sizes.batches:
        for how in DECODED:
            yield Measurement(f"{how}/{_name(setting.dtype)}/batch{batch}", partial(_engine, sizes, batch, how), 110.0)


DECODED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, step by step": {"logprobs": 1},
    "sampled": {"temperature": 0.8},
    "sampled, step by step": {"temperature": 0.8, "top_p": 0.95},
}
"""Sampling options. Captured rounds support neither log-probabilities nor top-p, so requests with them run step by
step, where logits are observable; they also run on an engine without captured rounds."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- attention


def _attention(sizes: Sizes, heads: tuple[int, int, int], dtype: torch.dtype, context: Context) -> dict[str, Any]:
    """Count rows that differ in bits between a tree pass and a single-row pass, over all prefixes and nodes."""
    setting = context.setting
    # The interpreter's dot calls BLAS, whose bits depend on the number of rows.
    config = attention.configuration(dtype, heads[2], heads[0] // heads[1], setting.device)
    config = replace(config, fixed_order_dot=setting.dry)
    generator = torch.Generator().manual_seed(setting.seed)
    compared, differing, worst, first = 0, 0, 0.0, None
    for number, prefix in enumerate(sizes.prefixes):
        kind = ("random", "random", "chain", "star")[number % 4]
        parents = tree_parents(kind, sizes.nodes, generator)
        shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": heads[2], "dtype": dtype}
        inputs = tree_attention_inputs([prefix], [parents], **shape, device=setting.device, seed=prefix)
        tree = _attend(inputs.q, inputs.k_cache, inputs.v_cache, inputs.rows, inputs.plan, config)
        for node in range(len(parents)):
            alone = _decoded_alone(inputs, prefix, path_to(parents, node), node, config)
            compared += 1
            if not torch.equal(tree[node], alone):
                differing += 1
                worst = max(worst, float((tree[node].float() - alone.float()).abs().max()))
                first = first or f"{kind} behind {prefix} tokens, node {node}"
    return {"rows": compared, "differing_rows": differing, "largest_difference": worst, "first": first}


def _decoded_alone(inputs: Any, prefix: int, path: list[int], node: int, config: TreeAttentionConfig) -> Tensor:
    """Compute a node's row as in plain decoding, with its path after the prefix in consecutive slots."""
    device = inputs.q.device
    source, target = prefix + torch.tensor(path, device=device), prefix + torch.arange(len(path), device=device)
    pages, page_size = inputs.rows["page_table"][0].long(), inputs.k_cache.shape[2]
    caches = []
    for cache in (inputs.k_cache, inputs.v_cache):
        compact = cache.clone()
        compact[pages[target // page_size], :, target % page_size] = cache[
            pages[source // page_size], :, source % page_size
        ]
        caches.append(compact)
    length = prefix + len(path) - 1

    def integers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    rows = inputs.rows | {
        "row_request": integers(0),
        "context_lens": integers(length),
        "depths": integers(0),
        "ancestors": integers(0)[None],
    }
    plan = {"context_lens": [length], "rows_per_request": [1], "depths": [0]}
    return _attend(inputs.q[node : node + 1], *caches, rows, plan, config)[0]


def _attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: dict[str, Any], plan: dict[str, Any], config: TreeAttentionConfig
) -> Tensor:
    made = plan_tree_attention(
        **plan,
        num_heads=q.shape[1],
        num_kv_heads=k_cache.shape[1],
        head_dim=q.shape[2],
        dtype=q.dtype,
        device=q.device,
        config=config,
    )
    out = torch.full_like(q, float("nan"))
    return tree_attention_triton(q, k_cache, v_cache, **rows, plan=made, out=out)


# --- the decoder


def _decoder(sizes: Sizes, shape: ModelShape, context: Context) -> dict[str, Any]:
    """Count nodes whose logits differ from token-by-token decoding, and passes not reproducible under GPU load."""
    opened = Passes(context.setting, shape, max(sizes.contexts), sizes.nodes)
    found = differing_nodes(opened, sizes.contexts, sizes.nodes, context.setting.seed)
    return found | differing_repeats(opened, max(sizes.contexts), sizes.nodes, 2 if context.setting.dry else REPEATS)


# --- the engine


def _engine(sizes: Sizes, batch: int, how: str, context: Context) -> dict[str, Any]:
    """Compare tokens, and logits if available, of tree and plain decoding with the embedded models."""
    import identity

    llm, options = context.keep(f"llm/{batch}", lambda: _open(context, batch, "step by step" not in how)), DECODED[how]
    recorder = context.keep(f"recorder/{batch}", lambda: identity.LogitRecorder(llm))
    prompts = identity.read_prompts(sizes.prompts, llm.get_tokenizer(), llm.engine.runner.target.vocab_size)
    modes = identity.modes(llm.engine.sources.ssms.names, 16)
    common = {"max_tokens": sizes.max_tokens, "ignore_eos": True, **options}
    params = [
        SamplingParams(**common, **({"seed": 1000 + i} if "temperature" in options else {}))
        for i in range(len(prompts))
    ]
    plain = llm.generate(prompts, params, spec="off")
    plain_logits = _take(recorder, plain)
    rows: list[dict[str, Any]] = []
    started, left_out = time.perf_counter(), []
    for mode in sizes.modes or _modes_of(modes, "temperature" in options):
        began = time.perf_counter()
        if began - started > ENGINE_SECONDS:
            left_out.append(mode)
            continue
        tree = llm.generate(prompts, params, spec=modes[mode])
        seconds = time.perf_counter() - began
        logits = _take(recorder, tree)
        comparable = plain_logits is not None and logits is not None
        tokens, differing = identity.compare(plain, tree, *((plain_logits, logits) if comparable else ([], [])))
        llm.engine.check_integrity()
        made = sum(output.metrics.generated_tokens for output in tree)
        passes = sum(output.metrics.target_passes for output in tree)
        rows.append(
            {
                "mode": mode,
                "tokens": made,
                "differing_tokens": tokens,
                "differing_logit_rows": differing if comparable else None,
                "acceptance_length": made / passes,
                "seconds": seconds,
            }
        )
    compared = [row["differing_logit_rows"] for row in rows if row["differing_logit_rows"] is not None]
    return {
        "tokens": sum(row["tokens"] for row in rows),
        "differing_tokens": sum(row["differing_tokens"] for row in rows),
        "differing_logit_rows": sum(compared) if len(compared) == len(rows) else None,
        "frozen": llm.stats()["frozen"],
        "modes_left_out": left_out,
        "modes": rows,
    }


def _open(context: Context, batch: int, captured: bool) -> LLM:
    context.release()  # frees the engines of other batch sizes
    return open_engine(context.setting, captured=captured, max_num_seqs=batch)


def _modes_of(modes: dict[str, Any], sampled: bool) -> Sequence[str]:
    """Return the names of all modes, or for sampling, which is slower, of those with several sources."""
    return [name for name in modes if not sampled or name.count(",") == 2 or name in ("everything", "auto")]


def _take(recorder: Any, outputs: Sequence[Any]) -> list[Tensor] | None:
    """Return the logits of every token; None if the engine does not expose them."""
    try:
        return recorder.take(outputs)
    except (KeyError, RuntimeError):
        recorder.rows.clear()
        return None


def describe(document: dict[str, Any]) -> str:
    lines = []
    for name, figures in document["measurements"].items():
        if "error" in figures:
            lines.append(f"  {name:36} ERROR {figures['error'][:150]}")
        elif name.startswith(("attention", "decoder")):
            lines.append(
                f"  {name:36} {figures['differing_rows']} of {figures['rows']} rows differ"
                + (f", first {figures['first']}" if figures["first"] else "")
                + (f"; {figures['differing_repeats']} of {figures['repeats']} repeats" if "repeats" in figures else "")
            )
        elif name.startswith("row_linear"):
            error = figures["relative_error"]  # None if NaN
            lines.append(
                f"  {name:36} {figures['differing_row_counts']} of {figures['row_counts']} row counts and "
                f"{figures['differing_tiles']} of tiles {figures['tiles']} differ, "
                f"error {'-' if error is None else format(error, '.1e')}"
            )
        else:
            logits = figures["differing_logit_rows"]
            lines.append(
                f"  {name:36} {figures['differing_tokens']} of {figures['tokens']} tokens differ, "
                f"logit rows: {'not available' if logits is None else logits}"
                + "".join(f", without {mode}" for mode in figures["modes_left_out"])
            )
    return "\n".join(lines)
