"""Builds an engine: resolves options, plans memory, loads, tests and measures models."""
