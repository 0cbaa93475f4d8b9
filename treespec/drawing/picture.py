"""Data of a rendered round, formatting of its tokens, and rendering as terminal text."""

import unicodedata
from dataclasses import dataclass

from treespec.drafters.base import RESERVED

MAX_TOKEN_CELLS, MAX_CONTEXT_CELLS = 24, 60
ACCEPTED, REJECTED, BONUS = "●", "○", "◆"
BOLD, DIM, GREEN = "1", "2", "1;32"  # ANSI codes; green is also bold


@dataclass(frozen=True)
class RoundPicture:
    """A round to render. Lists are indexed by node: root first, parents before children."""

    tokens: list[str]  # decoded text of each node
    parents: list[int]  # index of each node's parent, -1 for the root
    sources: list[tuple[str, ...]]  # names of each node's sources; none for the root
    probs: list[float | None]  # draft probability of each node (mixture of its sources), or None
    path: list[int]  # accepted nodes, root first
    bonus: str | None  # the target's token after the path; None if the request ended within the path
    context: str  # end of the text before the root

    def __post_init__(self) -> None:
        count = len(self.tokens)
        assert count and count == len(self.parents) == len(self.sources) == len(self.probs), "lists of unequal length"
        assert self.parents[0] == -1 and all(0 <= p < i for i, p in enumerate(self.parents) if i), self.parents
        assert self.path and [self.parents[i] for i in self.path] == [-1, *self.path[:-1]], self.path

    @property
    def all_sources(self) -> list[str]:
        """The names of all sources: drafts, then built-in sources."""
        return sorted({name for names in self.sources for name in names}, key=lambda name: (name in RESERVED, name))

    @property
    def summary(self) -> str:
        accepted, drafted = len(self.path) - 1, len(self.tokens) - 1
        nodes = f"accepted {accepted} of {drafted} drafted node{'' if drafted == 1 else 's'}"
        return nodes if self.bonus is None else f"{nodes} + 1 bonus token"

    @property
    def emitted(self) -> str:
        return "".join(self.tokens[i] for i in self.path[1:]) + (self.bonus or "")

    def children(self) -> list[list[int]]:
        """Return the children of each node. The bonus token is appended as a child of the last accepted node."""
        count = len(self.tokens)
        children: list[list[int]] = [[] for _ in range(count + (self.bonus is not None))]
        for node in range(1, count):
            children[self.parents[node]].append(node)
        if self.bonus is not None:
            children[self.path[-1]].append(count)
        return children


def visible(text: str, space: str = "␣") -> str:
    """Show whitespace in `text` as symbols, and escape other unprintable characters."""
    signs = {chr(code): chr(0x2400 + code) for code in range(32)}  # the Unicode block of control pictures
    signs |= {" ": space, "\n": "⏎", "\t": "→", "\x7f": "␡"}
    return "".join(signs.get(char) or (char if char.isprintable() else _escaped(ord(char))) for char in text)


def _escaped(code: int) -> str:
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def cells(text: str) -> int:
    """Return the width of `text` in terminal columns."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def clip(text: str, limit: int, keep_end: bool = False) -> str:
    """Truncate `text` to `limit` cells with an ellipsis."""
    if cells(text) <= limit:
        return text
    clipped, room = "", limit - 1
    for char in reversed(text) if keep_end else text:
        room -= cells(char)
        if room < 0:
            break
        clipped = char + clipped if keep_end else clipped + char
    return f"…{clipped}" if keep_end else f"{clipped}…"


def label(token: str) -> str:
    """Return the displayed text of a node's token."""
    return clip(visible(token), MAX_TOKEN_CELLS) if token else "∅"


def decimals(prob: float | None) -> str:
    """Format the probability of a node. Returns an empty string for None."""
    if prob is None:
        return ""
    return "<0.01" if 0 < prob < 0.005 else f"{prob:.2f}"


def to_text(picture: RoundPicture, color: bool) -> str:
    """Render one line per node with probability and sources, then the emitted text."""
    count, children, path = len(picture.tokens), picture.children(), set(picture.path)
    names = {name: clip(visible(name), MAX_TOKEN_CELLS) for name in picture.all_sources}
    rows = [("", "prob", "proposed by", DIM)]
    stack = [(0, "", "")]
    while stack:
        node, head, indent = stack.pop()
        if node == count:
            rows.append((f"{head}{BONUS} {label(picture.bonus or '')}", "", "target", GREEN))
        else:
            marker = ACCEPTED if node in path else REJECTED
            columns = (names[name] if name in picture.sources[node] else " " * cells(names[name]) for name in names)
            by = "  ".join(columns) if node else "root"
            tree, prob = f"{head}{marker} {label(picture.tokens[node])}", decimals(picture.probs[node])
            rows.append((tree, prob, by, GREEN * (node in path)))
        for child in reversed(children[node]):
            is_last = child == children[node][-1]
            stack.append((child, indent + ("└─" if is_last else "├─"), indent + ("  " if is_last else "│ ")))
    width = max(cells(tree) for tree, *_ in rows)
    lines = [(f"{tree}{' ' * (width - cells(tree))}  {prob:>5}  {by}".rstrip(), ansi) for tree, prob, by, ansi in rows]
    bonus = "" if picture.bonus is None else f"   {BONUS} bonus token"
    lines += [("", ""), (f"{ACCEPTED} accepted path   {REJECTED} not accepted{bonus}", DIM)]
    context = clip(visible(picture.context + picture.tokens[0], space=" "), MAX_CONTEXT_CELLS, keep_end=True)
    lines += [
        (f"before   {context}", ""),
        (f"emitted  {visible(picture.emitted, space=' ')}", GREEN),
        (picture.summary, BOLD),
    ]
    return "\n".join(f"\x1b[{ansi}m{line}\x1b[0m" if color and ansi else line for line, ansi in lines)
