"""Helpers below every other package: memory, torch state, scalars, interrupts."""
