"""transformers integration: `treespec.hf.accelerate(model, drafts=[...])`, then `model.generate(...)`.

For a single call: `model.generate(**inputs, custom_generate=treespec.hf.generate, drafts=[...])`.
"""

from treespec.hf.accelerate import accelerate, restore
from treespec.hf.generate import GenerateMetrics, generate, last_metrics

__all__ = ["GenerateMetrics", "accelerate", "generate", "last_metrics", "restore"]
