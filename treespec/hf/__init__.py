"""treespec inside transformers: `model.generate(**inputs, custom_generate=treespec.hf.generate, drafts=[...])`."""

from treespec.hf.generate import generate

__all__ = ["generate"]
