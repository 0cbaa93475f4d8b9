"""Stage `prefill`: seconds to the first token of an 8B Llama shape, and the rate of its products against cuBLAS.

As the engine does, all but the last token of a prompt are prefilled in chunks, each planned by the host, and a plain
pass of the last token gives the first logits. The products of the same shapes, without anything between them, are
timed in the same run.
"""

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from gpu.models import Passes
from gpu.setting import Setting
from gpu.stage import Context, Measurement
from treespec.startup.engine_options import EngineOptions
from treespec_kernels.attention.tree_batch import RequestRows

LENGTHS, DRY_LENGTHS = (2048, 8192), (7,)
REPEATS = 5


def measurements(setting: Setting) -> Iterator[Measurement]:
    lengths = DRY_LENGTHS if setting.dry else LENGTHS
    for length in lengths:
        yield Measurement(products_key(length), partial(_products, length), 60.0)
    for exact in (True, False):
        for length in lengths:
            yield Measurement(key(length, exact), partial(_prompt, max(lengths), length, exact), 120.0)


def key(length: int, exact: bool = True) -> str:
    return f"prompt/{length}/{'exact' if exact else 'fast'}"


def products_key(length: int) -> str:
    return f"products/{length}"


def chunks_of(setting: Setting, length: int) -> list[tuple[int, int]]:
    """Return the first position and number of rows of every chunk of a prompt, without its last token."""
    chunk = 4 if setting.dry else EngineOptions.prefill_chunk
    return [(start, min(chunk, length - 1 - start)) for start in range(0, length - 1, chunk)]


def _products(length: int, context: Context) -> dict[str, Any]:
    """Time torch's products of all layers for the chunks of a prompt."""
    setting, shape = context.setting, context.setting.target
    width, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inter = shape.hidden_size, shape.intermediate_size
    sizes = ((width + 2 * kv, hidden), (hidden, width), (2 * inter, hidden), (hidden, inter))
    weights = [setting.random(*size, scale=size[1] ** -0.5) for size in sizes]
    total = 0.0
    with torch.inference_mode():
        for rows, count in Counter(rows for _, rows in chunks_of(setting, length)).items():
            inputs = [setting.random(rows, size[1]) for size in sizes]
            calls = [partial(torch.matmul, x, weight.mT) for x, weight in zip(inputs, weights, strict=True)]
            total += context.clock(20, 5.0).graphed(*calls).median * len(calls) * shape.num_layers * count
    flop = 2 * sum(out * into for out, into in sizes) * shape.num_layers * (length - 1)
    return {"us": total, "flop": flop, "flop_per_second": flop / (1e-6 * total)}


def _prompt(longest: int, length: int, exact: bool, context: Context) -> dict[str, Any]:
    """Time a prompt from its tokens on the host to its first token there, and count the FLOP of its products only.

    Raises:
        ValueError: the pass computed NaN or infinity.
    """
    setting = context.setting
    opened = _open(context, longest, exact)
    decoder, pages = opened.decoder, opened.pages[0]
    prompt = torch.randint(opened.shape.vocab_size, (length,), generator=torch.Generator().manual_seed(setting.seed))

    def run() -> torch.Tensor:
        for start, rows in chunks_of(setting, length):
            layout = decoder.plan([RequestRows.chain(start, rows, pages)], opened.pool)
            decoder.forward(prompt[start : start + rows].to(setting.device), layout, opened.pool)
        layout = decoder.plan([RequestRows.chain(length - 1, 1, pages)], opened.pool)
        return decoder.logits(decoder.forward(prompt[-1:].to(setting.device), layout, opened.pool))

    seconds = []
    with torch.inference_mode():
        if not bool(run().isfinite().all()):  # compiles, too
            raise ValueError("the pass computed NaN or infinity")
        for _ in range(1 if setting.dry else REPEATS):
            began = time.perf_counter()
            int(run().argmax())  # waits for the device
            seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    flop, products = (context.figure(products_key(length), name) for name in ("flop", "us"))
    return {
        "first_token_seconds": median,
        "seconds_spread": [min(seconds), max(seconds)],
        "chunks": len(chunks_of(setting, length)),
        "tokens_per_second": length / median,
        "flop_per_second": flop / median if flop else None,
        "over_products": 1e6 * median / products if products else None,
    }


def _open(context: Context, longest: int, exact: bool) -> Passes:
    """Open a decoder, after releasing the previous one."""
    name = f"prefill/{exact}"
    if name not in context.shared:
        context.release()
        with torch.inference_mode():
            context.shared[name] = Passes(context.setting, context.setting.target, longest, 1, exact=exact)
    opened: Passes = context.shared[name]
    return opened


def describe(document: dict[str, Any]) -> str:
    found, lines = document["measurements"], []
    for name, figures in found.items():
        if "error" in figures:
            lines.append(f"  {name:20} ERROR {figures['error'][:130]}")
        elif "first_token_seconds" in figures:
            rate, over = figures["flop_per_second"], figures["over_products"]
            lines.append(
                f"  {name:20} {1e3 * figures['first_token_seconds']:8.1f} ms to the first token, "
                f"{figures['tokens_per_second']:.0f} tok/s"
                + ("" if rate is None else f", {rate / 1e12:.0f} TFLOP/s, {over:.2f} times cuBLAS's products")
            )
        else:
            lines.append(f"  {name:20} {figures['us'] / 1e3:8.1f} ms, {figures['flop_per_second'] / 1e12:.0f} TFLOP/s")
    return "\n".join(lines)
