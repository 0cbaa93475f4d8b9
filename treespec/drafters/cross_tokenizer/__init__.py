"""Drafts with another tokenizer than the target's."""
