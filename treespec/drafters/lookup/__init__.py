"""Prompt lookup and suffix decoding: draft sources that run no model."""
