"""Stage `baselines`: decoding with treespec's passes and with a compiled static-cache Llama, by batch, in one run.

The compiled Llama (`baseline.py`) has random weights of the same shape and runs as CUDA graphs of torch.compile. Its
first mode is max-autotune; reduce-overhead is measured if that takes too long to compile or fails.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu import passes
from gpu.baseline import StaticLlama
from gpu.clock import copy_bandwidth, matmul_rate
from gpu.models import Passes, config_of, random_weights
from gpu.passes import COPY, MATMUL
from gpu.setting import Setting
from gpu.stage import Context, Measurement

BATCHES = {1: 32, 16: 32, 4: 32, 64: 8}  # nodes per request of the tree passes, by batch
DRY_BATCHES = {2: 4}
MODE, FALLBACK = "max-autotune", "reduce-overhead"
COMPILE_SECONDS = 300.0
ROOM = 64  # positions of the static cache beyond the context
MAX_ERROR = 0.3  # relative; 32 layers of random weights amplify the roundings of bfloat16, and a wrong step has over 1


def measurements(setting: Setting) -> Iterator[Measurement]:
    sizes = passes.sizes_of(setting)
    yield Measurement(COPY, lambda context: copy_bandwidth(context.clock(20), sizes.copy_bytes), 60.0)
    yield Measurement(MATMUL, lambda context: matmul_rate(context.clock(20), sizes.matmul, setting.dtype), 60.0)
    for batch, nodes in (DRY_BATCHES if setting.dry else BATCHES).items():
        for each in (1, nodes):
            yield Measurement(key(batch, each), partial(_passes, batch, nodes, each), 90.0)
        yield Measurement(compiled_key(batch), partial(_compiled, batch, MODE), COMPILE_SECONDS)
        yield Measurement(compiled_key(batch, FALLBACK), partial(_fallback, batch), COMPILE_SECONDS)


def key(batch: int, nodes: int) -> str:
    return f"passes/batch{batch}/nodes{nodes}"


def compiled_key(batch: int, mode: str = MODE) -> str:
    return f"compiled/batch{batch}/{mode}"


def compiled_us(found: dict[str, Any], batch: int) -> float | None:
    """Return the microseconds of a step of the compiled Llama in the first mode that was measured."""
    times = [found.get(compiled_key(batch, mode), {}).get("us") for mode in (MODE, FALLBACK)]
    return next((each for each in times if each is not None), None)


def _passes(batch: int, most_nodes: int, nodes: int, context: Context) -> dict[str, Any]:
    setting = context.setting
    main, name = passes.sizes_of(setting).contexts[0], f"passes/{batch}"
    if name not in context.shared:
        context.release()
        with torch.inference_mode():
            context.shared[name] = Passes(setting, setting.target, main, most_nodes, batch)
    return passes.figures(context, context.shared[name], main, nodes)


def _fallback(batch: int, context: Context) -> dict[str, Any]:
    """Measure the second mode if the first failed; otherwise say that it is not needed."""
    error = context.figure(compiled_key(batch), "error")
    if error is None:
        return {"skipped": f"{MODE} was measured"}
    return _compiled(batch, FALLBACK, context) | {"instead_of": error}


def _compiled(batch: int, mode: str, context: Context) -> dict[str, Any]:
    """Compile and time one step of decoding behind the main context.

    Raises:
        ValueError: the compiled step differs from the eager one by more than rounding.
    """
    setting, main = context.setting, passes.sizes_of(context.setting).contexts[0]
    context.release()
    torch._dynamo.reset()
    try:
        with torch.no_grad(), _compiler_settings():
            weights = random_weights(setting, setting.target)
            model = StaticLlama(config_of(setting, setting.target), weights, batch, main + ROOM)
            for layer in model.layers:
                layer.cache.normal_()
            tokens = torch.arange(batch, device=setting.device, dtype=torch.int64)
            position = torch.full((1,), main, device=setting.device, dtype=torch.int64)
            expected = model(tokens, position)
            options: dict[str, Any] = {"backend": "aot_eager"} if setting.dry else {"mode": mode}
            step = torch.compile(model, fullgraph=True, dynamic=False, **options)
            began = time.perf_counter()
            for _ in range(3):  # compile, warm up, and record the CUDA graph
                logits = step(tokens, position).clone()
            compile_seconds = time.perf_counter() - began
            error = float((logits.float() - expected.float()).norm() / expected.float().norm())
            if not error < MAX_ERROR:
                raise ValueError(f"the compiled step differs from the eager one by {error:.1%}")
            times = context.clock(50, 10.0).eager(lambda: step(tokens, position))
    finally:
        torch._dynamo.reset()
    return times.figures | {
        "mode": "aot_eager" if setting.dry else mode,
        "compile_seconds": compile_seconds,
        "relative_error": error,
    }


@contextmanager
def _compiler_settings() -> Iterator[None]:
    """Let the compiler see attention as two products and a softmax in the model's dtype, and print no timings.

    The fused kernels that take a mask run one program per head over the whole context.
    """
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH), inductor_config.patch(autotune_num_choices_displayed=0):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)


def describe(document: dict[str, Any]) -> str:
    found = document["measurements"]
    lines = [f"  {'8B at 2k':10} {'plain pass':>12} {'tree pass':>18} {'compiled':>10}  (ms)"]
    for batch, nodes in {**BATCHES, **(DRY_BATCHES if document["dry_run"] else {})}.items():
        plain, tree = (found.get(key(batch, each), {}).get("graph_us") for each in (1, nodes))
        compiled = compiled_us(found, batch)
        if any(each is not None for each in (plain, tree, compiled)):
            shown = f"{_ms(plain):>12} {_ms(tree):>8} ({nodes:2} nodes) {_ms(compiled):>10}"
            lines.append(f"  batch {batch:<4} {shown}{_how(found, batch)}")
    lines += [f"    {name}: ERROR {each['error'][:110]}" for name, each in found.items() if "error" in each]
    return "\n".join(lines)


def _ms(us: float | None) -> str:
    return "-" if us is None else f"{us / 1e3:.3f}"


def _how(found: dict[str, Any], batch: int) -> str:
    measured = [found.get(compiled_key(batch, mode), {}) for mode in (MODE, FALLBACK)]
    used = next((each for each in measured if "us" in each), None)
    return f"  {used['mode']}, compiled in {used['compile_seconds']:.0f} s" if used else ""
