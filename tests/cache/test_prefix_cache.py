"""Requests with a common prefix share its pages: the same tokens and bits, and less to compute."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.exactness import altered_logits
from tests.helpers.models import exact_in, greedy, open_llm, quick, random_prompts, tiny, tiny_llm
from tests.helpers.sharing import assert_as_alone, assert_clean, few_pages, random_requests, run_at_random_times
from treespec import LLM, LLMEngine, RequestOutput, SpecConfig
from treespec.cache.prefix_cache import PrefixCache, page_keys
from treespec.errors import RequestError
from treespec.request import Request
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import PAGE_SIZE


def caching(dtype: torch.dtype = torch.float32, **options: Any) -> LLM:
    target, drafts = tiny(dtype)
    return open_llm(target, drafts, enable_prefix_caching=True, **options)


@exact_in
@pytest.mark.parametrize("seed", quick(range(2), (0,)))
def test_random_interleavings_give_the_tokens_and_bits_of_requests_alone(seed: int, dtype: torch.dtype) -> None:
    plain, llm = tiny_llm(dtype, max_num_seqs=3), caching(dtype, max_num_seqs=3)
    asked = random_requests(seed, 9, (200, 150), 40, (8, 24))

    def twice_in_few_pages() -> list[dict[int, RequestOutput]]:
        with few_pages(llm, 14):
            return [run_at_random_times(llm, asked, seed, aborts=0.05) for _ in range(2)]

    assert_as_alone(plain, llm, asked, twice_in_few_pages)
    assert llm.stats()["cached_tokens"] > 200


def test_a_second_request_computes_the_rest_only() -> None:
    llm = caching()
    stem = random_prompts((150,))[0]
    first = llm.generate([[*stem, 1, 2]], greedy(20))[0]
    second = llm.generate([[*stem, 3]], greedy(20))[0]
    assert (first.metrics.cached_tokens, second.metrics.cached_tokens) == (0, 128)
    # The next turn of a conversation shares the answer, too.
    third = llm.generate([[*stem, 1, 2, *first.outputs[0].token_ids[:-1], 5, 6]], greedy(8))[0]
    assert third.metrics.cached_tokens == 128 + 64 * ((152 + 19) // 64 - 2)
    assert llm.stats()["cached_tokens"] == 256 and llm.stats()["prefill_tokens"] == 151 + 22 + 44
    assert llm.reset_prefix_cache()
    assert llm.generate([[*stem, 3]], greedy(20))[0].metrics.cached_tokens == 0
    assert_clean(llm)


def test_drafts_have_their_part_of_a_prefix() -> None:
    """An SSM that read a prefix does not read it again for another request; one that did not, reads it then."""
    llm, spec = caching(), SpecConfig(nodes=8, sources=("ssm",))
    ssms = llm.engine.sources.ssms
    assert ssms is not None
    stem, read = random_prompts((150,))[0], []
    original = ssms.read

    def noting(*args: Any) -> None:
        before = ssms.drafted.read_tokens
        original(*args)
        read.append(ssms.drafted.read_tokens - before)

    ssms.read = noting  # type: ignore[method-assign]
    counts = []
    for last, options in ((1, "off"), (2, spec), (3, spec)):
        read.clear()
        llm.generate([[*stem, last]], greedy(2), spec=options)
        counts.append(sum(read))
    assert counts[0] == 0 and counts[1] >= 3 * 150 and counts[2] <= 3 * 30


def test_a_prompt_and_outputs_that_fail_are_not_shared() -> None:
    llm = caching()
    stem = random_prompts((150,))[0]

    def spoil(request: Request, tree: TokenTree, rows: Tensor) -> None:
        rows.fill_(float("nan"))

    with altered_logits(llm, spoil), pytest.raises(RequestError, match="NaN or infinity at position 150"):
        llm.generate([[*stem, 1]], greedy(4))
    assert llm.generate([[*stem, 2]], greedy(4))[0].metrics.cached_tokens == 0
    assert_clean(llm)


def test_the_rest_of_a_page_that_a_group_keeps_is_not_shared() -> None:
    """A sample fills the prompt's last page, and ends; the next sample gets this page, without what was filled in."""
    llm = caching(max_num_seqs=1)
    prompt = random_prompts((50,))[0]
    samples = llm.generate([prompt], greedy(40, temperature=0.8, seed=1, n=2), spec="off")[0].outputs
    for sample in samples:
        longer = [*prompt, *sample.token_ids, 1]
        expected = tiny_llm(torch.float32).generate([longer], greedy(20), spec="off")[0].outputs[0].token_ids
        assert llm.generate([longer], greedy(20), spec="off")[0].outputs[0].token_ids == expected
    assert_clean(llm)


