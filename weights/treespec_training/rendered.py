"""Prose and structured data rendered from Python source, since packages contain few manuals and tables.

Docstrings become pages of documentation. Signatures, constants and log messages become records, written as JSON, YAML,
TOML, tables or logs, one format per file.
"""

import ast
import csv
import hashlib
import inspect
import io
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import yaml

from treespec_training.data import Document, syntax_tree

MIN_CHARACTERS = 400  # minimum length of a rendered file
MIN_DOCSTRING = 80
LONGEST_CONSTANT = 4000  # maximum characters of a constant's value
LOG_LEVELS = ("DEBUG", "INFO", "INFO", "INFO", "WARNING", "ERROR")
Record = dict[str, Any]


def rendered(document: Document) -> Iterator[Document]:
    """Yield the prose page and the data file rendered from a Python file, each only if it is long enough."""
    module = syntax_tree(document)
    if not module.body:
        return
    name = document.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    page = page_of(name, module)
    if len(page) >= MIN_CHARACTERS:
        yield replace(document, path=document.path + ":docs", kind="prose", text=page)
    seed = int.from_bytes(hashlib.sha1(f"{document.package}:{document.path}".encode()).digest()[:8])
    text = data_of(name, module, random.Random(seed))
    if len(text) >= MIN_CHARACTERS:
        yield replace(document, path=document.path + ":data", kind="data", text=text)


def page_of(name: str, module: ast.Module) -> str:
    """Return the docstrings of a module, its classes and functions under headings, like a manual."""
    sections = []
    for path, node in _definitions(module):
        text = ast.get_docstring(node)
        if text and len(text) >= MIN_DOCSTRING:
            heading = ".".join((name, *path)) if path else name
            sections.append(f"{heading}\n{('-' if path else '=') * len(heading)}\n\n{text.strip()}\n")
    return "\n".join(sections)


def _definitions(module: ast.Module) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, node) of the module, and of its classes and functions down to methods."""
    pending: list[tuple[tuple[str, ...], Any]] = [((), module)]
    while pending:
        path, node = pending.pop(0)
        yield path, node
        if len(path) < 2:
            kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            pending += [((*path, child.name), child) for child in node.body if isinstance(child, kinds)]


def data_of(name: str, module: ast.Module, rng: random.Random) -> str:
    """Return records of a module in a format chosen by `rng`."""
    functions, constants, messages = list(_functions(module)), dict(_constants(module)), list(_messages(module))
    choices: list[Callable[[], str]] = []
    if len(functions) > 2:
        choices += [
            lambda: _json({"module": name, "functions": functions}, rng),
            lambda: "".join(json.dumps(record) + "\n" for record in functions),
            lambda: yaml.safe_dump({"module": name, "functions": functions}, sort_keys=False, width=100),
            lambda: _toml(name, functions),
            lambda: _table(functions, rng),
        ]
    if len(str(constants)) > MIN_CHARACTERS:
        choices += [lambda: _json(constants, rng), lambda: yaml.safe_dump(constants, sort_keys=False)]
    if len(messages) > 3:
        choices += [lambda: _log(name, functions, messages, rng)] * 2
    return rng.choice(choices)() if choices else ""


def _functions(module: ast.Module) -> Iterator[Record]:
    for path, node in _definitions(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args.posonlyargs + node.args.args
            defaults = [None] * (len(arguments) - len(node.args.defaults)) + list(node.args.defaults)
            summary = (ast.get_docstring(node) or "").strip().split("\n\n")[0].replace("\n", " ")
            record = {
                "name": ".".join(path),
                "line": node.lineno,
                "arguments": [_argument(a, d) for a, d in zip(arguments, defaults, strict=True) if a.arg != "self"],
                "returns": ast.unparse(node.returns) if node.returns else "",
                "summary": summary[:160],
            }
            yield {key: value for key, value in record.items() if value}


def _argument(argument: ast.arg, default: ast.expr | None) -> Record:
    record: Record = {"name": argument.arg}
    if argument.annotation is not None:
        record["type"] = ast.unparse(argument.annotation)
    if default is not None:
        try:
            value = ast.literal_eval(default)
        except (ValueError, TypeError):
            value = ast.unparse(default)
        record["default"] = value if isinstance(value, str | int | float | bool | None) else repr(value)
    return record


def _constants(module: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield module-level literals that JSON can represent."""
    for node in module.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        if isinstance(node.value, ast.Dict | ast.List | ast.Tuple | ast.Constant):
            try:
                value = json.loads(json.dumps(ast.literal_eval(node.value)))
            except (ValueError, TypeError):
                continue
            if len(str(value)) <= LONGEST_CONSTANT:
                yield node.targets[0].id, value


def _messages(module: ast.Module) -> Iterator[str]:
    """Yield the texts of the module's errors, log messages and warnings."""
    for node in ast.walk(module):
        called = node.func if isinstance(node, ast.Call) else None
        name = getattr(called, "attr", getattr(called, "id", ""))
        if not re.search(r"(Error|Exception|Warning|warn|warning|info|debug|error)$", name):
            continue
        for argument in node.args[:1]:  # type: ignore[attr-defined]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value
            elif isinstance(argument, ast.JoinedStr):
                yield "".join(v.value if isinstance(v, ast.Constant) else "%s" for v in argument.values)


def _json(value: object, rng: random.Random) -> str:
    return json.dumps(value, indent=rng.choice((2, 4))) + "\n"


def _toml(name: str, functions: list[Record]) -> str:
    lines = [f"module = {json.dumps(name)}", f"count = {len(functions)}", ""]
    for record in functions:
        lines += ["[[functions]]", f"name = {json.dumps(record['name'])}", f"line = {record['line']}"]
        if "arguments" in record:
            lines.append(f"arguments = {json.dumps([a['name'] for a in record['arguments']])}")
        lines += [f"{key} = {json.dumps(record[key])}" for key in ("returns", "summary") if key in record]
        lines.append("")
    return "\n".join(lines)


def _table(functions: list[Record], rng: random.Random) -> str:
    head = ["name", "line", "arguments", "returns", "summary"]
    rows = []
    for r in functions:
        arguments = " ".join(argument["name"] for argument in r.get("arguments", []))
        rows.append([r["name"], str(r["line"]), arguments, r.get("returns", ""), r.get("summary", "")])
    if rng.random() < 0.5:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([head, *rows])
        return out.getvalue()
    cells = [head, *([cell.replace("|", "/")[:48] for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines) + "\n"


def _log(name: str, functions: list[Record], messages: list[str], rng: random.Random) -> str:
    """Return lines in `logging`'s format: time, level, location, and a message with its placeholders filled in."""
    scopes = [record["name"] for record in functions] or ["<module>"]
    day = f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    seconds, lines = rng.randrange(80000), []
    for _ in range(min(60, 3 * len(messages))):
        seconds += rng.choice((0, 0, 1, 1, 2, 5, 17))
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02},{rng.randrange(1000):03}"
        text = re.sub(r"%[srdif]|\{\w*\}", lambda _: str(rng.randrange(1000)), inspect.cleandoc(rng.choice(messages)))
        text = " ".join(text.split())[:200]
        lines.append(f"{day} {clock} {rng.choice(LOG_LEVELS)} {name}.{rng.choice(scopes)}: {text}")
    return "\n".join(sorted(lines)) + "\n"
