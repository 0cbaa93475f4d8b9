"""Drafts whose tokenizer differs from the target's."""
