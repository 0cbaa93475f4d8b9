"""Stages of `perf/gpu_suite.py`. Each stage is a module with `measurements` and `describe`."""

import time

BEGAN = time.monotonic()  # start of the run; before the import of torch, which counts towards the budget
