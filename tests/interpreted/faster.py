"""Triton's interpreter without work that changes no result."""

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
    # Tensors are the host's already: nothing is copied to it, nor back.
    interpreter.GridExecutor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    interpreter.GridExecutor._restore_args_dev = lambda self, *args: None
    _patch_the_language_once()
    _share_types()
    _keep_operands()


def _patch_the_language_once() -> None:
    """Leave the interpreter's functions in triton.language, where each launch and each call of a jitted function would
    put them again."""
    patch, patched = interpreter._patch_lang, set[str]()

    def patch_once(function: FunctionType) -> Any:
        if function.__module__ not in patched:
            patched.add(function.__module__)
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
        handle = narrow.handle
        data = np.empty(shape, handle.data.dtype)  # faster than np.broadcast_to
        data[...] = handle.data
        return tensor(interpreter.TensorHandle(data, handle.dtype), block_type(narrow.dtype, shape))

    def shared_dtype(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = numpy_dtype(dtype)
        return dtypes[dtype.name]

    block_type.__new__, block_type.__init__ = shared_type, lambda *args: None
    tensor.__init__, semantic.broadcast_impl_value = tensor_of_type, broadcast_if_needed
    interpreter._get_np_dtype = shared_dtype


def _keep_operands() -> None:
    """Leave operands that need no conversion as they are, with the type of the result, and numpy broadcasts them.

    Constants are made once.
    """
    tensor, block_type, semantic = tl.core.tensor, tl.core.block_type, interpreter.TritonSemantic
    convert, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    plain = tl.core.dtype  # the class of types that are no pointers
    constants: dict[tuple[Any, ...], Any] = {}

    def operands(self: Any, lhs: Any, rhs: Any, *rest: Any, **named: Any) -> tuple[Any, Any]:
        if type(lhs) is tensor and type(rhs) is tensor:
            left, right, divides = lhs.dtype, rhs.dtype, len(rest) > 3 or named
            if left is right and type(left) is plain and (left is tl.float32 or not divides):
                return of_one_shape(lhs, rhs)
            if rest[:1] == (True,) and left.is_ptr() and is_signed(right):
                return of_one_shape(lhs, rhs)
        elif type(lhs) is tensor and takes(lhs.dtype, rhs):
            return of_one_shape(lhs, constant(self, rhs, lhs.dtype))
        elif type(rhs) is tensor and takes(rhs.dtype, lhs):
            return of_one_shape(constant(self, lhs, rhs.dtype), rhs)
        return convert(self, lhs, rhs, *rest, **named)

    def is_signed(dtype: Any) -> bool:
        return dtype is tl.int32 or dtype is tl.int64

    def takes(dtype: Any, number: Any) -> bool:
        """Whether the tensor's type is that of the computation."""
        if dtype is tl.float32:
            return type(number) in (int, float)
        return is_signed(dtype) and type(number) is int and -(2**31) <= number < 2**31

    def constant(self: Any, number: Any, dtype: Any) -> Any:
        key = number, type(number), dtype.name
        if key not in constants:
            made = self.scalar_constant(number, dtype)
            if number == 0:  # of either sign
                return made
            constants[key] = made
        return constants[key]

    def of_one_shape(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type, rhs.type
        if left is right:
            return lhs, rhs
        if not right.is_block():
            return (lhs, of_shape(rhs, left.shape)) if left.is_block() else (lhs, rhs)
        if not left.is_block():
            return of_shape(lhs, right.shape), rhs
        if len(left.shape) != len(right.shape):
            return broadcast(semantic, lhs, rhs)
        if left.shape == right.shape:
            return lhs, rhs
        shape = [max(sizes) for sizes in zip(left.shape, right.shape, strict=True)]
        return of_shape(lhs, shape), of_shape(rhs, shape)

    def of_shape(narrow: Any, shape: Sequence[int]) -> Any:
        return tensor(narrow.handle, block_type(narrow.dtype, shape))

    semantic.binary_op_type_checking_impl = operands
