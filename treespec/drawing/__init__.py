"""Render the token tree of one round as terminal text or SVG."""

from treespec.drawing.picture import RoundPicture, to_text
from treespec.drawing.svg import to_svg

__all__ = ["RoundPicture", "to_svg", "to_text"]
