"""`treespec bench`: comparison of speculative decoding with plain decoding and transformers in one run."""
