"""`treespec bench`: compares speculative decoding with plain decoding and transformers in one run."""
