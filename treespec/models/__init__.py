"""One decoder; families are data (`treespec_weights.rules`)."""
