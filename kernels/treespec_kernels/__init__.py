"""Kernels of treespec: each op has a reference implementation (`<op>_ref`), and CPU or Triton implementations.

Both raise ValueError for tensors whose shape, dtype, device or strides do not match (`launch/arguments.py`); a Triton
implementation also if Triton cannot run on them.

Importing this package imports torch only; triton is imported by the first call of a Triton implementation.
"""
