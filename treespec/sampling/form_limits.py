"""Size limits of structured-output constraints.

llguidance cannot be interrupted while it compiles a constraint, and its own limits count expressions of any size: a
regex of n optional parts takes n^2 steps. Within the limits below, compilation takes at most one second of CPU time.
"""

import json
import math
import re
from functools import cache
from typing import Any

from treespec.errors import ParameterError
from treespec.sampling_params.structured_params import StructuredOutputsParams

MAX_CHARACTERS = 1_000_000  # total over the texts of a choice, or in a JSON schema
MAX_TEXT = 20_000  # characters per text or regex
MAX_GRAMMAR = 100_000  # characters of a grammar, or of a terminal with all terminals it references
MAX_PARTS = 1000  # optional or repeated parts per regex, terminal or rule
MAX_PATTERN_PROPERTIES = 100  # regexes, which are compared pairwise
MAX_MULTIPLE = 100_000  # automaton states of `multipleOf`, one per remainder

# Operators of optional, repeated or empty parts; "(?" opens a group, and [] is Lark's syntax.
_OPTIONAL = r"(?<!\()\?|[*{]|\|\)|\(\||\|\||\(\)"
# A rule, a terminal, or a directive such as %ignore. The name is possessive to keep the search linear.
_DEFINITION = re.compile(
    r"^[ \t]*(?:[!?]*([A-Za-z_][\w-]*+)(?:\[[^\n\]]*\]|\{[^\n}]*\}|[^\n:\"/\[{])*:|%)", re.MULTILINE
)
_NAME = re.compile(r"[A-Za-z_][\w-]*")
# Strings, regexes, special tokens and comments; likewise linear, because the closing delimiter is optional.
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\])+/?|<[^<>\s]+>|(?:#|//)[^\n]*')
_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*([-+.\w]+)')
_COMBINES = re.compile('"(?:allOf|anyOf|oneOf|\\$ref|\\$dynamicRef)"')  # may combine several multiples


def check_form(form: StructuredOutputsParams) -> None:
    """Reject a constraint that would take llguidance too much time or memory to compile."""
    if form.choice is not None:
        _check("choice", sum(map(len, form.choice)), MAX_CHARACTERS)
        _check("a text of choice", max(map(len, form.choice)), MAX_TEXT)
    for label, regex in (("regex", form.regex), ("whitespace_pattern", form.whitespace_pattern)):
        if regex is not None:
            _check(label, len(regex), MAX_TEXT)
            _check_parts(label, _num_parts(regex))
    if form.grammar is not None:
        _check("grammar", len(form.grammar), MAX_GRAMMAR)
    if form.schema is not None:
        _check("json", len(form.schema), MAX_CHARACTERS)
        _check_multiples(form.schema, combined=_COMBINES.search(form.schema) is not None)
        _check_schema(form.schema)


def check_lark(grammar: str) -> None:
    """Reject a Lark grammar with an oversized rule or terminal.

    A terminal expands to one regex that inlines all referenced terminals: twenty lines can expand to a million parts.
    """
    _check_multiples(grammar, combined=True)
    code = _LITERAL.sub(lambda match: " " * len(match[0]), grammar)  # SELECT: "SELECT" does not reference itself
    definitions = list(_DEFINITION.finditer(code))
    ends = [*(match.start() for match in definitions[1:]), len(grammar)]
    spans = {
        match[1] or f"%IGNORE-{match.start()}": slice(match.end(), end)
        for match, end in zip(definitions, ends, strict=False)
    }
    terms = {
        name: [term for term in _NAME.findall(code[span]) if term.isupper() and term in spans] if name.isupper() else []
        for name, span in spans.items()
    }

    @cache
    def expanded(name: str) -> tuple[int, int]:
        """Return the characters and parts of a rule, or of a terminal including the terminals it references."""
        body = grammar[spans[name]]
        sizes = [*map(expanded, terms[name]), (len(body), _num_parts(body, _OPTIONAL + r"|\["))]
        return sum(length for length, _ in sizes), sum(num_parts for _, num_parts in sizes)

    try:
        sizes = {name: expanded(name) for name in spans}
    except RecursionError:
        raise ParameterError(
            "structured_outputs: terminals of grammar reference each other in a cycle or too deeply"
        ) from None
    for name, (length, num_parts) in sizes.items():
        label = f"terminal {name} of grammar, with the terminals it references," if name.isupper() else f"rule {name}"
        _check(label, length, MAX_GRAMMAR, remedy="use rules (lower-case names) instead")
        _check_parts(label, num_parts)


def _check_schema(schema: str) -> None:
    """Reject a JSON schema with oversized patterns or texts."""
    patterns: list[str] = []
    properties: list[str] = []

    def visit(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, value in pairs:
            for text in (key, *(value if isinstance(value, list) else (value,))):
                if isinstance(text, str):
                    _check("a text in json", len(text), MAX_TEXT)
            if key == "pattern" and isinstance(value, str):
                patterns.append(value)
            elif key == "patternProperties" and isinstance(value, dict):
                properties.extend(value)
        return dict(pairs)

    json.loads(schema, object_pairs_hook=visit)
    _check("json", len(properties), MAX_PATTERN_PROPERTIES, "patternProperties", "join patterns by |")
    _check_parts("json, in its patterns,", sum(map(_num_parts, patterns + properties)))


def _check_multiples(text: str, combined: bool) -> None:
    """Limit the automaton states of `multipleOf`; `combined`: a number may have to satisfy several multiples."""
    digits = {re.sub(r"[eE].*|\D", "", number).strip("0") for number in _MULTIPLE_OF.findall(text)}
    numbers = [int(leading[:18] or "1") for leading in digits]  # longer numbers exceed the limit anyway
    states = math.lcm(*numbers) if combined else sum(numbers)
    _check("multipleOf in json", states, MAX_MULTIPLE, "states", "use smaller or fewer distinct multiples")


def _num_parts(regex: str, optional: str = _OPTIONAL) -> int:
    return len(re.findall(optional, regex))


def _check_parts(label: str, count: int) -> None:
    _check(label, count, MAX_PARTS, "optional or repeated parts", "repeat a group, as in (...){0,100}")


def _check(label: str, count: int, limit: int, unit: str = "characters", remedy: str = "shorten it") -> None:
    if count > limit:
        raise ParameterError(f"structured_outputs: {label} has {count} {unit}, but the limit is {limit}; {remedy}")
