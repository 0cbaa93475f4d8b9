"""Render a token tree as terminal text."""

from treespec.drawing.picture import MAX_TOKEN_CELLS, RoundPicture, cells, clip, decimals, label, visible

ACCEPTED, REJECTED, BONUS = "●", "○", "◆"
BOLD, DIM, GREEN = "1", "2", "1;32"  # ANSI; green is bold too
MAX_CONTEXT_CELLS = 60


def to_text(picture: RoundPicture, color: bool) -> str:
    """Render the tree: one line per node with probability and sources, then the emitted text.

    The accepted path has its own marker and, with `color`, is bold green.
    """
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
            last = child == children[node][-1]
            stack.append((child, indent + ("└─" if last else "├─"), indent + ("  " if last else "│ ")))
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
