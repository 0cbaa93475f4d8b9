"""Write docs/api, a page per public class and function, from signatures and docstrings.

python tools/write_api_docs.py
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import treespec
import treespec.hf
from treespec.async_llm import RequestStream
from treespec.outputs import RequestMetrics, StreamChunk
from treespec.training.settings import TrainingSettings

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "api"
PAGES: dict[str, list[Any]] = {
    **{name: [getattr(treespec, name)] for name in treespec.__all__ if name != "__version__"},
    "RequestMetrics": [RequestMetrics],
    "RequestStream": [RequestStream],
    "StreamChunk": [StreamChunk],
    "train_drafts": [treespec.train_drafts, TrainingSettings],
    "treespec.hf": [getattr(treespec.hf, name) for name in treespec.hf.__all__],
}
WIDTH = 100  # of a signature on one line
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def documents() -> dict[Path, str]:
    """Return the text of every page, by path."""
    index, documents = [], {}
    for title, objects in sorted(PAGES.items(), key=lambda page: page[0].lower()):
        blocks = [block for api_object in objects for block in describe(api_object, 1 if len(objects) == 1 else 2)]
        documents[FOLDER / f"{title}.md"] = "\n\n".join([f"# {title}"] * (len(objects) > 1) + blocks) + "\n"
        summary = docstring(definition(objects[0]))[0][0].partition(". ")[0].rstrip(".")
        names = ", ".join(f"`{api_object.__name__}`" for api_object in objects)
        index.append(f"- [{title}]({title}.md): {names if title == 'treespec.hf' else summary}")
    about = (
        "`python tools/write_api_docs.py` writes these pages from the docstrings. [Usage](../usage.md) has examples."
    )
    return documents | {FOLDER / "README.md": "\n\n".join(["# API reference", about, "\n".join(index)]) + "\n"}


def definition(api_object: Any) -> Any:
    """Return the syntax tree of a class or function."""
    return ast.parse(textwrap.dedent(inspect.getsource(api_object))).body[0]


def describe(api_object: Any, level: int) -> Iterator[str]:
    """Yield the blocks of a class and its public methods, or of a function."""
    if inspect.isfunction(api_object):
        function = definition(api_object)
        yield from describe_function(function, level, options_of(api_object, function))
        return
    classes = [definition(base) for base in api_object.__mro__ if base.__module__.startswith("treespec")]
    methods = {node.name: node for base in reversed(classes) for node in base.body if isinstance(node, FUNCTIONS)}
    constructor, options = methods.get("__init__"), options_of(api_object, methods.get("__init__"))
    yield f"{'#' * level} {api_object.__name__}"
    texts = of_fields(options or api_object) if options or not constructor else parameters(constructor.args)
    yield signature(api_object.__name__, texts)
    yield from prose([*classes, *([definition(options)] if options else [])])
    for name in dict.fromkeys(node.name for base in classes for node in base.body if isinstance(node, FUNCTIONS)):
        if not name.startswith("_"):
            yield from describe_function(methods[name], level + 1)


def options_of(api_object: Any, function: Any) -> Any:
    """Return the dataclass whose fields a function takes as keywords, by its decorator, or None."""
    for decorator in function.decorator_list if function else ():
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in ("built_from", "takes_options"):
            return getattr(sys.modules[api_object.__module__], ast.unparse(decorator.args[0]))
    return None


def of_fields(options: Any) -> list[str]:
    """Return the source of the fields of a dataclass. `**vllm_options` stands for those that only vLLM has."""
    classes = [base for base in reversed(options.__mro__) if base.__module__.startswith("treespec")]
    own = [base for base in classes if base.__module__ != "treespec.config.vllm_options"]
    nodes = [node for base in own for node in definition(base).body if isinstance(node, ast.AnnAssign)]
    texts = ["*" if spell(node.annotation) == "KW_ONLY" else spell(node) for node in nodes]
    if is_dataclass(options) and all(field.kw_only for field in fields(options)):
        texts.insert(0, "*")
    return [*texts, *["**vllm_options"] * (own != classes)]


def describe_function(
    function: ast.FunctionDef | ast.AsyncFunctionDef, level: int, options: Any = None
) -> Iterator[str]:
    """Yield the blocks of a function, method or property, or of a function that takes the fields of `options`."""
    yield f"{'#' * level} {function.name}"
    returns = spell(function.returns).strip('"')
    if any(ast.unparse(decorator).endswith("property") for decorator in function.decorator_list):
        yield f"```python\n{function.name}: {returns}\n```"
    else:
        name = "async " * isinstance(function, ast.AsyncFunctionDef) + function.name
        yield signature(name, of_fields(options) if options else parameters(function.args), returns)
    yield from prose([function])


def signature(name: str, texts: Sequence[str], returns: str = "") -> str:
    """Return a block of code with a call's parameters, one to a line if they are many."""
    result = returns and f" -> {returns}"
    line = f"{name}({', '.join(texts)}){result}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){result}"
    return f"```python\n{line}\n```"


