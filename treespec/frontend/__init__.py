"""The caller's side of the engine: prompts, parameters and outputs of `LLM`, and vLLM's names for them."""