def test_a_page_that_another_request_shares_is_not_kept_for_a_group() -> None:
    """The first sample fills the prompt's last page, another request shares it and outlives the sample."""
    llm = caching(max_num_seqs=2, scheduling_policy="priority")
    prompt = random_prompts((PAGE_SIZE,))[0]
    longer, sampled = [*prompt, 7, 8], greedy(6, temperature=0.8, seed=1, n=2)
    expected = [
        tiny_llm().generate([p], params, spec="off")[0] for p, params in ((prompt, sampled), (longer, greedy(20)))
    ]
    engine = LLMEngine(llm)
    for name, ids, params in (("seat", [5], greedy(30)), ("group", prompt, sampled)):
        engine.add_request(name, {"prompt_token_ids": ids}, params, spec="off")
    while not any(output.request_id == "group" for output in engine.step()):
        pass
    engine.abort_request("seat")
    engine.add_request("longer", {"prompt_token_ids": longer}, greedy(20), spec="off", priority=-1)
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    assert ended["longer"].metrics.cached_tokens == PAGE_SIZE
    assert [ended[name].outputs for name in ("group", "longer")] == [each.outputs for each in expected]
    assert_clean(llm)


def test_prompt_logprobs_are_computed() -> None:
    llm = caching()
    stem = random_prompts((150,))[0]
    params = greedy(4, prompt_logprobs=0)
    first, second = (llm.generate([stem], params)[0] for _ in range(2))
    assert second.metrics.cached_tokens == 0 and first.prompt_logprobs == second.prompt_logprobs


def test_the_least_recently_used_page_goes_first() -> None:
    cache, lengths = PrefixCache(10, 2), np.array([64, 200])
    a, b = page_keys(range(192)), page_keys(range(1, 129))
    cache.insert(a, np.array([1, 2, 3]), lengths)
    cache.insert(b, np.array([4, 5]), lengths)
    cache.touch(np.array([1, 2]))
    assert cache.oldest_first(np.arange(1, 7)).tolist() == [6, 3, 5, 4, 2, 1]
    assert cache.find(a).draft_lengths.tolist() == [64, 192]
    cache.forget(np.array([2]))
    assert cache.find(a).pages.tolist() == [1] and cache.find(b).pages.tolist() == [4, 5]
    cache.insert(a, np.array([7, 8, 9]), 0 * lengths)  # equal contents: the first page stays
    assert cache.find(a).pages.tolist() == [1, 8, 3]
    assert cache.find(a).draft_lengths.tolist() == [64, 64], "no draft has K/V of the page between"
    cache.forget(np.array([4]))
    cache.insert(page_keys(range(2, 66)), np.array([4]), 0 * lengths)
    assert cache.find(page_keys(range(2, 66))).draft_lengths.tolist() == [0, 0], "K/V of the page's former contents"


def test_a_key_covers_all_tokens_before_it() -> None:
    keys = page_keys(range(128))
    assert len(keys) == 2 and page_keys(range(130))[:2] == keys
    assert page_keys([1, *range(1, 128)])[1] != keys[1]
    assert page_keys(range(128), b"long")[0] != keys[0]
    assert page_keys(range(63)) == []
