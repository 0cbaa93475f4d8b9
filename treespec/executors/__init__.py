"""Executors, which run rounds, and their interface to the engine."""
