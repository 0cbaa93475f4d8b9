"""`treespec bench`: speed against our own plain decoding and against transformers, compared within one run.

Every mode has the same weights, prompts and dtype. Every batch of prompts is decoded by every mode in turn, in rotating
order; what is printed is the median of the repeats with the least and the largest. Tokens are counted from ids. The
engine knows nothing of it: `profile.py` looks on from outside.
"""
