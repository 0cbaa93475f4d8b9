"""Rounds that run on the device from draft to commit, from captured CUDA graphs."""
