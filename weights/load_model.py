"""Inspect and convert safetensors models: `python weights/load_model.py inspect FOLDER`.

The other commands are verify, load, convert, grow and fetch: it is `treespec weights`.
"""

import sys

from treespec.cli import app

if __name__ == "__main__":
    app(["weights", *sys.argv[1:]])
