"""Conversion of user-supplied numbers. numpy and torch scalars are accepted, bools are not."""

from numbers import Integral, Real
from typing import Any

_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127


def as_int(value: Any, minimum: int) -> int | None:
    """Return `value` as a Python int, or None if it is not an integer or less than `minimum`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
        return None
    return int(value)


def as_number(value: Any) -> float | None:
    """Return `value` as a Python number, or None if it is not real or exceeds the range of float32."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    number = int(value) if isinstance(value, Integral) else float(value)
    return number if abs(number) <= _MAX_FLOAT32 else None


def to_python(values: Any) -> Any:
    """Convert arrays and tensors to Python numbers in nested lists. Return other values unchanged."""
    return values.tolist() if hasattr(values, "tolist") else values
