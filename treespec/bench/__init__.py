"""`treespec bench`: compares speculative decoding with plain decoding and transformers in one run.

All modes use the same weights, prompts and dtype. Every mode decodes every batch of prompts, in rotating order. The
report shows median, minimum and maximum over repeats. Tokens are counted by id, without detokenization.
"""
