"""Options of the engine and of speculation, and how those of vLLM that treespec does not have are treated."""
