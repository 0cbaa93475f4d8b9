"""Choosing tokens from logits: coupled (Gumbel) sampling and top-k."""
