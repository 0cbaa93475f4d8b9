"""Stage `kernels`: every op of a layer against copy bandwidth and torch's equivalent.

Calls are timed in captured graphs over rotating buffers of three times the L2 in total, so that every call reads from
memory. Tree attention is compared in `attention.py`; other ops are from `treespec_kernels.tuning.workloads`, which
declares bytes and baselines.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from gpu import attention
from gpu.attention import COPY
from gpu.clock import copy_bandwidth, sets_for
from gpu.setting import Setting
from gpu.stage import Context, Measurement
from treespec_kernels.aot.kernel_spec import KernelShape
from treespec_kernels.attention.kv_commit import kv_commit_triton
from treespec_kernels.tuning import workloads as known
from treespec_kernels.tuning.tuned import KernelConfigs
from treespec_weights import ModelShape

COMMIT = "kv_commit/8B, path 6"
ROWS = (1, 8, 16, 32, 64)  # of linear layers and LM heads
PATH = (0, 2, 5, 6, 9, 11)  # accepted path, of which five nodes move


def measurements(setting: Setting) -> Iterator[Measurement]:
    size = 1 << 16 if setting.dry else 8 << 30
    yield Measurement(COPY, lambda context: copy_bandwidth(context.clock(20), size), 60.0)
    yield Measurement(COMMIT, _commit, 60.0)
    yield from attention.measurements(setting, first=True)
    yield from _workloads(setting)
    yield from attention.measurements(setting, first=False)


def _commit(context: Context) -> dict[str, Any]:
    """Time the commit of one request's path in all layers; each call moves another request's path."""
    setting, shape = context.setting, context.setting.target
    moved = 2 * 2 * shape.num_layers * (len(PATH) - 1) * shape.num_kv_heads * shape.head_dim * setting.dtype.itemsize
    count = sets_for(moved, setting.cache_bytes, at_most=256)
    cache = setting.random(shape.num_layers, 2, count + 1, shape.num_kv_heads, 64, shape.head_dim)

    def integers(values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=setting.device)

    tables, lengths = integers([[1 + i] for i in range(count)]), integers([40] * count)
    paths, counts = integers([list(PATH)] * count), integers([len(PATH)] * count)
    calls = [
        partial(kv_commit_triton, cache, *(part[i : i + 1] for part in (tables, lengths, paths, counts)))
        for i in range(count)
    ]
    times = context.clock().graphed(*calls)
    return times.figures | {"bytes": moved, "sets": count}


# --- ops that have workloads


def _workloads(setting: Setting) -> Iterator[Measurement]:
    """Yield a measurement of each op at each load."""
    for op in known.ops():
        if op in ("tree_attention", "kv_commit", "programmatic_launch"):  # measured above, and by stage `passes_more`
            continue
        found = list(workloads(setting, op).items())
        for name, workload in found[:1] if setting.dry else found:
            yield Measurement(name, partial(_workload, workload), 60.0)


def workloads(setting: Setting, op: str) -> dict[str, Any]:
    """Return the workloads of an op by name: the target's layers at every number of rows."""
    shape = setting.target
    found: dict[str, Any] = {}
    for rows in (3,) if setting.dry else ROWS:
        made = known.Setting(
            kernel_shape(setting, shape),
            setting.device,
            nodes=rows,
            context=20 if setting.dry else 2048,
            requests=1,
            layers=shape.num_layers,
            fixed_order_dot=setting.dry,
        )
        for workload in known.workloads_of(made, [op]):
            found.setdefault(f"{op}/{_size_of(workload.key)}/{workload.load}", workload)
    return found


def kernel_shape(setting: Setting, shape: ModelShape) -> KernelShape:
    """Return the sizes of the kernels of a model."""
    return KernelShape(
        setting.dtype,
        shape.head_dim,
        shape.num_heads,
        shape.num_kv_heads,
        shape.hidden_size,
        shape.intermediate_size,
        shape.vocab_size,
    )


def _size_of(key: dict[str, Any]) -> str:
    """Return a short form of a workload's key without the dtype."""
    rest = {name: value for name, value in key.items() if name != "dtype" and (name, value) != ("groups", 1)}
    if {"out_features", "in_features"} <= rest.keys():
        size = f"{rest['out_features']}x{rest['in_features']}"
        return size + " silu_gate" * bool(rest.get("silu_gate")) + (f" x{rest['groups']}" if "groups" in rest else "")
    return ", ".join(f"{name} {value}" for name, value in rest.items())


def _workload(workload: Any, context: Context) -> dict[str, Any]:
    setting = context.setting
    config = configuration(workload)
    workload.check(config)
    copies = sets_for(workload.bytes, setting.cache_bytes)
    workload.prepare(copies)
    try:
        with torch.inference_mode():
            clock = context.clock(30, 4.0)
            times = clock.graphed(*(partial(workload.run, config, copy) for copy in range(copies)))
            others = {
                name: clock.graphed(*(partial(run, copy) for copy in range(copies)))
                for name, run in workload.baselines().items()
            }
    finally:
        workload.release()
    bandwidth = context.figure(COPY, "bytes_per_second")
    share = workload.bytes / (1e-6 * times.median) / bandwidth if bandwidth else None
    return times.figures | {
        "bytes": workload.bytes,
        "share_of_copy": share,
        "sets": copies,
        "config": str(config),
        "others_us": {name: other.median for name, other in others.items()},
    }


def configuration(workload: Any) -> Any:
    """Return the tuned configuration if there is one, else the default."""
    if workload.default is None:
        return None
    return KernelConfigs.load(workload.device).get(workload.op, workload.key, workload.default)


def describe(document: dict[str, Any]) -> str:
    """Return one line per op and size, with its loads or baselines."""
    found = document["measurements"]
    lines = [
        f"  copy {(found.get(COPY, {}).get('bytes_per_second') or 0) / 1e12:.2f} TB/s; "
        "microseconds (share of the copy's bandwidth) [fastest other]"
    ]
    groups: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for name, figures in found.items():
        if name != COPY:
            group, _, last = name.rpartition("/")
            groups.setdefault(group or last, []).append((last, figures))
    for group, members in groups.items():
        good = [(last, figures) for last, figures in members if "error" not in figures]
        if good:
            lines += _wrapped(group, [_cell(last.removeprefix("rows "), figures) for last, figures in good])
        lines += [f"    {last}: ERROR {each['error'][:120]}" for last, each in members if "error" in each]
    return "\n".join(lines)


def _cell(name: str, figures: dict[str, Any]) -> str:
    share, others = figures.get("share_of_copy"), figures.get("others_us", {})
    shown = f"{name}: {figures['us']:.1f}" + ("" if share is None else f" ({share:.0%})")
    return shown + (f" [{min(others.values()):.1f}]" if others else "")


def _wrapped(group: str, cells: list[str]) -> list[str]:
    lines = [f"  {group}"]
    for cell in cells:
        if len(lines[-1]) + len(cell) > 118:
            lines.append("   ")
        lines[-1] += f"  {cell}"
    return lines
