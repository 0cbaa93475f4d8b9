"""Adapter that runs transformers' model code over the paged cache: loading, tracing, execution and parity checks."""
