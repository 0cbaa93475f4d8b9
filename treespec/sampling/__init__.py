"""Sampling: logit transforms, keyed Gumbel noise, and the restrictions of structured outputs."""
