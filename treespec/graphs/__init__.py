"""Captured rounds: draft, merge, verify and commit on the device, from CUDA graphs."""
