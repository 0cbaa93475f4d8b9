"""Kernels of treespec: each op has a reference implementation (`<op>_ref`), and CPU or Triton implementations.

Importing this package imports torch only; triton is imported by the first call of a Triton implementation.
"""
