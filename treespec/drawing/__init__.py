"""Render the token tree of one round as terminal text or SVG."""

from treespec.drawing.picture import RoundPicture
from treespec.drawing.svg import to_svg
from treespec.drawing.text import to_text

__all__ = ["RoundPicture", "to_svg", "to_text"]
