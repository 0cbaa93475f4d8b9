"""Version of treespec."""

__version__ = "0.1.0"
