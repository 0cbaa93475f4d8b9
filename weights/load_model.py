"""The safetensors model loader script: `python weights/load_model.py inspect FOLDER`, or `verify FOLDER`.

The same commands as `treespec weights`.
"""

from treespec_weights.cli import app

if __name__ == "__main__":
    app()
