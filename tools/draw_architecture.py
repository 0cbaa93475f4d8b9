"""Draw the pictures of docs/architecture.md: one round, and the packages.

python tools/draw_architecture.py
"""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from treespec.drawing.svg import STYLE, mark

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
FLOW_STYLE = """
.ts{font:13px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,"DejaVu Sans",sans-serif}
.ts .frame{fill:none;stroke:#c4ccd4;stroke-dasharray:2 3}.ts .flow{fill:none;stroke:#656d76;stroke-width:1.5}
.ts .seen{fill:#656d76}.ts .head{fill:#656d76}.ts .word{font-size:11px}
@media(prefers-color-scheme:dark){.ts .frame{stroke:#3d444d}.ts .flow{stroke:#9198a1}
.ts .seen{fill:#9198a1}.ts .head{fill:#9198a1}}
"""
MARKER = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="head" d="M0 0L8 4L0 8z"/></marker>'
)
WIDTH, HEIGHT = 204, 174  # of a step, in pixels
COLUMNS, ROWS = (32, 288, 522, 756), (46, 266)
PAGE = (992, 466)

SOURCES = ("lookup", "ssm-1", "ssm-2")
PATHS = ("cat → sat → up", "cat → is, dog", "cat → sat, is")
WORDS = ("the", "cat", "dog", "sat", "is", "up")
PARENTS = (-1, 0, 0, 1, 1, 3)
PROPOSED_BY = ((), (0, 1, 2), (1,), (0, 2), (1, 2), (0,))
CELLS = ((0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (3, 1))  # column and row of each node
ACCEPTED, BONUS = (0, 1, 3), "on"

PACKAGES: dict[str, dict[str, str]] = {  # by row: name and purpose
    "entry points": {
        "cli": "the commands",
        "serve": "OpenAI's API\nover HTTP",
        "frontend, llm.py": "the Python API,\nvLLM's names",
        "hf": "inside transformers'\ngenerate",
        "training": "trains drafts",
        "bench": "measures speed",
        "drawing": "draws trees",
    },
    "start": {
        "startup": "reads options, loads and self-tests models, plans memory, measures costs, creates the engine"
    },
    "the round": {
        "engine": "admits requests, runs rounds\ndriven by the host, commits, learns",
        "graphs": "whole rounds as\nCUDA graphs",
        "planning": "sources, depth, nodes\nfrom measured costs",
    },
    "its steps": {
        "drafters": "SSMs, heads, lookup,\nsuffix, translation",
        "tree.py": "token trees\nand their merge",
        "verification": "acceptance rules",
        "sampling": "noise, transforms,\nstructured outputs",
        "text": "tokenizers, chat,\ndetokenizer",
    },
    "models": {
        "cache": "paged KV cache,\nshared prefixes",
        "models": "the native decoder,\nheads, block drafts",
        "adapter": "any other architecture,\nby transformers' code",
    },
    "libraries": {
        "treespec_kernels": "C++ and Triton kernels with\nreferences; autotuning",
        "treespec_weights": "safetensors, GGUF, families,\nconversion; embedded models",
        "config, sampling_params, utils": "options and helpers,\nused by all of treespec",
    },
}


def documents() -> dict[Path, str]:
    """Return the text of both pictures, by path."""
    return {IMAGES / "round.svg": round_svg(), IMAGES / "packages.svg": packages_svg()}


def svg(width: int, height: int, title: str, shapes: Sequence[str]) -> str:
    """Return a picture for light and dark pages."""
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" class="ts" role="img" width="{width}" height="{height}" \
viewBox="0 0 {width} {height}">
<title>{title}</title>
<style>{STYLE}{FLOW_STYLE}</style>
<defs>{MARKER}</defs>
<rect class="page" width="100%" height="100%"/>
{chr(10).join(shapes)}
</svg>
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "box", rx: int = 6) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{rx}"/>'


def arrow(points: str) -> str:
    return f'<path class="flow" d="M{points}" marker-end="url(#head)"/>'


