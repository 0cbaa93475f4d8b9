"""Ahead-of-time compilation: checks without a GPU that every kernel compiles for real targets."""
