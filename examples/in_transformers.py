"""Run transformers' `generate` on a model in memory with draft models, and compare its tokens.

The embedded target stands for any model of transformers.
"""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import treespec.hf
from treespec_weights import default_folder

folder = default_folder("target")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
inputs = tokenizer("def fibonacci(n):\n", return_tensors="pt", return_token_type_ids=False)
expected = model.generate(**inputs, max_new_tokens=48, do_sample=False)

treespec.hf.accelerate(model, drafts=[default_folder("ssm-1"), default_folder("ssm-2")])
tokens = model.generate(**inputs, max_new_tokens=48, do_sample=False)
metrics = treespec.hf.last_metrics(model)
treespec.hf.restore(model)

print(tokenizer.decode(tokens[0], skip_special_tokens=True))
print(f"{metrics.acceptance_length:.2f} tokens per target pass; equal tokens: {torch.equal(tokens, expected)}")
