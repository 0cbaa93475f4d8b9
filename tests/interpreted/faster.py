"""Triton's interpreter without work that changes no result: a kernel takes a fifth of the time."""

from collections.abc import Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def make_the_interpreter_faster() -> None:
    """Patch the interpreter of this process."""
    # Six operations for each operation on integers look for an overflow, which only debug mode would report.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    _patch_the_language_once()
    _share_types()


def _patch_the_language_once() -> None:
    """Leave the interpreter's functions in triton.language, where each launch and each call of a jitted function would
    put them again."""
    patch = interpreter._patch_lang

    def patch_once(function: FunctionType) -> Any:
        modules = [module for module in function.__globals__.values() if module is tl or module is tl.core]
        if not modules or any(tl.core.is_builtin(module.load) for module in modules):
            patch(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)  # without the check that a kernel calls it

        def interpreted(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, interpreted)

    interpreter._patch_lang, interpreter._patch_attr = patch_once, patch_attribute


def _share_types() -> None:
    """Make each type of blocks once, and the shapes and sizes of its tensors; broadcast only what differs in shape."""
    block_type, tensor, semantic = tl.core.block_type, tl.core.tensor, interpreter.TritonSemantic
    make_type, make_tensor, broadcast = block_type.__init__, tensor.__init__, semantic.broadcast_impl_value
    numpy_dtype = interpreter._get_np_dtype
    types: dict[tuple[str, tuple[int, ...]], Any] = {}
    dtypes: dict[str, Any] = {}

    def shared_type(cls: type, element_ty: Any, shape: Sequence[Any]) -> Any:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = element_ty.name, sizes
        if key not in types:
            made = object.__new__(cls)
            make_type(made, element_ty, list(sizes))
            types[key] = made
        return types[key]

    def tensor_of_type(self: Any, handle: Any, type: Any) -> None:
        if "of_tensors" not in type.__dict__:
            make_tensor(self, handle, type)
            type.of_tensors = self.shape, self.numel, self.dtype
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = type.of_tensors

    def broadcast_if_needed(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        shapes = [each.type.shape.values if each.type.is_block() else [] for each in (lhs, rhs)]
        if shapes[0] == shapes[1]:
            return lhs, rhs
        if len(shapes[0]) != len(shapes[1]) and all(shapes):
            return broadcast(self, lhs, rhs)
        shape = list(np.broadcast_shapes(*shapes))
        return wide(lhs, shape), wide(rhs, shape)

    def wide(narrow: Any, shape: list[int]) -> Any:
        handle, type = narrow.handle, block_type(narrow.dtype, shape)
        return tensor(interpreter.TensorHandle(np.broadcast_to(handle.data, shape), handle.dtype), type)

    def shared_dtype(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = numpy_dtype(dtype)
        return dtypes[dtype.name]

    block_type.__new__, block_type.__init__ = shared_type, lambda *args: None
    tensor.__init__, semantic.broadcast_impl_value = tensor_of_type, broadcast_if_needed
    interpreter._get_np_dtype = shared_dtype
