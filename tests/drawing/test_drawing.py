"""The drawing of a token tree: valid, complete, without overlaps, and the accepted path marked."""

import random
import re
import xml.etree.ElementTree as ET

from hypothesis import example, given
from hypothesis import strategies as st

from treespec.drawing import RoundPicture, to_svg, to_text
from treespec.drawing.picture import label, visible
from treespec.drawing.svg import layout

SVG = "{http://www.w3.org/2000/svg}"

SMALL = RoundPicture(
    tokens=[" n", " <=", " ==", " 1", " 0", ":"],
    parents=[-1, 0, 0, 1, 1, 3],
    sources=[(), ("ssm-1", "ssm-2"), ("ssm-2",), ("ssm-1",), ("lookup",), ("ssm-1",)],
    probs=[None, 0.625, 0.25, 0.5, None, 0.004],
    path=[0, 1, 3],
    bonus="\n",
    context="def fib(n):\n    if",
)

SMALL_TEXT = """\
            prob  proposed by
● ␣n              root
├─● ␣<=     0.62  ssm-1  ssm-2
│ ├─● ␣1    0.50  ssm-1
│ │ ├─○ :  <0.01  ssm-1
│ │ └─◆ ⏎         target
│ └─○ ␣0                        lookup
└─○ ␣==     0.25         ssm-2

● accepted path   ○ not accepted   ◆ bonus token
before   def fib(n):⏎    if n
emitted   <= 1⏎
accepted 2 of 5 drafted nodes + 1 bonus token"""


def grown(parents: list[int], seed: int) -> RoundPicture:
    """A round over a given topology with random tokens, sources and path."""
    rng = random.Random(seed)
    words = ' if|\n        |x|\t|<a&b>|"|中文|é|| a_rather_long_identifier_that_is_cut|\x00\x1b'.split("|")
    path = [0]
    while (ahead := [i for i, parent in enumerate(parents) if parent == path[-1]]) and rng.random() < 0.8:
        path.append(rng.choice(ahead))
    count = len(parents)
    return RoundPicture(
        tokens=[rng.choice(words) for _ in range(count)],
        parents=parents,
        sources=[(), *(tuple(rng.sample(["ssm-1", "ssm-2", "<ssm&3>"], rng.randint(1, 3))) for _ in range(count - 1))],
        probs=[None, *(rng.choice([None, rng.random()]) for _ in range(count - 1))],
        path=path,
        bonus=rng.choice([None, " <="]),
        context="def f(x):\n" * rng.randint(0, 20),
    )


topologies = st.lists(st.randoms(use_true_random=False), max_size=40).map(
    lambda rngs: [-1, *(rng.randrange(i + 1) for i, rng in enumerate(rngs))]
)


@given(topologies, st.integers(0, 1000))
@example([-1, *range(63)], 1)
@example([-1] + [0] * 63, 1)
@example([-1, *((i - 1) // 2 for i in range(1, 31))], 1)
def test_any_tree_is_drawn_tidily_and_whole(topology: list[int], seed: int) -> None:
    picture = grown(topology, seed)
    assert_tidy(picture)
    assert_whole(picture)


def assert_tidy(picture: RoundPicture) -> None:
    boxes = layout(picture)
    assert len(boxes) == len(picture.tokens) + (picture.bonus is not None)
    parents = [*picture.parents, picture.path[-1]]
    for i, a in enumerate(boxes):
        assert a.x >= 0 and a.y >= 0
        for b in boxes[:i]:
            apart = a.x >= b.x + b.width or b.x >= a.x + a.width or a.y >= b.y + b.height or b.y >= a.y + a.height
            assert apart, (a, b)
        if i:
            assert a.x > boxes[parents[i]].x + boxes[parents[i]].width
    line = [boxes[i].y for i in picture.path] + [box.y for box in boxes[len(picture.tokens) :]]
    assert max(line) - min(line) < 1e-6, "the accepted path is not straight"
    for i, a in enumerate(boxes[1:], 1):
        for j, b in enumerate(boxes[1:i], 1):
            if a.x == b.x and parents[i] != parents[j]:
                above = boxes[parents[i]].y < boxes[parents[j]].y
                assert above == (a.y < b.y), "edges cross"


def assert_whole(picture: RoundPicture) -> None:
    """The SVG and the text hold every node."""
    svg = ET.fromstring(to_svg(picture))
    nodes = [group for group in svg.iter(f"{SVG}g") if group.get("class")]
    tokens = [*picture.tokens, *([] if picture.bonus is None else [picture.bonus])]
    shown = [next(text.text for text in node.iter(f"{SVG}text") if text.get("class") == "token") for node in nodes]
    assert shown == [label(token) for token in tokens]
    kinds = ["on" if i in picture.path else "off" for i in range(len(picture.tokens))]
    assert [node.get("class") for node in nodes] == ["root", *kinds[1:]] + ["bonus"] * (picture.bonus is not None)
    for node, names in zip(nodes, picture.sources, strict=False):
        marks = [shape for shape in node if re.fullmatch(r"s\d", shape.get("class") or "")]
        assert len(marks) == len(names)
        title = node.findtext(f"{SVG}title") or ""
        assert all(name in title for name in names)
    legend = {text.text for text in svg.iter(f"{SVG}text")}
    assert set(picture.all_sources) <= legend
    edges = [edge for edge in svg.iter(f"{SVG}path") if (edge.get("class") or "").startswith("edge")]
    assert len(edges) == len(tokens) - 1
    on_path = [edge for edge in edges if "on" in (edge.get("class") or "").split()]
    assert len(on_path) == len(picture.path) - 1 + (picture.bonus is not None)
    lines = to_text(picture, color=False).split("\n\n")[0].splitlines()[1:]
    marks = re.findall("[●○◆]", "".join(lines))
    assert len(marks) == len(lines) and marks.count("●") == len(picture.path)
    written = sorted(re.split("[●○◆] ", line)[1].split("  ")[0].strip() for line in lines)
    assert written == sorted(label(token) for token in tokens)


def test_svg_stands_alone() -> None:
    text = to_svg(SMALL)
    svg = ET.fromstring(text)
    assert svg.findtext(f"{SVG}title") and svg.findtext(f"{SVG}desc")
    assert not re.search(r"<script|href|@import|url\(|<image", text)
    assert "prefers-color-scheme" in text
    width, height = float(svg.get("width") or 0), float(svg.get("height") or 0)
    boxes = layout(SMALL)
    assert width > max(box.x + box.width for box in boxes) and height > max(box.y + box.height for box in boxes)


def test_text_of_a_small_tree() -> None:
    """Colour adds nothing but escapes."""
    assert to_text(SMALL, color=False) == SMALL_TEXT
    colored = to_text(SMALL, color=True)
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == SMALL_TEXT
    green = [line for line in colored.splitlines() if line.startswith("\x1b[1;32m")]
    assert len(green) == len(SMALL.path) + 2  # the bonus token and the emitted text


def test_what_does_not_print_is_shown() -> None:
    assert visible(" a\n\t\r") == "␣a⏎→␍"
    assert visible("\x1b[31m\x7f\u202e\u00a0\ud800") == "␛[31m␡\\u202e\\u00a0\\ud800"
    assert visible("中é🙂") == "中é🙂"
