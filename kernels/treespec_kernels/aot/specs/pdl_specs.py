"""Specs of the kernels that support programmatic dependent launch, compiled with it."""

from __future__ import annotations

from dataclasses import replace

from treespec_kernels.aot.kernel_spec import KernelShape, KernelSpec
from treespec_kernels.aot.specs import attention_specs, linear_specs
from treespec_kernels.launch.triton_launch import has_pdl


def programmatic_launch(shape: KernelShape, target: str | None) -> list[KernelSpec]:
    """The specs of those ops for the shape's layers, with PDL set; none for a target without it."""
    if target is None or not has_pdl(target):
        return []
    linear = linear_specs.row_linear if shape.quantized is None else linear_specs.quantized_row_linear
    ops = (
        linear,
        linear_specs.rms_norm,
        attention_specs.qkv_rope,
        attention_specs.tree_attention,
        attention_specs.tree_attention_masked,
        linear_specs.lm_head,
    )
    return [
        replace(
            spec,
            constants=spec.constants | {"PDL": True},
            options=spec.options | {"launch_pdl": True},
            config=spec.config | {"pdl": True},
        )
        for specs_of in ops
        for spec in specs_of(shape, target)
    ]
