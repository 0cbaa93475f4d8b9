"""Text tables for terminals."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows (header first) as columns; the first column is left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    ]
    return "\n".join("  ".join(cells).rstrip() for cells in lines)
