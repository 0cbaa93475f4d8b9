"""Instructions and raw texts for a chat model, from installed documentation and source code."""

import ast
import itertools
import random
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

from treespec_training.data import Document, syntax_tree

PARAGRAPH_CHARACTERS = (200, 900)
FUNCTION_LINES = (6, 32)
SENTENCE_WORDS, HEADING_WORDS = (5, 20), (2, 8)
CODE_SHARE = 0.4  # share of code in the characters of raw texts
LEAST_DOCSTRING = 120  # minimum characters of a docstring in raw texts; shorter ones are uninformative
HEADING = re.compile(
    r"^(?:#{1,4} +([A-Za-z][^\n#{}|`*_<>:\[\]]{6,60})|([A-Za-z][^\n{}|`*_<>:\[\]]{6,60})\n(?:=|-|~|\^|\"){4,})$",
    re.MULTILINE,
)
MARKUP = re.compile(r"^\s*(\.\. |[-=~^*#`|+]{3,}|\||>>>|:\w+|<|\[!|!\[)", re.MULTILINE)


Entry = dict[str, str]
"""A line of the written files."""


def _functions(document: Document) -> Iterator[ast.FunctionDef]:
    """Yield documented functions of moderate length."""
    if document.kind != "code":
        return
    for node in ast.walk(syntax_tree(document)):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and not node.name.startswith("_"):
            if FUNCTION_LINES[0] <= (node.end_lineno or 0) - node.lineno < FUNCTION_LINES[1]:
                yield node


def _source(document: Document, node: ast.FunctionDef) -> str:
    return textwrap.dedent("\n".join(document.text.splitlines()[node.lineno - 1 : node.end_lineno]))


def _paragraphs(document: Document) -> Iterator[str]:
    """Yield running text: paragraphs of prose files, and docstrings of modules and classes."""
    if document.kind == "prose":
        texts = re.split(r"\n\s*\n", document.text)
    elif document.kind == "code":
        nodes = [node for node in ast.walk(syntax_tree(document)) if isinstance(node, ast.Module | ast.ClassDef)]
        texts = [paragraph for node in nodes for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or "")]
    else:
        return
    for text in texts:
        text = " ".join(text.split()) if not MARKUP.search(text) else ""
        if PARAGRAPH_CHARACTERS[0] <= len(text) <= PARAGRAPH_CHARACTERS[1] and text[0].isalpha():
            yield text


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _explain(document: Document) -> Iterator[str]:
    for node in _functions(document):
        yield _code(_source(document, node))


