"""Stage `families`: bits and pass times of every model family, with four layers of a real model's sizes.

Per family: tree nodes whose logits differ from token-by-token decoding, at prefixes within and beyond its windows; pass
times of one node and of a tree; and the cost of kernel options relative to Llama's.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu import roofline
from gpu.clock import copy_bandwidth
from gpu.models import Passes
from gpu.rows import differing_nodes
from gpu.setting import Setting
from gpu.stage import Context, Measurement
from gpu.workers import compile_in_workers
from treespec.config import ModelConfig
from treespec_kernels.attention.qkv_rope import HeadNorm, qkv_rope_triton
from treespec_kernels.attention.tree_attention import plan_tree_attention, tree_attention_triton
from treespec_kernels.linear.rms_norm import rms_norm_triton
from treespec_kernels.tuning.testing import tree_attention_inputs, tree_parents

COPY, COMPILED = "copy", "compiled"


@dataclass(frozen=True)
class Sizes:
    window: int
    contexts: tuple[int, ...]  # context lengths at which bits are compared
    context: int  # context length at which passes are timed
    nodes: int
    copy_bytes: int


REAL = Sizes(512, (37, 500, 1023, 2047), 2048, 32, 8 << 30)
DRY = Sizes(5, (7,), 8, 3, 1 << 16)
DRY_FAMILIES = ("gemma3_text", "gpt_neox", "gpt2")


def _sizes(hidden: int, inter: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _sizes(4096, 14336, 32, 8, 128),
    "mistral": _sizes(4096, 14336, 32, 8, 128) | {"sliding_window": 0},
    "qwen2": _sizes(3584, 18944, 28, 4, 128)
    | {"sliding_window": 0, "use_sliding_window": True, "max_window_layers": 2},
    "qwen3": _sizes(4096, 12288, 32, 8, 128),
    "gemma2": _sizes(3584, 14336, 16, 8, 256)
    | {
        "sliding_window": 0,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3_text": _sizes(2560, 10240, 8, 4, 256)
    | {
        "sliding_window": 0,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "phi3": _sizes(3072, 8192, 24, 8, 128) | {"partial_rotary_factor": 0.75, "sliding_window": None},
    "gpt_neox": _sizes(2560, 10240, 32, 32, 80) | {"rotary_pct": 0.25, "hidden_act": "gelu"},
    "opt": _sizes(4096, 0, 32, 32, 128) | {"ffn_dim": 16384, "activation_function": "relu"},
    "gpt2": {"n_embd": 1600, "n_head": 25, "n_layer": 4, "n_positions": 4096, "activation_function": "gelu_new"},
}
"""Values of config.json by family; a window of 0 stands for that of `Sizes`."""

_TINY = _sizes(32, 64, 2, 1, 16) | {
    "n_embd": 32,
    "n_head": 2,
    "n_layer": 2,
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}


def config_of(setting: Setting, family: str) -> ModelConfig:
    """Return the configuration of a family's model with the window of the run."""
    sizes = DRY if setting.dry else REAL
    raw = {
        "model_type": family,
        "num_hidden_layers": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "torch_dtype": str(setting.dtype).removeprefix("torch."),
    } | FAMILIES[family]
    if setting.dry:
        raw |= {name: value for name, value in _TINY.items() if name in raw}
    if raw.get("sliding_window") == 0:
        raw["sliding_window"] = sizes.window
    if family in ("gpt2", "gpt_neox", "opt"):  # their head sizes follow from the other values
        raw = {name: value for name, value in raw.items() if name not in ("head_dim", "num_key_value_heads")}
    with tempfile.TemporaryDirectory(prefix="treespec-gpu-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        return ModelConfig.from_hf(folder)


def measurements(setting: Setting) -> Iterator[Measurement]:
    sizes = DRY if setting.dry else REAL
    tasks = {family: partial(_compile, sizes, setting, family) for family in FAMILIES}
    tasks |= {name: partial(_call_each, sizes, setting, name) for name in SWITCHES}
    if not setting.dry:
        yield Measurement(COMPILED, lambda context: compile_in_workers(tasks, 120.0, setting.out), 150.0)
    yield Measurement(COPY, lambda context: copy_bandwidth(context.clock(20), sizes.copy_bytes), 60.0)
    for family in DRY_FAMILIES if setting.dry else FAMILIES:
        yield Measurement(f"family/{family}", partial(_family, sizes, family), 90.0)
    for name, switch in SWITCHES.items():
        yield Measurement(f"switch/{name}", partial(_switch, sizes, switch), 40.0)


def _compile(sizes: Sizes, setting: Setting, family: str) -> None:
    """Compile all kernels that `_family` launches."""
    config = config_of(setting, family)
    differing_nodes(Passes(setting, config.shape, 64, sizes.nodes, config=config), (37,), sizes.nodes, setting.seed)


def _call_each(sizes: Sizes, setting: Setting, switch: str) -> None:
    for call in SWITCHES[switch](sizes, setting).values():
        call()


def _family(sizes: Sizes, family: str, context: Context) -> dict[str, Any]:
    setting, config = context.setting, config_of(context.setting, family)
    opened = Passes(setting, config.shape, max(*sizes.contexts, sizes.context), sizes.nodes, config=config)
    figures = differing_nodes(opened, sizes.contexts, sizes.nodes, setting.seed)
    generator, bandwidth = torch.Generator().manual_seed(setting.seed), context.figure(COPY, "bytes_per_second")
    with torch.inference_mode():
        for nodes in (1, sizes.nodes):
            launch = opened.prepare(sizes.context, tree_parents("random", nodes, generator))
            if not bool(launch().isfinite().all()):
                raise ValueError("the pass computed NaN or infinity")
            taken = context.clock(30, 3.0).graphed(launch).median
            moved = roofline.pass_bytes(config.shape, nodes, sizes.context, setting.dtype.itemsize)
            share = moved / (1e-6 * taken) / bandwidth if bandwidth else None
            figures |= {f"us_{nodes}": taken, f"share_of_copy_{nodes}": share}
    return figures


# --- ops with Llama's options and with those of other families


Calls = dict[str, Callable[[], Any]]


def _norms(sizes: Sizes, setting: Setting) -> Calls:
    """Return calls that add four splits to the residual stream and normalise it; `post` also applies a post norm."""
    hidden = 32 if setting.dry else 4096
    x, stream = (
        setting.random(4, sizes.nodes, hidden, scale=1e-3, dtype=torch.float32),
        setting.random(sizes.nodes, hidden),
    )
    weight, shift = 1 + setting.random(hidden, scale=0.1), setting.random(hidden)
    weight_fp32 = weight.float()
    norm = partial(rms_norm_triton, x, eps=1e-5, residual=stream)
    return {
        "rms": lambda: norm(weight),
        "rms_plus_one, post": lambda: norm(weight_fp32, kind="rms_plus_one", post_weight=weight_fp32),
        "layer": lambda: norm(weight, kind="layer", shift=shift),
    }


def _heads(sizes: Sizes, setting: Setting) -> Calls:
    """Return calls of the op between QKV and attention."""
    heads, kv_heads, head_dim = (2, 1, 16) if setting.dry else (32, 8, 128)
    rows, device = sizes.nodes, setting.device
    qkv = setting.random(2, rows, (heads + 2 * kv_heads) * head_dim, dtype=torch.float32)
    table = setting.random(64, 2, head_dim, dtype=torch.float32)
    kv, q = setting.random(2, 2, kv_heads, 64, head_dim), setting.random(rows, heads, head_dim)
    places = torch.arange(rows, dtype=torch.int32, device=device), torch.arange(rows, device=device)
    weight = 1 + setting.random(head_dim, scale=0.1)
    norm = HeadNorm(weight, weight, 1e-6)
    return {
        "turned": lambda: qkv_rope_triton(qkv, table, *places, kv, q),
        "turned, normed": lambda: qkv_rope_triton(qkv, table, *places, kv, q, norm=norm),
        "not turned": lambda: qkv_rope_triton(qkv, None, *places, kv, q),
    }


def _scores(sizes: Sizes, setting: Setting) -> Calls:
    """Return calls of tree attention."""
    heads, kv_heads, head_dim = (2, 1, 16) if setting.dry else (16, 8, 256)
    parents = tree_parents("random", sizes.nodes, torch.Generator().manual_seed(setting.seed))
    shape = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "dtype": setting.dtype}
    inputs = tree_attention_inputs([sizes.context], [parents], **shape, device=setting.device, seed=1)

    def call(window: int | None, cap: float | None) -> Callable[[], Tensor]:
        plan = plan_tree_attention(**inputs.plan, **shape, device=setting.device, window=window)
        rows = inputs.rows | {"window": window}
        return lambda: tree_attention_triton(inputs.q, inputs.k_cache, inputs.v_cache, **rows, score_cap=cap, plan=plan)

    return {
        "all": call(None, None),
        "capped": call(None, 50.0),
        "window": call(sizes.window, None),
        "window, capped": call(sizes.window, 50.0),
    }


SWITCHES: dict[str, Callable[[Sizes, Setting], Calls]] = {"norm": _norms, "heads": _heads, "attention": _scores}


def _switch(sizes: Sizes, switch: Callable[[Sizes, Setting], Calls], context: Context) -> dict[str, Any]:
    with torch.inference_mode():
        return {
            "us": {
                name: context.clock(30, 2.0).graphed(call).median
                for name, call in switch(sizes, context.setting).items()
            }
        }


def describe(document: dict[str, Any]) -> str:
    lines = []
    for name, figures in document["measurements"].items():
        if "error" in figures:
            lines.append(f"  {name:24} ERROR {figures['error'][:150]}")
        elif name.startswith("family/"):
            times = ", ".join(
                f"{key.removeprefix('us_')} nodes {value:.1f} us" for key, value in figures.items() if key[:3] == "us_"
            )
            first = f", first {figures['first']}" if figures["first"] else ""
            lines.append(f"  {name:24} {figures['differing_rows']} of {figures['rows']} rows differ{first}; {times}")
        elif name.startswith("switch/"):
            shown = ", ".join(f"{each} {value:.2f} us" for each, value in figures["us"].items())
            lines.append(f"  {name:24} {shown}")
    return "\n".join(lines)
