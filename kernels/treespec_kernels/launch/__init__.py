"""Shared helpers of Triton launches: checks, CUDA graphs, programmatic dependent launch, pointwise functions."""
