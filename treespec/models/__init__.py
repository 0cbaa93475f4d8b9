"""One decoder for all families, which are described by data (`treespec_weights.rules`)."""
