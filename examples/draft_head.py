"""Draft with a head from a folder: `python examples/draft_head.py HEAD [TARGET]`.

HEAD is a published head of TARGET (EAGLE, DFlash, Medusa and others: docs/models.md), or one that is trained here:

    treespec train --target embedded --data docs --head state-ssm --out head --minutes 60
    python examples/draft_head.py head/state-ssm
"""

import sys

from treespec import LLM, SamplingParams, SpecConfig

head, *target = sys.argv[1:]
llm = LLM(*target, drafts=[head])
[name] = llm.draft_names
params = SamplingParams(max_tokens=48)
plain, *drafted = (
    llm.generate("import os\n", params, spec=spec)[0]
    for spec in ("off", SpecConfig(nodes=8, sources=(name,)), SpecConfig(nodes=8))
)
print(plain.outputs[0].text)
for sources, output in zip((name, f"{name} and lookup"), drafted, strict=True):
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    print(f"{sources}: {output.metrics.acceptance_length:.2f} tokens per target pass")
