"""Options of the engine and of speculation, and the handling of vLLM's other options."""
