"""Stages of `perf/gpu_suite.py`: what is measured on a GPU, each stage a module with `measurements` and `describe`."""

import time

BEGAN = time.monotonic()  # before torch is imported, which is part of a budget
