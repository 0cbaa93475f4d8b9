"""The kernels of a pass as they are launched programmatically: one more binary of each, whose order is proved when it
is compiled. `predecessors` says what such a launch is. Import this module only where triton is installed."""

from __future__ import annotations

from dataclasses import replace

from treespec_kernels.aot.kernel_spec import KernelShape, KernelSpec
from treespec_kernels.attention.qkv_rope_kernels import aot_specs as qkv_rope_specs
from treespec_kernels.attention.tree_attention_kernels import aot_specs as tree_attention_specs
from treespec_kernels.attention.tree_attention_masked_kernels import aot_specs as tree_attention_masked_specs
from treespec_kernels.launch.triton_launch import has_pdl
from treespec_kernels.linear.lm_head_kernels import aot_specs as lm_head_specs
from treespec_kernels.linear.quantized_row_linear_kernels import aot_specs as quantized_row_linear_specs
from treespec_kernels.linear.rms_norm_kernels import aot_specs as rms_norm_specs
from treespec_kernels.linear.row_linear_kernels import aot_specs as row_linear_specs

OTHERS = (rms_norm_specs, qkv_rope_specs, tree_attention_specs, tree_attention_masked_specs, lm_head_specs)


def aot_specs(shape: KernelShape, target: str | None = None) -> list[KernelSpec]:
    """What those ops compile for the layers that the shape has, with the wait; nothing for a target without one."""
    if target is None or not has_pdl(target):
        return []
    return [
        replace(
            spec,
            constants=spec.constants | {"PDL": True},
            options=spec.options | {"launch_pdl": True},
            config=spec.config | {"pdl": True},
        )
        for specs_of in (row_linear_specs if shape.quantized is None else quantized_row_linear_specs, *OTHERS)
        for spec in specs_of(shape, target)
    ]