def round_svg() -> str:
    """Draw one round as a cycle of steps, with an example of three sources."""
    top, bottom = ROWS
    shapes = [
        box(COLUMNS[0] - 12, 12, WIDTH + 24, PAGE[1] - 24, "frame"),
        text(COLUMNS[0], 33, "engine", "dim bold"),
        box(COLUMNS[1] - 12, 12, COLUMNS[3] + WIDTH - COLUMNS[1] + 24, PAGE[1] - 24, "frame"),
        text(COLUMNS[1], 33, "executor, on the host or as CUDA graphs", "dim bold"),
    ]
    steps = {
        (0, 0): ("schedule", ["admits requests while pages", "are free; prefills prompts"], "scheduler.py", queue),
        (1, 0): ("plan", ["chooses sources, depth and", "nodes by cost and acceptance"], "planning/", plan),
        (2, 0): ("propose", ["sources without a model,", "then SSMs and heads by level"], "drafters/", proposals),
        (3, 0): ("merge", ["nodes with equal paths", "become one node"], "tree.py", merged),
        (3, 1): ("forward", ["one target pass; a node sees", "the context and its ancestors"], "runner.py", mask),
        (2, 1): ("verify", ["the target's own choices", "select the accepted path"], "verification/", verified),
        (1, 1): ("compact", ["moves accepted KV slots", "down, drops the others"], "kv_cache.py", slots),
        (0, 1): ("commit, learn", ["emits tokens; updates", "drafters and planner"], "engine.py", emitted),
    }
    for (column, row), (title, about, file, draw) in steps.items():
        x, y = COLUMNS[column], ROWS[row]
        shapes += [box(x, y, WIDTH, HEIGHT), text(x + 10, y + 20, title, "bold")]
        shapes += [text(x + WIDTH - 10, y + 20, file, "small", "end")]
        shapes += [text(x + 10, y + 38 + 14 * i, line, "word dim") for i, line in enumerate(about)]
        shapes += draw(x + 10, y + 70)
    for i in range(3):
        shapes.append(arrow(f"{COLUMNS[i] + WIDTH} {top + HEIGHT / 2:g}H{COLUMNS[i + 1] - 3}"))
        shapes.append(arrow(f"{COLUMNS[i + 1]} {bottom + HEIGHT / 2:g}H{COLUMNS[i] + WIDTH + 3}"))
    shapes.append(arrow(f"{COLUMNS[3] + WIDTH / 2:g} {top + HEIGHT}V{bottom - 3}"))
    shapes.append(arrow(f"{COLUMNS[0] + WIDTH / 2:g} {bottom}V{top + HEIGHT + 3}"))
    return svg(*PAGE, "One round: schedule, plan, propose, merge, forward, verify, compact, commit", shapes)


def queue(x: float, y: float) -> Iterator[str]:
    for row, (words, kinds) in enumerate([("running", ("on", "on", "on")), ("waiting", ("off", "off"))]):
        yield text(x, y + 33 + 34 * row, words, "word dim")
        for i, kind in enumerate(kinds):
            yield f'<g class="{kind}">{box(x + 60 + 38 * i, y + 15 + 34 * row, 30, 26)}</g>'


def plan(x: float, y: float) -> Iterator[str]:
    for row, words in enumerate(["sources  lookup, ssm-1, ssm-2", "depth    3", "nodes    6"]):
        yield text(x, y + 33 + 22 * row, words, "word").replace("<text", '<text xml:space="preserve"')


def proposals(x: float, y: float) -> Iterator[str]:
    for row, (name, paths) in enumerate(zip(SOURCES, PATHS, strict=True)):
        yield mark(row, x + 6, y + 28 + 24 * row)
        yield text(x + 18, y + 32 + 24 * row, name, "word dim")
        yield text(x + 66, y + 32 + 24 * row, paths, "word")


def merged(x: float, y: float) -> Iterator[str]:
    yield from tree(x, y + 14, accepted=())


def verified(x: float, y: float) -> Iterator[str]:
    yield from tree(x, y + 14, accepted=ACCEPTED)


