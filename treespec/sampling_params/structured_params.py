"""`StructuredOutputsParams` with vLLM's names, validated on construction."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from treespec.errors import ConfigError
from treespec.utils.options import check_values, option, rejects_unknown
from treespec.utils.scalars import to_python


@rejects_unknown
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Output constraint: exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`.

    The output is a complete match followed by an end token, or a prefix of a match if `max_tokens` truncates it. Every
    tree node is masked by the constraint on its own path, for target and drafts. Requires llguidance (extra
    "structured").

    Args:
        json: a JSON schema (an object) as a dict or as text. Unsupported schemas are rejected.
        regex: regex that matches the whole output. Rust regex syntax, without look-around and back-references.
        choice: texts, one of which is the output.
        grammar: context-free grammar in Lark (with llguidance's extensions) or GBNF (start rule `root`).
        json_object: True allows any JSON object.
        disable_any_whitespace: forbid whitespace between JSON tokens.
        disable_additional_properties: make additionalProperties default to false in schemas with properties.
        whitespace_pattern: regex of the whitespace allowed between JSON tokens.

    Raises:
        ConfigError: an unknown keyword, not exactly one constraint, or an invalid value.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = option(None, choices=(True, False))
    disable_any_whitespace: bool = option(False, choices=(True, False))
    disable_additional_properties: bool = option(False, choices=(True, False))
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:  # equivalent to None
            object.__setattr__(self, "json_object", None)
        forms = [name for name in _FORMS if getattr(self, name) is not None]
        if len(forms) != 1:
            raise ConfigError(
                f"structured_outputs has {' and '.join(forms) or 'no constraint'}; give one of {', '.join(_FORMS)}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            texts = to_python(self.choice)
            if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
                raise ConfigError(f"choice={self.choice!r}; valid: a list of at least one string")
            object.__setattr__(self, "choice", tuple(texts))
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name}={value!r}; valid: a string")
        check_values(self)
        if self.form not in ("json", "json_object"):
            for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
                if getattr(self, name):
                    raise ConfigError(f"{name}={getattr(self, name)!r} is for json and json_object, not {self.form}")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ConfigError(
                f"disable_any_whitespace and whitespace_pattern={self.whitespace_pattern!r} contradict each other"
            )

    @classmethod
    def of(cls, value: Any) -> Self | None:
        """Convert an instance, a dict of keywords or None. Raises ConfigError."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise ConfigError(
                f"structured_outputs={value!r}; valid: StructuredOutputsParams, or a dict such as {{'json': schema}}"
            )
        return cls(**value)

    @property
    def schema(self) -> str | None:
        """The JSON schema as text."""
        return None if self.json is None else str(self.json)

    @property
    def form(self) -> str:
        """Name of the constraint that is set."""
        return next(name for name in _FORMS if getattr(self, name) is not None)


_FORMS = ("json", "regex", "choice", "grammar", "json_object")


def _schema_text(schema: Any) -> str:
    """Serialise a JSON schema. The order of keys is kept, because it determines the order in the output."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"json={schema[:80]!r} is not JSON ({error}); give a schema as a dict or as text"
            ) from None
    if not isinstance(schema, dict):
        raise ConfigError(f"json={schema!r}; valid: a JSON schema (an object), as a dict or as text")
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"json: the schema cannot be written as JSON ({error})") from None


def closed_schema(schema: Any) -> Any:
    """Return a schema with additionalProperties: false in every object with properties that does not set it."""
    if isinstance(schema, list):
        return [closed_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):  # user-defined names, possibly schema keywords such as "items"
            closed[key] = {name: closed_schema(subschema) for name, subschema in value.items()}
        else:
            closed[key] = value if key in _VALUES else closed_schema(value)
    names_some = any(isinstance(schema.get(key), dict) for key in ("properties", "patternProperties"))
    return closed if "additionalProperties" in schema or not names_some else {**closed, "additionalProperties": False}


_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_VALUES = ("const", "enum", "default", "examples", "required")  # data, not schemas
