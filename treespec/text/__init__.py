"""Text: tokenizers, chat templates, incremental detokenization."""
