"""Write a drafter: this one remembers earlier outputs (docs/drafters.md). The models are part of this repository."""

from treespec import LLM, SamplingParams, SpecConfig, TokenTree


class Memory:
    """Proposes what followed the last three tokens in earlier requests, as a chain."""

    name = "memory"

    def __init__(self):
        self.following = {}

    def propose(self, requests, max_depths):
        """Return one tree per request, rooted at its last token."""
        return [self.chain(request.tokens, depth) for request, depth in zip(requests, max_depths, strict=True)]

    def chain(self, tokens, depth):
        guess = self.following.get(tuple(tokens[-3:]), [])[:depth]
        return TokenTree.from_parents([tokens[-1], *guess], range(-1, len(guess)), probs=0.8, source=self.name)

    def commit(self, requests, paths):
        """Receive the accepted nodes of each tree; not needed here."""

    def release(self, request):
        """Remember a request that ends."""
        tokens = list(request.tokens)
        self.following |= {tuple(tokens[i - 3 : i]): tokens[i : i + 16] for i in range(3, len(tokens))}


llm = LLM(drafts=["ssm-1", Memory()])
for prompt in ("import os\nimport sys\n", "import sys\nimport os\n", "import os\nimport sys\n"):
    [output] = llm.generate(prompt, SamplingParams(max_tokens=40), SpecConfig(nodes=16))
    metrics = output.metrics
    print(f"{metrics.acceptance_length:.2f} tokens per target pass, {metrics.accepted_by_source} accepted")