def parameters(args: ast.arguments) -> list[str]:
    """Return the source of every parameter but self."""
    defaults = [*[None] * (len(args.args) - len(args.defaults)), *args.defaults]
    texts = [spell(*pair) for pair in zip(args.args, defaults, strict=True) if pair[0].arg not in ("self", "cls")]
    texts += ["*"] * bool(args.kwonlyargs)
    texts += [spell(*pair) for pair in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    is_open = args.kwarg is not None and spell(args.kwarg) != f"{args.kwarg.arg}: Never"
    return [*texts, f"**{args.kwarg.arg}"] if is_open else texts


def spell(node: ast.AST | None, default: ast.AST | None = None) -> str:
    """Return the source of an annotation or a parameter, and of its default, with double quotes."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):  # option(default, ...)
        (value,) = [*node.value.args, *(word.value for word in node.value.keywords if word.arg == "default")]
        node = ast.AnnAssign(node.target, node.annotation, value, node.simple)
    text = (ast.unparse(node) if node else "") + (f" = {ast.unparse(default)}" if default else "")
    return text.replace("'", '"')


def docstring(node: Any) -> tuple[list[str], dict[str, list[str]]]:
    """Return the paragraphs of a docstring, and the entries of its sections, such as "Args"."""
    paragraphs, sections = [], {}
    for block in (ast.get_docstring(node) or "").split("\n\n"):
        title, _, body = block.partition(":\n")
        if title in ("Args", "Attributes", "Returns", "Raises"):
            sections[title] = [" ".join(entry.split()) for entry in re.split(r"\n(?=\S)", textwrap.dedent(body))]
        else:
            paragraphs.append(" ".join(block.split()))
    return paragraphs, sections


def prose(nodes: Sequence[Any]) -> Iterator[str]:
    """Yield the blocks of a function's docstring, or of a class's with the parameters of its bases."""
    paragraphs, sections = docstring(nodes[0])
    yield from filter(None, paragraphs)
    for title, heading in {"Args": "parameter", "Attributes": "attribute"}.items():
        entries = [entry for node in reversed(nodes) for entry in docstring(node)[1].get(title, [])]
        rows = [entry.replace("|", "\\|").partition(": ") for entry in entries]
        if rows:
            yield "\n".join([f"| {heading} | |", "|---|---|", *(f"| `{name}` | {text} |" for name, _, text in rows)])
    if "Returns" in sections:
        yield f"Returns: {' '.join(sections['Returns'])}"
    if "Raises" in sections:
        errors = [error for entry in sections["Raises"] for error in re.split(r"(?<=\.) (?=[A-Z]\w*: )", entry)]
        yield "Raises:\n\n" + "\n".join(f"- {error}" for error in errors)


def write(documents: dict[Path, str]) -> None:
    """Write files."""
    for path, text in documents.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(documents())
