"""Parse sizes: bytes such as 2GB, and parameter counts such as 0.5B."""

import re

from treespec_weights.errors import OptionError

_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_PARAMETERS = {"K": 10**3, "M": 10**6, "B": 10**9}


def parse_bytes(text: str) -> int:
    """Parse a size such as 500MB, 2GB or 1.5GiB into bytes. Raises OptionError for anything else."""
    return _parse(text, _BYTES, "--shard-size", "500MB, 2GB or 1.5GiB")


def parse_size(text: str, option: str = "--size") -> int:
    """Parse a parameter count such as 120M or 0.5B. Raises OptionError, which names `option`, for anything else."""
    return _parse(text, _PARAMETERS, option, "120M, 0.5B or 7B")


def _parse(text: str, units: dict[str, int], option: str, examples: str) -> int:
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?) ?([A-Z]+)", text.strip().upper())
    if match and match[2] in units and (size := round(float(match[1]) * units[match[2]])):
        return size
    raise OptionError(f"{option} {text}: valid are sizes such as {examples}")
