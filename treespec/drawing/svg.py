"""Rendering of a token tree as a self-contained SVG for light and dark pages."""

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

from treespec.drawing.picture import MAX_TOKEN_CELLS, RoundPicture, cells, clip, decimals, label, visible

# Pixels. A cell is one column of a 13 px monospace font; common fonts are 7.2 to 7.9 px wide.
CELL, SMALL_CELL = 8.0, 6.2
BOX_HEIGHT, ROW_HEIGHT, PADDING, MARGIN, HEADER, MARK = 38, 48, 9, 24, 82, 11
COUSIN_ROWS = 1.2  # distance in rows between nodes of different parents

# Source colours for light and dark pages, as in treespec/serve/page/page.css; green is reserved for accepted nodes.
LIGHT = ("#5a86f7", "#d07818", "#b8108b", "#514f0a", "#5942f1", "#014c55")
DARK = ("#2681e3", "#df8a3d", "#dc1c9c", "#f8df31", "#cd9cf4", "#aef1fa")
STYLE = """
.ts{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.ts .page{fill:#fff}.ts text{fill:#1f2328}.ts .small{font-size:10px}.ts .small,.ts .dim{fill:#656d76}
.ts .bold{font-weight:bold}.ts .edge{fill:none;stroke:#c4ccd4;stroke-width:1.2}
.ts .box{fill:#f6f8fa;stroke:#c4ccd4}.ts .root .box{fill:#e4e8ec;stroke:#656d76;stroke-width:1.5}
.ts .on .box{fill:#dcf7e3;stroke:#1a7f37;stroke-width:2}.ts .edge.on{stroke:#1a7f37;stroke-width:3}
.ts .bonus .box{fill:#fff;stroke:#1a7f37;stroke-width:2;stroke-dasharray:5 3}.ts .edge.dash{stroke-dasharray:5 3}
.ts .off .token{fill:#656d76}.ts .green{fill:#1a7f37;font-weight:bold}
@media(prefers-color-scheme:dark){
.ts .page{fill:#0d1117}.ts text{fill:#e6edf3}.ts .small,.ts .dim{fill:#9198a1}
.ts .edge{stroke:#3d444d}.ts .box{fill:#161b22;stroke:#3d444d}.ts .root .box{fill:#2a313c;stroke:#9198a1}
.ts .on .box{fill:#12351f;stroke:#3fb950}.ts .edge.on{stroke:#3fb950}
.ts .bonus .box{fill:#0d1117;stroke:#3fb950}.ts .off .token{fill:#9198a1}.ts .green{fill:#3fb950}}
"""
LIGHT_MARKS, DARK_MARKS = (
    "".join(f".ts .s{i}{{fill:{c}}}" for i, c in enumerate(colours)) for colours in (LIGHT, DARK)
)
STYLE += f"{LIGHT_MARKS}\n@media(prefers-color-scheme:dark){{{DARK_MARKS}}}\n"


class Box(NamedTuple):
    """Position of a node in pixels from the tree's top left corner."""

    x: float
    y: float
    width: float
    height: float


