"""Specs of every op: the kernels to compile for a model's shape, and their constants. Needs triton."""

from collections.abc import Callable
from dataclasses import replace

from treespec_kernels.aot.kernel_spec import KernelShape, KernelSpec
from treespec_kernels.aot.specs import attention_specs, linear_specs, sampling_specs, tree_specs
from treespec_kernels.launch.triton_launch import PREFETCH, has_pdl
from treespec_kernels.ops import PDL_OPS


def programmatic_launch(shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """Return the specs of `PDL_OPS` for the shape's layers, with PDL enabled; none for a target without PDL."""
    if target is None or not has_pdl(target):
        return []
    unused = "quantized_row_linear" if shape.quantized is None else "row_linear"
    return [
        replace(
            spec,
            constants=spec.constants | {"PDL": PREFETCH},
            options=spec.options | {"launch_pdl": True},
            config=spec.config | {"pdl": True},
        )
        for op in PDL_OPS
        if op != unused
        for spec in SPECS[op](shape, target)
    ]


SPECS: dict[str, Callable[[KernelShape, str | None], list[KernelSpec]]] = {
    "coupled_choice": sampling_specs.coupled_choice,
    "kv_commit": attention_specs.kv_commit,
    "lm_head": linear_specs.lm_head,
    "logit_transforms": sampling_specs.logit_transforms,
    "pass_layout": attention_specs.pass_layout,
    "programmatic_launch": programmatic_launch,
    "qkv_rope": attention_specs.qkv_rope,
    "quantized_row_linear": linear_specs.quantized_row_linear,
    "rms_norm": linear_specs.rms_norm,
    "row_linear": linear_specs.row_linear,
    "row_topk": sampling_specs.row_topk,
    "tree_attention": attention_specs.tree_attention,
    "tree_attention_masked": attention_specs.tree_attention_masked,
    "tree_merge": tree_specs.tree_merge,
    "tree_root": tree_specs.tree_root,
    "tree_select": tree_specs.tree_select,
    "tree_walk": tree_specs.tree_walk,
}
