"""Autotuning: timing of kernel configurations, and the tuned files they are kept in."""
