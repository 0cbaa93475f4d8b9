"""Errors that users see."""

import pytest

from treespec import errors


def test_every_error_is_a_value_error() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__ if name[0].isupper()]
    assert len(kinds) > 5 and all(issubclass(kind, ValueError) for kind in kinds)


def test_all_unknown_keywords_are_named_at_once() -> None:
    with pytest.raises(
        errors.ConfigError, match=r"unknown 'zzz', 'node' \(did you mean 'nodes'\?\); valid: nodes, policy"
    ):
        errors.reject_unknown("SpecConfig", ["zzz", "node"], ["policy", "nodes"])
