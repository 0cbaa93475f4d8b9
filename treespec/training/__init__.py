"""Trains small draft models (SSMs) for any target, from the target's own continuations of a user's texts."""
