"""Training of small draft models (SSMs) for any target, on the target's own continuations of a user's texts."""
