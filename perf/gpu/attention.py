"""Compares one layer's tree attention with torch's masked and unmasked attention.

All variants read the same values: ours through a page table, the others from contiguous tensors without a gather.
Masked SDPA runs in every form that can compute the tree; the fastest is the baseline.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu import roofline
from gpu.clock import sets_for
from gpu.setting import Setting
from gpu.stage import Context, Measurement
from treespec_kernels.attention.tree_attention import TreeAttentionConfig, plan_tree_attention, tree_attention_triton
from treespec_kernels.tuning.testing import assert_close, path_to, tree_parents
from treespec_kernels.tuning.tuned import KernelConfigs

PAGE = 64
COPY = "copy"
OURS = "ours"
MASKED = ("masked sdpa, gqa", "masked sdpa, heads as rows", "masked sdpa, keys repeated")
FLASH = ("flash unmasked, gqa", "flash unmasked, heads as rows")
FLEX = "flex attention"
BOUND = {torch.bfloat16: (1e-1, 1e-2), torch.float32: (1e-4, 1e-5)}


@dataclass(frozen=True)
class Case:
    context: int
    nodes: int
    flex: bool = False  # whether to measure FlexAttention, which is slow to compile

    def key(self, variant: str) -> str:
        return f"attention/{self.context}/{self.nodes}/{variant}"


CASES = (
    Case(8192, 32, True),
    Case(2048, 32, True),
    Case(32768, 32, True),
    Case(32768, 1),
    Case(8192, 1),
    Case(8192, 64),
    Case(2048, 1),
)
FIRST = 2  # cases with targets, with every variant
DRY_CASES = (Case(20, 3, True),)


def measurements(setting: Setting, first: bool) -> Iterator[Measurement]:
    """Yield the measurements of the first cases, or of the others."""
    cases = DRY_CASES if setting.dry else CASES
    for case in cases[:FIRST] if first else cases[FIRST:]:
        for variant in (OURS, *MASKED, *FLASH, *([FLEX] if case.flex else [])):
            yield Measurement(case.key(variant), partial(_attention, case, variant), 110.0 if variant == FLEX else 40.0)


@dataclass(frozen=True)
class Inputs:
    """Rotating sets of buffers. q: [heads, nodes, D]; keys, values: [KV heads, context + nodes, D]."""

    q: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    parents: list[int]
    visible: Tensor  # bool [nodes, context + nodes]
    scale: float

    @property
    def count(self) -> int:
        return len(self.q)


def _inputs(case: Case, context: Context) -> Inputs:
    setting, shape = context.setting, context.setting.target
    length = case.context + case.nodes
    one = roofline.kv_bytes(shape, setting.dtype.itemsize) // shape.num_layers * length
    count = sets_for(one, setting.cache_bytes)
    parents = tree_parents("random", case.nodes, torch.Generator().manual_seed(setting.seed))
    visible = torch.zeros(case.nodes, length, dtype=torch.bool)
    visible[:, : case.context] = True
    for node in range(case.nodes):
        visible[node, [case.context + each for each in path_to(parents, node)]] = True
    size = (shape.num_kv_heads, length, shape.head_dim)
    return Inputs(
        [setting.random(shape.num_heads, case.nodes, shape.head_dim) for _ in range(count)],
        [setting.random(*size) for _ in range(count)],
        [setting.random(*size) for _ in range(count)],
        parents,
        visible.to(setting.device),
        shape.head_dim**-0.5,
    )


def _attention(case: Case, variant: str, context: Context) -> dict[str, Any]:
    setting, shape = context.setting, context.setting.target
    inputs = context.keep(f"attention/{case}", lambda: _only(context, case))
    build = {OURS: ours, FLEX: partial(flex, compiled=not setting.dry)}.get(variant)
    run = build(inputs) if build is not None else sdpa(inputs, variant)
    with torch.inference_mode():
        result = run(0)
        if variant not in FLASH:
            max_error, rms_error = BOUND[setting.dtype]
            assert_close(result, reference(inputs).to(result.dtype), max_error=max_error, rms_error=rms_error)
        times = context.clock(30, 4.0).graphed(*(partial(run, number) for number in range(inputs.count)))
    moved = roofline.attention_bytes(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, case.nodes, case.context, setting.dtype.itemsize
    )
    bandwidth = context.figure(COPY, "bytes_per_second")
    achieved = moved / (1e-6 * times.median)
    share = achieved / bandwidth if bandwidth else None
    return times.figures | {"bytes": moved, "share_of_copy": share, "sets": inputs.count}


def _only(context: Context, case: Case) -> Inputs:
    """Create the inputs of one case, after releasing those of other cases."""
    for name in [name for name in context.shared if name.startswith("attention/")]:
        del context.shared[name]
    return _inputs(case, context)


def reference(inputs: Inputs) -> Tensor:
    """Return the fp32 reference of set 0, [heads, nodes, D]."""
    group = len(inputs.q[0]) // len(inputs.keys[0])
    keys, values = (part[0].float().repeat_interleave(group, dim=0) for part in (inputs.keys, inputs.values))
    scores = inputs.q[0].float() @ keys.mT * inputs.scale
    return scores.masked_fill(~inputs.visible, float("-inf")).softmax(-1) @ values


def ours(inputs: Inputs) -> Callable[[int], Tensor]:
    """Return our kernel over scattered pages, as a function of the set."""
    heads, nodes, head_dim = inputs.q[0].shape
    kv_heads, length, _ = inputs.keys[0].shape
    context, device, dtype = length - nodes, inputs.q[0].device, inputs.q[0].dtype
    paths = [path_to(inputs.parents, node) for node in range(nodes)]
    depths = [len(path) - 1 for path in paths]
    ancestors = torch.tensor([path + [path[-1]] * (max(depths) + 1 - len(path)) for path in paths], dtype=torch.int32)
    config = configuration(dtype, head_dim, heads // kv_heads, device)
    plan = plan_tree_attention(
        [context],
        [nodes],
        depths,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        config=config,
    )
    num_pages = -(-length // PAGE)
    table = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).to(device)
    caches = []
    for keys, values in zip(inputs.keys, inputs.values, strict=True):
        cache = torch.zeros(num_pages, 2, kv_heads, PAGE, head_dim, dtype=dtype, device=device)
        for which, part in enumerate((keys, values)):
            padded = F.pad(part, (0, 0, 0, num_pages * PAGE - length)).view(kv_heads, num_pages, PAGE, head_dim)
            cache[table, which] = padded.transpose(0, 1)
        caches.append(cache)
    rows = [q.transpose(0, 1).contiguous() for q in inputs.q]
    outs = [torch.empty_like(row) for row in rows]
    fixed = {
        "row_request": torch.zeros(nodes, dtype=torch.int32, device=device),
        "context_lens": torch.tensor([context], dtype=torch.int32, device=device),
        "page_table": table[None].int(),
        "depths": torch.tensor(depths, dtype=torch.int32, device=device),
        "ancestors": ancestors.to(device),
        "scale": inputs.scale,
    }

    def run(number: int) -> Tensor:
        cache = caches[number]
        done = tree_attention_triton(rows[number], cache[:, 0], cache[:, 1], **fixed, plan=plan, out=outs[number])
        return done.transpose(0, 1)

    return run


def configuration(dtype: torch.dtype, head_dim: int, group: int, device: torch.device) -> TreeAttentionConfig:
    """Return the configuration of our kernel, tuned if available."""
    key = {"dtype": dtype, "head_dim": head_dim, "group": group}
    return KernelConfigs.load(device).get("tree_attention", key, TreeAttentionConfig.default(dtype, head_dim))


def sdpa(inputs: Inputs, variant: str) -> Callable[[int], Tensor]:
    """Return a variant of torch's attention: with the tree mask, or flash attention over all keys."""
    heads, nodes, head_dim = inputs.q[0].shape
    kv_heads = len(inputs.keys[0])
    group = heads // kv_heads
    masked, as_rows, repeated = "masked" in variant.split(), "heads as rows" in variant, "repeated" in variant
    queries = [q.view(kv_heads, group * nodes, head_dim) if as_rows else q for q in inputs.q]
    keys, values = (
        [part.repeat_interleave(group, dim=0) if repeated else part for part in parts]
        for parts in (inputs.keys, inputs.values)
    )
    visible = inputs.visible.repeat(group, 1) if as_rows else inputs.visible
    # A floating-point mask whose row stride is a multiple of eight, which the masked kernels read without a copy.
    length = visible.shape[1]
    bias = torch.zeros(len(visible), -(-length // 8) * 8, dtype=queries[0].dtype, device=visible.device)
    mask = bias[:, :length].masked_fill_(~visible, float("-inf"))[None, None] if masked else None
    options: dict[str, Any] = {"scale": inputs.scale, "enable_gqa": not as_rows and not repeated}

    def run(number: int) -> Tensor:
        given = (queries[number][None], keys[number][None], values[number][None])
        if masked:
            out = F.scaled_dot_product_attention(*given, attn_mask=mask, **options)
        else:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = F.scaled_dot_product_attention(*given, **options)
        return out.view(heads, nodes, head_dim) if as_rows else out[0]

    return run


def flex(inputs: Inputs, compiled: bool) -> Callable[[int], Tensor]:
    """Return FlexAttention with the tree as its block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    nodes, length = inputs.visible.shape
    context, tree = length - nodes, inputs.visible[:, length - nodes :].contiguous()

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key < context) | tree[row, (key - context).clamp(0, nodes - 1)]

    device = str(inputs.visible.device)
    block_mask = create_block_mask(sees, None, None, nodes, length, device=device)
    attend = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention

    def run(number: int) -> Tensor:
        q, keys, values = (part[number][None] for part in (inputs.q, inputs.keys, inputs.values))
        return attend(q, keys, values, block_mask=block_mask, scale=inputs.scale, enable_gqa=True)[0]

    return run


def fastest(figures: dict[str, Any], case: Case, variants: tuple[str, ...]) -> float | None:
    """Return the microseconds of the fastest measured variant; None if none is measured."""
    times = [figures.get(case.key(variant), {}).get("us") for variant in variants]
    return min((each for each in times if each is not None), default=None)
