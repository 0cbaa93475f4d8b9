"""The guards' guards for sampling: each planted fault turns the check of sampled tokens red, or is shown to be none."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import test_mutations
from tests.exactness import Run, differences, run
from tests.models import OracleDrafter, open_llm, random_prompts, tiny, tree_of
from treespec import SamplingParams, SpecConfig
from treespec.engine.host_executor import HostExecutor
from treespec.sampling import transforms as sampling
from treespec.sampling.noise import Noise
from treespec.sampling.sampler import Sampler
from treespec.sampling.transforms import Transforms
from treespec.tree import TokenTree
from treespec.verification.verify import Verified, verify_greedy

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch
LENGTHS = (20, 58, 63)
TOKENS = 16
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 1.0, "frequency_penalty": 1.5}


def params(**options: Any) -> list[SamplingParams]:
    base = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0} | PENALTIES | options
    return [SamplingParams(**base, seed=seed) for seed in range(len(LENGTHS))]


def runs(plant: Callable[[Patch], None], both: bool = False, **options: Any) -> tuple[Run, Run]:
    """Sampled, with an oracle whose wrong guesses have children."""
    return test_mutations.runs(plant, LENGTHS, params(**options), nodes=32, bushy=True, both=both)


def test_without_a_fault_the_check_is_green() -> None:
    plain, tree = runs(lambda patch: None)
    assert not differences(plain, tree)
    assert tree.acceptance_length > 3


# --- faults in the noise


def noise_of(position_of: Callable[[int, Sequence[int], Sequence[int]], int]) -> Callable[[Patch], None]:
    """The target takes the noise of another position, by the position, the text and the path to the node."""
    choose = Sampler.choose

    def altered(self: Sampler, logits: Tensor, tokens: Sequence[int], ancestors: Sequence[int] = ()) -> int:
        draw = self.noise.choose

        def elsewhere(scores: np.ndarray, position: int) -> tuple[int, float]:
            return draw(scores, position_of(position, tokens, ancestors))

        with mock.patch.object(self.noise, "choose", elsewhere):
            return choose(self, logits, tokens, ancestors)

    return lambda patch: patch.setattr(Sampler, "choose", altered)


def noise_of_one_generator(patch: Patch) -> None:
    """Noise is drawn as it is asked for, so it depends on what was asked before."""
    generators: dict[int, np.random.Generator] = {}

    def row(self: Noise, position: int) -> np.ndarray:
        generator = generators.setdefault(id(self), np.random.default_rng([self.seed, self.sample]))
        return generator.gumbel(size=self.vocab_size).astype(np.float32)

    def choose(self: Noise, scores: np.ndarray, position: int) -> tuple[int, float]:
        sums = scores + self.row(position)
        return int(sums.argmax()), float(sums.max())

    patch.setattr(Noise, "row", row)
    patch.setattr(Noise, "choose", choose)


NOISES: dict[str, Callable[[Patch], None]] = {
    "the next position": noise_of(lambda position, tokens, ancestors: position + bool(ancestors)),
    "the position before": noise_of(lambda position, tokens, ancestors: position - bool(ancestors)),
    "the root's": noise_of(lambda position, tokens, ancestors: len(tokens)),  # keyed by round, not by position
    "in the order of asking": noise_of_one_generator,
}


@pytest.mark.parametrize("fault", NOISES)
def test_faulty_noise(fault: str) -> None:
    plain, tree = runs(NOISES[fault], both=fault == "in the order of asking")
    assert plain.tokens != tree.tokens


def test_noise_by_batch_slot_is_seen_in_another_order() -> None:
    """The same in trees and plain decoding, so it takes another batch to see it."""
    llm = open_llm(tiny()[0], max_num_seqs=3)
    prompts, verify_round = random_prompts(LENGTHS), HostExecutor.verify

    def by_slot(self: HostExecutor, execution: Any, *rest: Any) -> Any:
        for slot, (request, *_) in enumerate(execution.scored):
            request.sampler.noise = Noise(slot, 0, request.sampler.noise.vocab_size)
        return verify_round(self, execution, *rest)

    for faulty in (False, True):
        with Patch.context() as patch:
            if faulty:
                patch.setattr(HostExecutor, "verify", by_slot)
            forward = run(llm, prompts, params(), "off").tokens
            backward = run(llm, prompts[::-1], params()[::-1], "off").tokens[::-1]
        assert (forward != backward) == faulty


def test_drafts_without_noise_cost_acceptance_and_no_token() -> None:
    """Drafts that do not know the target's noise guess worse; what is emitted stays the same, bit for bit."""
    target, drafts = tiny()
    llm = open_llm(target, drafts)
    prompts = random_prompts((9, 40, 63, 64))
    each = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.2, seed=seed) for seed in range(4)]
    plain = run(llm, prompts, each, "off")
    spec = SpecConfig(nodes=12, max_depth=4)
    temper, lengths = Sampler.temper, []
    variants: list[Callable[[Sampler, Tensor, int, bool], None]] = [
        temper,
        lambda self, logits, position, coupled: temper(self, logits, position, False),
        lambda self, logits, position, coupled: temper(self, logits, position + 1, coupled),
        lambda self, logits, position, coupled: None,
    ]
    for variant in variants:
        with Patch.context() as patch:
            patch.setattr(Sampler, "temper", variant)
            tree = run(llm, prompts, each, spec)
        assert not differences(plain, tree)
        lengths.append(tree.acceptance_length)
    coupled, without, shifted, _ = lengths
    assert coupled > without + 0.3 > 1.3, lengths
    assert shifted < without, lengths


