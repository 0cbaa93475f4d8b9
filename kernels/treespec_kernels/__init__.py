"""Kernels of treespec: each op with its specification (`<op>_ref`), a CPU path and a Triton path.

Importing this package imports torch only; triton is imported by the first call of a Triton implementation.
"""
