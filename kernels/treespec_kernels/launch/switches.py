"""Switches for performance features, to measure their benefit or isolate a fault.

The environment variable `TREESPEC_OFF` lists the features to turn off, such as "pdl" or "prefetch,larger_tiles". It is
read at every launch; captured graphs keep the setting of their capture. Results have the same bits.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

VARIABLE = "TREESPEC_OFF"
FEATURES = {
    "pdl": "programmatic dependent launch, including prefetch",
    "prefetch": "prefetching of weights before the wait for the previous kernel",
    "larger_tiles": "tiles of 128 and 256 rows of linear layers and LM heads, for passes of more than 64 rows",
    "captured_passes": "captured target passes of requests outside captured rounds",
}


def is_on(feature: str) -> bool:
    """Return whether a feature of `FEATURES` is used where it is available. Raises ValueError for unknown names."""
    return feature not in _names(os.environ.get(VARIABLE, ""))


@contextmanager
def without(*features: str) -> Iterator[None]:
    """Turn features off for the launches of the block."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = ",".join(features)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


@cache
def _names(text: str) -> frozenset[str]:
    names = frozenset(name.strip() for name in text.split(",")) - {""}
    if unknown := sorted(names - FEATURES.keys()):
        raise ValueError(f"{VARIABLE}={text!r}: unknown feature {unknown[0]!r}; valid: {', '.join(FEATURES)}")
    return names
