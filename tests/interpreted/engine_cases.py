"""The whole engine on the Triton kernels."""

import torch

from tests.models import greedy, open_llm, random_prompts, tiny
from treespec import SpecConfig


def test_trees_on_the_triton_kernels_give_the_tokens_of_plain_decoding() -> None:
    torch.set_num_threads(1)
    target, drafts = tiny()
    prompts, params = random_prompts([3, 62]), greedy(8)
    # exact=False leaves out the self-test, which takes a minute in the interpreter; the tokens are compared here.
    llm = open_llm(target, drafts[:1], attention="triton", max_num_seqs=2, exact=False)
    tree = llm.generate(prompts, params, spec=SpecConfig(nodes=6))
    plain = open_llm(target, attention="cpu-packed", max_num_seqs=2).generate(prompts, params)
    assert [o.outputs[0].token_ids for o in tree] == [o.outputs[0].token_ids for o in plain]
    assert all(output.metrics.acceptance_length > 1.5 for output in tree)
    decoded = llm.generate(prompts, greedy(4, logprobs=2), spec="off")
    texts = [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in decoded]
    for one, other in zip(decoded, llm.generate(texts, greedy(1, prompt_logprobs=2)), strict=True):
        assert other.prompt_logprobs is not None and other.prompt_logprobs[-4:] == one.outputs[0].logprobs
    llm.engine.check_integrity()
