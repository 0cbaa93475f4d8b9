"""Build an engine: resolve options, plan memory, then load, test and measure models."""
