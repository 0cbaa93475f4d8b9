"""Kernels of treespec: each op has a reference implementation (`<op>_ref`), and CPU or Triton implementations.

A Triton implementation raises ValueError for tensors whose shape, dtype, device or strides do not match
(`launch/arguments.py`), or on which Triton cannot run.

Importing this package imports torch only; triton is imported by the first call of a Triton implementation.
"""
