"""Token selection from logits: coupled (Gumbel) sampling and top-k."""
