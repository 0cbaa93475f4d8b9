"""Low-level helpers: memory, torch state, scalars, interrupts, tables."""
