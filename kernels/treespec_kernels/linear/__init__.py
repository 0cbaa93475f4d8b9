"""Row-invariant linear layers, norms and the LM head, in floating point and quantized."""
