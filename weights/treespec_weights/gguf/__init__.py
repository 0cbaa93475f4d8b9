"""Present GGUF files as Hugging Face checkpoints: the same JSON documents, tensor names and weights."""
