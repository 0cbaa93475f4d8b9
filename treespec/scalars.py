"""Numbers as users give them: numpy's and torch's count as Python's, and a bool is no number."""

from numbers import Integral, Real
from typing import Any

_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127


def as_int(value: Any, least: int) -> int | None:
    """An integer of any kind as Python's, None where it is none or less than `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        return None
    return int(value)


def as_number(value: Any) -> float | None:
    """A real number as Python's, None where it is none that float32 can hold: logits are computed in it."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    number = int(value) if isinstance(value, Integral) else float(value)
    return number if abs(number) <= _MAX_FLOAT32 else None


def to_python(values: Any) -> Any:
    """An array or a tensor as Python's numbers, in lists of lists as deep as it is; anything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values