# --- faults in what a node's distribution depends on


def altered_ancestors(change: Callable[[list[int]], list[int]]) -> Callable[[Patch], None]:
    """The transforms of a node see other ancestors than its own."""
    scores = Transforms.scores

    def altered(self: Transforms, logits: Tensor, tokens: Sequence[int], ancestors: Sequence[int]) -> Tensor:
        return scores(self, logits, tokens, change(list(ancestors)))

    return lambda patch: patch.setattr(Transforms, "scores", altered)


# Few tokens that are all likely, and a penalty for each time that one was there: all of the past counts.
FEW: dict[str, Any] = {
    "logit_bias": dict.fromkeys(range(5, 13), 20.0),
    "frequency_penalty": 2.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 2.0,
}
ANCESTORS: dict[str, Callable[[list[int]], list[int]]] = {
    "none": lambda path: [],
    "all but the last": lambda path: path[:-1],
    "a sibling's": lambda path: [*path[:-1], (path[-1] + 37) % 512] if path else path,
    "all of them twice": lambda path: path + path,
}


@pytest.mark.parametrize("fault", ANCESTORS)
def test_faulty_ancestors(fault: str) -> None:
    plain, tree = runs(altered_ancestors(ANCESTORS[fault]), **FEW)
    assert plain.tokens != tree.tokens


def test_without_a_fault_few_tokens_are_exact_too() -> None:
    plain, tree = runs(lambda patch: None, **FEW)
    assert not differences(plain, tree)


def test_counts_that_keep_the_tree() -> None:
    """Tokens of a path stay counted after it was looked at."""
    penalised_row = sampling.penalised_row

    def forgetful(values: Tensor, state: Any, path: Tensor, *rest: Any) -> Tensor:
        result = penalised_row(values, state, path, *rest)
        state[1].index_add_(0, path, torch.ones_like(path, dtype=torch.int32))
        return result

    plain, tree = runs(lambda patch: patch.setattr(sampling, "penalised_row", forgetful), **FEW)
    assert plain.tokens != tree.tokens


# --- faults in the walk


def likeliest_child(self: Sampler, tree: TokenTree, logits: Tensor, tokens: Sequence[int], most: int) -> Verified:
    """Goes on to the child that the target gives the most, as long as there is one."""
    path: list[int] = [0]
    while len(path) < most and len(children := np.flatnonzero(tree.parents == path[-1])):
        path.append(int(children[int(logits[path[-1]][torch.from_numpy(tree.tokens[children])].argmax())]))
    ancestors = tree.tokens[path[1:]].tolist()
    return Verified(np.array(path), self.choose(logits[path[-1]], tokens, ancestors))


def bonus_of_the_parent(self: Sampler, tree: TokenTree, logits: Tensor, tokens: Sequence[int], most: int) -> Verified:
    path, _ = WALK(self, tree, logits, tokens, most)
    ancestors = tree.tokens[path[1:]].tolist()
    return Verified(path, self.choose(logits[path[max(len(path) - 2, 0)]], tokens, ancestors))


def any_parent(self: Sampler, tree: TokenTree, logits: Tensor, tokens: Sequence[int], most: int) -> Verified:
    """A child is found by its token and depth, whoever its parent is."""
    path, ancestors = [0], []
    while True:
        token = self.choose(logits[path[-1]], tokens, ancestors)
        found = np.flatnonzero((tree.depths == len(path)) & (tree.tokens == token))
        if not len(found) or len(path) >= most:
            return Verified(np.array(path), token)
        path.append(int(found[0]))
        ancestors.append(token)


def sampled_twice(self: Sampler, tree: TokenTree, logits: Tensor, tokens: Sequence[int], most: int) -> Verified:
    """Walks along the argmax and samples the bonus token only."""
    path = verify_greedy(tree, logits.argmax(-1).numpy()).path
    return Verified(path, self.choose(logits[path[-1]], tokens, tree.tokens[path[1:]].tolist()))


WALK = Sampler.walk


@pytest.mark.parametrize("fault", [likeliest_child, bonus_of_the_parent, sampled_twice], ids=lambda f: f.__name__)
def test_faulty_walks(fault: Any) -> None:
    plain, tree = runs(lambda patch: patch.setattr(Sampler, "walk", fault))
    assert plain.tokens != tree.tokens


def test_a_walk_that_takes_a_cousin() -> None:
    """Tokens may be right for once; the bits of the next logits are not."""
    llm = open_llm(tiny()[0], [OracleDrafter([], 3)], max_num_seqs=3)
    plain = run(llm, random_prompts(LENGTHS), params(), "off")

    class Cousins(OracleDrafter):
        """Below every wrong sibling stands the true next token."""

        def _tree(self, tokens: list[int], max_depth: int) -> TokenTree:
            truth = next((t for t in self.truths if t[: len(tokens)] == tokens), tokens)
            coming = truth[len(tokens) : len(tokens) + min(2, max_depth)]
            if len(coming) < 2:
                return TokenTree.root(tokens[-1])
            wrong = (coming[0] + 37) % self.vocab
            paths = {(wrong,): 0.4, (wrong, coming[1]): 0.9, (coming[0],): 0.5, (coming[0], coming[1]): 0.9}
            return tree_of(tokens[-1], paths)

    llm.engine.sources.others[:] = [Cousins(plain.sequences, 2)]
    for fault in (None, any_parent):
        with Patch.context() as patch:
            if fault:
                patch.setattr(Sampler, "walk", fault)
            found = differences(plain, run(llm, plain.prompts, params(), SpecConfig(nodes=8, max_depth=2)))
        assert bool(found) == (fault is not None)
