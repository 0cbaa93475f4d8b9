"""Merge the trees of three SSMs and prompt lookup, and show the merged tree of a round.

The embedded target and its SSMs, trained on code, prose and data, are part of this repository.
"""

from treespec import LLM, SamplingParams, SpecConfig
from treespec.drawing import to_text
from treespec.drawing.recording import picture

llm = LLM(drafts=["ssm-1", "ssm-2", "ssm-3"])
prompt, params = "import json\n\n\ndef load(path):\n", SamplingParams(max_tokens=48)
for sources in (("ssm-1",), ("ssm-2",), ("ssm-3",), ("lookup",), ("ssm", "lookup")):
    rounds = []
    with llm.add_round_observer(rounds.append):
        [output] = llm.generate(prompt, params, spec=SpecConfig(nodes=16, sources=sources))
    print(f"{' + '.join(sources):14} {output.metrics.acceptance_length:.2f} tokens per target pass")

print("\nThe first round:\n")
print(to_text(picture(rounds[0], llm.get_tokenizer()), color=False))
