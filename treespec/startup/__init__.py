"""Builds an engine: resolves options, loads models, plans memory, measures and proves."""
