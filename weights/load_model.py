"""Inspect and convert safetensors models: `python weights/load_model.py inspect FOLDER`.

The other commands are verify, load, convert, grow and fetch, as in `treespec weights`.
"""

from treespec_weights.cli import app

if __name__ == "__main__":
    app()
