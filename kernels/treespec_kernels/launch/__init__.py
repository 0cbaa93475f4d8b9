"""What Triton launches share: checks, CUDA graphs, programmatic launches, pointwise functions."""
