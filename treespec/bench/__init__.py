"""`treespec bench`: compares speculative decoding with plain decoding and transformers in one run.

All modes use the same weights, prompts and dtype. Every batch of prompts is decoded by every mode in rotating order;
reported are median, minimum and maximum over repeats. Tokens are counted from ids. `profile.py` instruments the engine
from outside.
"""
