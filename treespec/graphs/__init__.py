"""Captured rounds: whole rounds (draft, merge, verify, commit) on the device, replayed from CUDA graphs."""