def layout(picture: RoundPicture) -> list[Box]:
    """Compute a box per node, bonus token last, with one column per depth and the accepted path on a straight line.

    Subtrees are packed in node order until their outlines touch, so that no edges cross.
    """
    children, count = picture.children(), len(picture.tokens)
    next_on_path = dict(pairwise(picture.path))
    if picture.bonus is not None:
        next_on_path[picture.path[-1]] = count
        siblings = children[picture.path[-1]]
        siblings.insert(len(siblings) // 2, siblings.pop())  # in the middle
    depths = [0] * len(children)
    shift = [0.0] * len(children)  # rows below the parent
    outlines: list[list[tuple[float, float]]] = [[] for _ in children]  # first and last row by depth, own row = 0
    for node in reversed(range(len(children))):
        outline: list[tuple[float, float]] = []
        offsets: dict[int, float] = {}
        for child in children[node]:
            gaps = [
                last + (COUSIN_ROWS if i else 1) - first
                for i, ((_, last), (first, _)) in enumerate(zip(outline, outlines[child], strict=False))
            ]
            offsets[child] = max(gaps, default=0.0)
            moved = [(first + offsets[child], last + offsets[child]) for first, last in outlines[child]]
            overlap = [(old[0], new[1]) for old, new in zip(outline, moved, strict=False)]
            outline = overlap + outline[len(moved) :] + moved[len(outline) :]
        if offsets:
            ends = offsets[children[node][0]] + offsets[children[node][-1]]
            centre = offsets[next_on_path[node]] if node in next_on_path else ends / 2
            shift = [offsets[i] - centre if i in offsets else row for i, row in enumerate(shift)]
            outline = [(first - centre, last - centre) for first, last in outline]
        outlines[node] = [(0.0, 0.0), *outline]
    rows = [0.0] * len(children)
    for node, siblings in enumerate(children):
        for child in siblings:
            rows[child], depths[child] = rows[node] + shift[child], depths[node] + 1
    widths = [0.0] * (max(depths) + 1)
    spans = [0.0] * (max(depths) + 1)  # rows crossed by the longest edge to a column
    for node, depth in enumerate(depths):
        widths[depth] = max(widths[depth], _box_width(picture, node))
        spans[depth] = max(spans[depth], abs(shift[node]))
    lefts = [0.0]
    for width, span in zip(widths, spans[1:], strict=False):
        lefts.append(lefts[-1] + width + min(30 + 4 * span, 100))
    top = min(rows)
    return [Box(lefts[d], (row - top) * ROW_HEIGHT, widths[d], BOX_HEIGHT) for d, row in zip(depths, rows, strict=True)]


def _box_width(picture: RoundPicture, node: int) -> float:
    if node in (0, len(picture.tokens)):
        token, label_width = picture.tokens[0] if node == 0 else picture.bonus or "", len("target") * SMALL_CELL
    else:
        token, prob = picture.tokens[node], decimals(picture.probs[node])
        label_width = len(picture.sources[node]) * MARK + 5 + cells(prob) * SMALL_CELL
    return 2 * PADDING + max(cells(label(token)) * CELL, label_width)


def to_svg(picture: RoundPicture) -> str:
    """Render the tree as a self-contained SVG, left to right."""
    boxes, path, count, names = layout(picture), set(picture.path), len(picture.tokens), picture.all_sources
    tree_width, tree_height = max(b.x + b.width for b in boxes), max(b.y + b.height for b in boxes)
    room = max(tree_width, cells(picture.summary) * CELL)
    legend, legend_height = _legend(names, room)
    width, height = room + 2 * MARGIN, HEADER + tree_height + 20 + legend_height + MARGIN
    emitted = clip(visible(picture.emitted, space=" "), int(room / CELL) - 4)
    context = clip(visible(picture.context + picture.tokens[0], " "), int(room / CELL) - cells(emitted), keep_end=True)
    parents = [*picture.parents, picture.path[-1]]
    edges, nodes = [], []
    for node in sorted(range(1, len(boxes)), key=lambda node: node in path or node == count):  # path on top
        kind = "edge on dash" if node == count else "edge on" if node in path else "edge"
        edges.append(_edge(boxes[parents[node]], boxes[node], kind))
    for node, box in enumerate(boxes):
        if node == count:
            nodes.append(_node(box, "bonus", picture.bonus or "", "bonus token of the target"))
        elif node == 0:
            nodes.append(_node(box, "root", picture.tokens[0], "root"))
        else:
            kind, title = ("on", "accepted") if node in path else ("off", "not accepted")
            prob, by = decimals(picture.probs[node]), picture.sources[node]
            title += f", proposed by {', '.join(by)}" + (f" with probability {prob}" if prob else "")
            nodes.append(_node(box, kind, picture.tokens[node], title, prob, sorted(names.index(name) for name in by)))
    described = f"{count} nodes. Emitted: {visible(picture.emitted)}. Sources: {', '.join(names) or 'none'}."
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" class="ts" role="img" width="{width:.0f}" height="{height:.0f}" \
viewBox="0 0 {width:.0f} {height:.0f}">
<title>Token tree of one round: {picture.summary}</title>
<desc>{escape(described)}</desc>
<style>{STYLE}</style>
<rect class="page" width="100%" height="100%"/>
<text class="bold" x="{MARGIN}" y="{MARGIN + 11}">{picture.summary}</text>
<text x="{MARGIN}" y="{MARGIN + 34}" xml:space="preserve"><tspan class="dim">{escape(context)}</tspan>\
<tspan class="green">{escape(emitted)}</tspan></text>
<g transform="translate({MARGIN} {HEADER})">
{chr(10).join([*edges, *nodes])}
</g>
<g transform="translate({MARGIN} {HEADER + tree_height + 20})">{legend}</g>
</svg>
"""


def _edge(parent: Box, child: Box, kind: str) -> str:
    x0, y0, x1, y1 = parent.x + parent.width, parent.y + BOX_HEIGHT / 2, child.x, child.y + BOX_HEIGHT / 2
    middle = (x0 + x1) / 2
    return (
        f'<path class="{kind}" d="M{x0:.1f} {y0:.1f}C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"/>'
    )


def _node(box: Box, kind: str, token: str, title: str, prob: str = "", sources: Sequence[int] = ()) -> str:
    x_left, x_right, label_y = box.x + PADDING, box.x + box.width - PADDING, box.y + 28.5
    note = {"root": "root", "bonus": "target"}.get(kind, "")
    return (
        f'<g class="{kind}"><title>{escape(visible(token))}: {escape(title)}</title>'
        f'<rect class="box" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height}" rx="6"/>'
        f'<text class="token" x="{x_left:.1f}" y="{box.y + 16:.1f}">{escape(label(token))}</text>'
        + "".join(mark(source, x_left + 4 + MARK * i, label_y) for i, source in enumerate(sources))
        + f'<text class="small" x="{x_left:.1f}" y="{label_y + 3.5:.1f}">{note}</text>' * bool(note)
        + f'<text class="small" x="{x_right:.1f}" y="{label_y + 3.5:.1f}" text-anchor="end">{escape(prob)}</text>'
        * bool(prob)
        + "</g>"
    )


def mark(source: int, x: float, y: float) -> str:
    """Return the marker of a source: a colour, and a shape for colour-blind readers."""
    forms = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"',
        f'<rect x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2"',
        f'<path d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z"',
        f'<path d="M{x:.1f} {y - 4.5:.1f}l4.6 8.2h-9.2z"',
    )
    return f'{forms[source % len(forms)]} class="s{source % len(LIGHT)}"/>'


def _legend(names: list[str], room: float) -> tuple[str, float]:
    """Return the legend of sources and numbers, wrapped at `room` pixels, and its height."""
    elements, x, y = [], 0.0, 0
    labels = [clip(visible(name), MAX_TOKEN_CELLS) for name in names]
    for source, text in enumerate([*labels, "numbers: draft probability"] if names else []):
        is_source = source < len(names)
        width = cells(text) * CELL + 18 * is_source
        if x and x + width > room:
            x, y = 0.0, y + 22
        elements.append(mark(source, x + 5, y + 8) if is_source else "")
        elements.append(f'<text class="dim" x="{x + 16 * is_source:.1f}" y="{y + 12.5:.1f}">{escape(text)}</text>')
        x += width + 20
    return "".join(elements), y + 16.0