def tree(x: float, y: float, accepted: Sequence[int]) -> Iterator[str]:
    """Draw the example's tree; with an accepted path, its bonus token too."""
    nodes = [(*CELLS[i], WORDS[i], PARENTS[i], "on" if i in accepted else "off") for i in range(len(WORDS))]
    if accepted:
        nodes.append((3, 0, BONUS, accepted[-1], "bonus"))
    for column, row, _, parent, kind in nodes[1:]:
        x0, y0 = x + 49 * CELLS[parent][0] + 36, y + 46 * CELLS[parent][1] + 17
        x1, y1 = x + 49 * column, y + 46 * row + 17
        edge = {"on": "edge on", "bonus": "edge on dash"}.get(kind, "edge")
        yield f'<path class="{edge}" d="M{x0:g} {y0:g}C{x0 + 6:g} {y0:g} {x1 - 6:g} {y1:g} {x1:g} {y1:g}"/>'
    for node, (column, row, word, _, kind) in enumerate(nodes):
        box_x, box_y = x + 49 * column, y + 46 * row
        yield f'<g class="{"root" if not node and not accepted else kind}">{box(box_x, box_y, 36, 34)}'
        yield text(box_x + 18, box_y + 14, word, "token word", "middle")
        marks = PROPOSED_BY[node] if node < len(WORDS) else ()
        yield "".join(
            mark(source, box_x + 18 + 11 * (i - (len(marks) - 1) / 2), box_y + 25) for i, source in enumerate(marks)
        )
        if not marks:
            yield text(box_x + 18, box_y + 28, "target" if node else "root", "small", "middle")
        yield "</g>"


def mask(x: float, y: float) -> Iterator[str]:
    """Draw the tree's attention mask, behind the committed context."""
    yield text(x + 36, y + 8, "context", "small")
    for node, word in enumerate(WORDS):
        seen, above = {node}, node
        while PARENTS[above] >= 0:
            above = PARENTS[above]
            seen.add(above)
        yield text(x + 30, y + 22 + 14 * node, word, "small", "end")
        yield box(x + 36, y + 13 + 14 * node, 58, 12, "seen", 1)
        for key in range(len(WORDS)):
            yield box(x + 98 + 14 * key, y + 13 + 14 * node, 12, 12, "seen" if key in seen else "box", 1)


def slots(x: float, y: float) -> Iterator[str]:
    """Draw the slots of the KV cache before and after the commit."""
    for row, nodes in enumerate([range(len(WORDS)), ACCEPTED]):
        up = y + 16 + 50 * row
        yield box(x, up, 18, 24, "seen", 2)
        for slot, node in enumerate(nodes):
            kind = "on" if node in ACCEPTED else "off"
            yield f'<g class="{kind}">{box(x + 22 + 27.5 * slot, up, 25, 24, rx=2)}'
            yield text(x + 34.5 + 27.5 * slot, up + 16, WORDS[node], "token small", "middle") + "</g>"
    yield arrow(f"{x + 116:g} {y + 42:g}L{x + 92:g} {y + 63:g}")


def emitted(x: float, y: float) -> Iterator[str]:
    for i, word in enumerate([*(WORDS[node] for node in ACCEPTED[1:]), BONUS]):
        yield f'<g class="{"bonus" if word == BONUS else "on"}">{box(x + 48 * i, y + 28, 40, 28)}</g>'
        yield text(x + 48 * i + 20, y + 46, word, "word", "middle")


def packages_svg() -> str:
    """Draw the packages in rows, from the entry points down to the libraries."""
    shown = {package for row in PACKAGES.values() for name in row for package in name.split(", ")}
    folders = {path.parent.name for path in (ROOT / "treespec").glob("*/__init__.py")}
    assert folders <= shown, f"not in the picture: {folders - shown}"
    width, margin, gap, shapes, y = 992, 116, 8, [], 20
    for row, names in PACKAGES.items():
        lines = max(about.count("\n") + 1 for about in names.values())
        height = 32 + 15 * lines
        shapes.append(text(20, y + height / 2 + 4, row, "dim bold"))
        share = (width - margin - 20 + gap) / len(names)
        for i, (name, about) in enumerate(names.items()):
            x = margin + share * i
            shapes += [box(x, y, share - gap, height), text(x + 10, y + 21, name, "bold")]
            shapes += [text(x + 10, y + 39 + 15 * j, line, "word dim") for j, line in enumerate(about.split("\n"))]
        y += height + 14
    return svg(width, y + 6, "The packages of treespec, from entry points to libraries", shapes)


if __name__ == "__main__":
    for path, picture in documents().items():
        path.write_text(picture, encoding="utf-8")
