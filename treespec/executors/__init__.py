"""Executors: what runs a round, and the interface between them and the engine."""