def _continue(document: Document) -> Iterator[str]:
    for node in _functions(document):
        lines = _source(document, node).splitlines()
        yield _code("\n".join(lines[: max(len(lines) // 2, 3)]))


def _extract(document: Document) -> Iterator[str]:
    for node in _functions(document):
        yield f"def {node.name}({ast.unparse(node.args)}):\n    {ast.get_docstring(node)}"


def _ask(document: Document) -> Iterator[str]:
    module = document.path.removesuffix(".py").replace("/__init__", "").replace("/", ".")
    for node in _functions(document):
        yield f"`{node.name}` from the Python module `{module}`"


def _tasks(document: Document) -> Iterator[str]:
    """Yield the tasks of documented functions: the imperatives at the start of their docstrings."""
    for node in _functions(document):
        sentence = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()).split(". ")[0].rstrip(".")
        if SENTENCE_WORDS[0] <= len(sentence.split()) <= SENTENCE_WORDS[1] and sentence.isprintable():
            first_word, _, remainder = sentence.partition(" ")
            # "Returns" and the like are not imperatives.
            if first_word.isalpha() and not first_word.endswith("s") and first_word.lower() not in ("test", "no"):
                yield f"{first_word.lower()} {remainder}"


def _topics(document: Document) -> Iterator[str]:
    """Yield the headings of documentation."""
    for heading in HEADING.finditer(document.text if document.kind == "prose" else ""):
        title = (heading[1] or heading[2]).strip()
        if HEADING_WORDS[0] <= len(title.split()) <= HEADING_WORDS[1]:
            package = re.sub(r"-\d.*", "", document.package)  # removes a source distribution's version
            yield f'"{title}" ({package})'


# By kind of task: generator of texts, training phrasings and held-out phrasings; {} is the text.
KINDS: dict[str, tuple[Callable[[Document], Iterator[str]], tuple[str, ...], tuple[str, ...]]] = {
    "explain": (
        _explain,
        (
            "Explain what this function does:\n\n{}",
            "What does the following Python code do? Explain it step by step.\n\n{}",
            "{}\n\nExplain this code to a beginner.",
        ),
        ("Describe in your own words how this function works:\n\n{}",),
    ),
    "rewrite": (
        _paragraphs,
        (
            "Rewrite the following text in simpler words:\n\n{}",
            "Rewrite this paragraph so that it sounds more formal:\n\n{}",
            "Rephrase the text below and keep its meaning.\n\n{}",
        ),
        ("Improve the style of this text:\n\n{}",),
    ),
    "extract": (
        _extract,
        (
            "Extract the function name, its parameters and a one-sentence description as JSON:\n\n{}",
            "Write a JSON object with the keys name, parameters and summary for this function:\n\n{}",
            "{}\n\nList the parameters of this function as a JSON array of objects with name and description.",
        ),
        ("Turn this signature and docstring into JSON with the keys name, arguments and purpose:\n\n{}",),
    ),
    "continue": (
        _continue,
        (
            "Complete this Python function:\n\n{}",
            "Continue the following code:\n\n{}",
            "{}\n\nWrite the rest of this function.",
        ),
        ("Finish the implementation:\n\n{}",),
    ),
    "summarise": (
        _paragraphs,
        (
            "Summarise the following text in one sentence:\n\n{}",
            "Summarize this paragraph briefly:\n\n{}",
            "{}\n\nWhat is the main point of this text?",
        ),
        ("Give a short summary of the text below.\n\n{}",),
    ),
    "list": (
        _paragraphs,
        (
            "List the most important points of the following text:\n\n{}",
            "Write a bulleted list of the facts in this text:\n\n{}",
            "{}\n\nWhich three things should a reader remember? Answer with a numbered list.",
        ),
        ("Turn this text into a list of key points:\n\n{}",),
    ),
    "write": (_tasks, ("Write a Python function to {}.", "How do I {} in Python?", "Show me Python code to {}."), ()),
    "topic": (
        _topics,
        (
            "Explain the topic {} in a few sentences.",
            "What should I know about {}?",
            "Write a short introduction to {}.",
        ),
        (),
    ),
    "question": (
        _ask,
        ("What is {} used for?", "How do I use {}? Give a short example.", "Write a short tutorial about {}."),
        ("When would you use {}?",),
    ),
    "test": (_explain, ("Write a unit test for this function:\n\n{}",), ("Write a unit test with pytest:\n\n{}",)),
}
UNSEEN = ("question", "test")  # kinds of tasks without training instructions
TRAINING_ONLY = tuple(kind for kind, (_, _, phrasings) in KINDS.items() if not phrasings)


def instructions(documents: Iterable[Document], held_out: bool, per_kind: int, seed: int) -> list[Entry]:
    """Write up to `per_kind` instructions of every kind, alternating packages.

    Entries have a user message (`prompt`), its kind of task, and the package of its source text.

    Args:
        documents: source documents, all from training packages or all from held-out packages.
        held_out: use the held-out phrasings, without `TRAINING_ONLY` kinds; otherwise the training phrasings, without
            `UNSEEN` kinds.
        per_kind: maximum instructions of a kind.
        seed: random seed for the order of documents and the choice of phrasings.
    """
    documents = sorted(documents, key=lambda document: document.order(seed))
    result: list[Entry] = []
    for kind, (texts, seen, unseen) in KINDS.items():
        if kind in (TRAINING_ONLY if held_out else UNSEEN):
            continue
        rng = random.Random(f"{seed}:{kind}")
        packages: dict[str, list[Iterator[str]]] = {}
        for document in documents:
            packages.setdefault(document.package.split(".")[0], []).append(texts(document))
        queues = [(package, itertools.chain.from_iterable(iterators)) for package, iterators in packages.items()]
        num_written, seen_texts = 0, set[str]()
        while queues and num_written < per_kind:
            package, queue = queues.pop(0)
            if (text := next(queue, None)) is None:
                continue
            queues.append((package, queue))
            if text not in seen_texts:
                seen_texts.add(text)
                phrasing = rng.choice(unseen if held_out else seen)
                result.append({"prompt": phrasing.replace("{}", text), "kind": kind, "package": package})
                num_written += 1
    return result


def interleaved(unordered: Sequence[Entry]) -> list[Entry]:
    """Order instructions so that kinds alternate."""
    kinds: dict[str, list[Entry]] = {}
    for instruction in unordered:
        kinds.setdefault(instruction["kind"], []).append(instruction)
    rounds = itertools.zip_longest(*kinds.values())
    return [instruction for row in rounds for instruction in row if instruction is not None]


def docstrings(document: Document) -> str:
    """Return the docstrings of a Python file as one text; empty if the file cannot be parsed."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes = [node for node in ast.walk(syntax_tree(document)) if isinstance(node, documented)]
    texts = [ast.get_docstring(node) or "" for node in nodes]
    return "\n\n".join(text for text in texts if len(text) >= LEAST_DOCSTRING)


def raw_texts(documents: Sequence[Document]) -> Iterator[Entry]:
    """Yield texts with their kind: all prose and docstrings, then source code in the given order up to `CODE_SHARE`."""
    num_written = 0
    for document in documents:
        text = docstrings(document) if document.kind == "code" else document.text if document.kind == "prose" else ""
        if text:
            num_written += len(text)
            yield {"text": text, "kind": "prose"}
    code = 0
    for document in documents:
        if document.kind == "code" and code < CODE_SHARE / (1 - CODE_SHARE) * num_written:
            code += len(document.text)
            yield {"text": document.text, "kind": "code"}
