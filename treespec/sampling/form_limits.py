"""Size limits of structured-output constraints.

llguidance cannot be interrupted while it compiles a constraint, and its own limits count expressions of unbounded size:
a regex of n optional parts takes n^2 steps. Within the limits below, compilation takes at most one second of CPU time.
"""

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

from treespec.errors import RequestError
from treespec.sampling_params.structured_params import StructuredOutputsParams

MAX_CHARACTERS = 1_000_000  # in all texts of a choice together, or in a JSON schema
MAX_TEXT = 20_000  # characters of one text
MAX_GRAMMAR = 100_000  # characters
MAX_PARTS = 1000  # optional or repeated parts per regex, terminal or rule
MAX_PATTERN_PROPERTIES = 100  # compared pairwise
MAX_MULTIPLE = 100_000  # states of the automaton of `multipleOf`

# Operators that make a part optional or repeated, or an alternative empty; "(?" opens a group.
_OPTIONAL = re.compile(r"(?<!\()\?|[*{]|\|\)|\(\||\|\||\(\)")
_OPTIONAL_IN_LARK = re.compile(_OPTIONAL.pattern + r"|\[")
_DEFINITION = re.compile(r"^[ \t]*[!?]*([A-Za-z_]\w*)(?:\[[^\n\]]*\]|\{[^\n}]*\}|[^\n:\"/\[{])*:", re.MULTILINE)
_TERMINAL = re.compile(r"\b[A-Z_][A-Z0-9_]*\b")
_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*([-+.\w]+)')
_DIGITS = 18  # leading digits of a multiple to read; longer multiples exceed the limit anyway
_COMBINES = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef")  # may require several multiples at once


def check_form(form: StructuredOutputsParams) -> None:
    """Reject a constraint that would take llguidance too much time or memory to compile."""
    if form.choice is not None:
        check_length("choice", sum(map(len, form.choice)), MAX_CHARACTERS, "give fewer or shorter texts")
        check_length("a text of choice", max(map(len, form.choice)), MAX_TEXT, "give shorter ones")
    if form.regex is not None:
        check_regex("regex", form.regex)
    if form.whitespace_pattern is not None:
        check_regex("whitespace_pattern", form.whitespace_pattern)
    if form.grammar is not None:
        check_length("grammar", len(form.grammar), MAX_GRAMMAR, "give a shorter one")
    if form.schema is not None:
        check_length("json", len(form.schema), MAX_CHARACTERS, "give a smaller schema")
        _check_schema(json.loads(form.schema))


def check_length(label: str, length: int, most: int, remedy: str) -> None:
    """Raise RequestError if a text is longer than `most` characters."""
    if length > most:
        raise RequestError(f"structured_outputs: {label} has {length} characters, the limit is {most}; {remedy}")


def check_regex(label: str, regex: str) -> None:
    """Raise RequestError if a regex is too long or has too many optional or repeated parts."""
    check_length(label, len(regex), MAX_TEXT, "use choice for a list of words, or a shorter regex")
    _check_parts(label, len(_OPTIONAL.findall(regex)))


def check_lark(grammar: str) -> None:
    """Reject a Lark grammar with an oversized rule or terminal.

    A terminal expands to one regex that inlines all referenced terminals: twenty lines can expand to a million parts.
    """
    _check_multiples([*map(_number, _MULTIPLE_OF.findall(grammar))], combined=True)
    definitions = list(_DEFINITION.finditer(grammar))
    starts = [*(match.start() for match in definitions), len(grammar)]
    bodies = {match[1]: grammar[match.end() : end] for match, end in zip(definitions, starts[1:], strict=True)}
    part_counts = {name: len(_OPTIONAL_IN_LARK.findall(body)) for name, body in bodies.items()}
    sizes = {name: len(body) for name, body in bodies.items()}
    named = {name: [term for term in _TERMINAL.findall(body) if term in bodies] for name, body in bodies.items()}
    for name in _inner_first(named):
        if name.isupper():
            part_counts[name] += sum(part_counts[term] for term in named[name])
            sizes[name] += sum(sizes[term] for term in named[name])
            label = f"terminal {name} of grammar, with the terminals that it names,"
            check_length(label, sizes[name], MAX_GRAMMAR, "use rules, whose names are in lower case")
            _check_parts(label, part_counts[name])
        else:
            _check_parts(f"rule {name} of grammar", part_counts[name])


def _inner_first(named: dict[str, list[str]]) -> list[str]:
    """Return a topological order, referenced names first. The order within a cycle, which is an error, is arbitrary."""
    order: dict[str, None] = {}
    entered: set[str] = set()
    for first in named:
        stack = [first]
        while stack:
            name = stack[-1]
            if name in entered:
                order.setdefault(stack.pop())
            else:
                entered.add(name)
                stack += [reference for reference in named[name] if reference not in entered]
    return list(order)


def _check_parts(label: str, count: int) -> None:
    if count > MAX_PARTS:
        raise RequestError(
            f"structured_outputs: {label} has {count} optional or repeated parts, the limit is {MAX_PARTS}; repeat a "
            "group, as in (...){0,100}, instead of writing it out"
        )


def _check_schema(schema: Any) -> None:
    """Reject a JSON schema with oversized patterns, texts or multiples."""
    num_parts = patterns = 0
    multiples: list[Decimal] = []
    combined = False
    for key, value in _entries(schema):
        combined |= key in _COMBINES
        if isinstance(value, str):
            check_length("a text in json", len(value), MAX_TEXT, "give a shorter one")
        if key == "pattern" and isinstance(value, str):
            num_parts += len(_OPTIONAL.findall(value))
        elif key == "patternProperties" and isinstance(value, dict):
            patterns += len(value)
            num_parts += sum(len(_OPTIONAL.findall(pattern)) for pattern in value)
        elif key == "multipleOf" and isinstance(value, int | float):
            multiples.append(_number(str(value)))
        elif key is not None:
            check_length("a name in json", len(key), MAX_TEXT, "give a shorter one")
    _check_parts("json, in its patterns,", num_parts)
    if patterns > MAX_PATTERN_PROPERTIES:
        raise RequestError(
            f"structured_outputs: json has {patterns} patternProperties, the limit is {MAX_PATTERN_PROPERTIES}; join "
            "patterns by |"
        )
    _check_multiples(multiples, combined)


def _entries(schema: Any) -> Iterator[tuple[str | None, Any]]:
    """Yield every key with its value, and every list element with key None."""
    stack = [schema]
    while stack:
        value = stack.pop()
        pairs = value.items() if isinstance(value, dict) else ((None, element) for element in value)
        for key, entry in pairs:
            yield key, entry
            if isinstance(entry, dict | list):
                stack.append(entry)


def _number(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        return Decimal(0)


def _check_multiples(values: list[Decimal], combined: bool) -> None:
    """Limit the automaton states of `multipleOf`, one per remainder.

    Args:
        values: values of `multipleOf`.
        combined: whether a number may have to satisfy several of them.
    """
    texts = {"".join(map(str, value.as_tuple().digits)).rstrip("0") for value in values}
    numbers = [int(text[:_DIGITS] or "1") for text in texts]
    states = math.lcm(*numbers) if combined else sum(numbers)
    if states > MAX_MULTIPLE:
        raise RequestError(
            f"structured_outputs: multipleOf in json needs {states} states, the limit is {MAX_MULTIPLE}; use smaller "
            "or fewer distinct multiples"
        )
