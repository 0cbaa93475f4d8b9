"""An OpenAI-compatible HTTP server over `AsyncLLM`."""
