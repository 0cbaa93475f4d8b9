"""Attention over token trees: pass planning, attention kernels, RoPE with the K/V write, and the KV commit."""
