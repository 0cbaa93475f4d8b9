"""Attention over token trees: planning a pass, the kernels, RoPE with the K/V write, and the K/V commit."""
