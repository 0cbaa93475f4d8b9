"""API side of the engine: requests and outputs, the round loop, and vLLM's names."""
