"""treespec inside transformers: `treespec.hf.accelerate(model, drafts=[...])`, and then `model.generate(...)`.

A single call goes through `model.generate(**inputs, custom_generate=treespec.hf.generate, drafts=[...])`.
"""

from treespec.hf.accelerate import accelerate, restore
from treespec.hf.generate import generate
from treespec.hf.metrics import GenerateMetrics, last_metrics

__all__ = ["GenerateMetrics", "accelerate", "generate", "last_metrics", "restore"]
