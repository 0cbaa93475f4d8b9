"""Generate JSON that follows a schema; needs llguidance: `pip install -e ".[structured]"`.

Names and punctuation that the schema forces are drafted without a model (source "grammar").
"""

import json

from treespec import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "language": {"enum": ["Python", "C++", "Rust"]},
        "stars": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["name", "language", "stars"],
}

llm = LLM()  # the embedded models
form = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True, disable_additional_properties=True)
params = SamplingParams(max_tokens=64, temperature=0.8, n=3, seed=1, structured_outputs=form)
[output] = llm.generate("A library as JSON:\n", params)
for completion in output.outputs:
    print(json.loads(completion.text))
print(f"{output.metrics.acceptance_length:.2f} tokens per target pass, {output.metrics.accepted_by_source} accepted")
