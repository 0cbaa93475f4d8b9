"""Selects raw texts to pre-train drafts of chat models on: documentation, docstrings and some source code."""

import ast
from collections.abc import Iterator, Sequence

from treespec_training.data import Document, syntax_tree

CODE_SHARE = 0.4  # of the characters
LEAST_DOCSTRING = 120  # characters; shorter ones say little


def docstrings(document: Document) -> str:
    """Return the docstrings of a Python file as one text; empty if the file cannot be parsed."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes = [node for node in ast.walk(syntax_tree(document)) if isinstance(node, documented)]
    texts = [ast.get_docstring(node) or "" for node in nodes]
    return "\n\n".join(text for text in texts if len(text) >= LEAST_DOCSTRING)


def raw_texts(documents: Sequence[Document]) -> Iterator[tuple[str, str]]:
    """Yield (kind, text): all prose and docstrings, then source code in the given order up to `CODE_SHARE`."""
    written = 0
    for document in documents:
        text = docstrings(document) if document.kind == "code" else document.text if document.kind == "prose" else ""
        if text:
            written += len(text)
            yield "prose", text
    code = 0
    for document in documents:
        if document.kind == "code" and code < CODE_SHARE / (1 - CODE_SHARE) * written:
            code += len(document.text)
            yield "code", document.text
