"""The safetensors model loader: `python weights/load_model.py inspect FOLDER`.

Also verify, load, convert, grow and fetch, as in `treespec weights`.
"""

from treespec_weights.cli import app

if __name__ == "__main__":
    app()
