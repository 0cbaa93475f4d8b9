"""Verification rules: which drafted tokens the target accepts."""
