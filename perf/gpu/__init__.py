"""Stages of `perf/gpu_suite.py`: what is measured on a GPU, each stage a module with `measurements` and `describe`."""
