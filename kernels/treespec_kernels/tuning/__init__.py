"""Autotuning: timing of kernel configurations, and the files of tuned configurations."""
