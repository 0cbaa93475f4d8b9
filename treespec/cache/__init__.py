"""The paged KV cache of the target and its drafts, and prefix caching."""
