"""The safetensors model loader script: `python weights/load_model.py inspect FOLDER`.

Also verify, load, convert, grow and fetch: the same commands as `treespec weights`.
"""

from treespec_weights.cli import app

if __name__ == "__main__":
    app()
