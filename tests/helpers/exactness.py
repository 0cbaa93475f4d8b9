"""Whether trees have the tokens and the logit bits of plain decoding: shared by the guards and the guards' guards."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

from tests.helpers.calls import by_the_host
from tests.helpers.models import greedy, random_prompts, tokens_of
from treespec import LLM, SamplingParams, SpecConfig
from treespec.outputs import RequestOutput
from treespec.request import Request
from treespec.tree import TokenTree

Prefix = tuple[int, ...]


@dataclass
class Run:
    """What a call generated, and the logits of every row of its target passes by the tokens that lead to it."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    logits: dict[Prefix, Tensor]
    unequal: list[Prefix]  # prefixes that were computed twice with other bits
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def sequences(self) -> list[list[int]]:
        return [prompt + tokens for prompt, tokens in zip(self.prompts, self.tokens, strict=True)]

    @property
    def acceptance_length(self) -> float:
        metrics = [output.metrics for output in self.outputs]
        return sum(m.generated_tokens for m in metrics) / sum(m.target_passes for m in metrics)


def prefixes_of(request: Request, tree: TokenTree) -> list[Prefix]:
    """The tokens that lead to each node, its own and the request's included, behind a number of the adapter if any."""
    start = [] if request.lora is None else [int.from_bytes(request.lora.digest, "big")]
    prefixes: list[Prefix] = []
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        prefixes.append((*(prefixes[parent] if node else [*start, *request.tokens[:-1]]), token))
    return prefixes


@contextmanager
def altered_logits(llm: LLM, change: Callable[[Request, TokenTree, Tensor], object]) -> Iterator[None]:
    """Let `change(request, tree, logits)` write into the logits of every request's rows, or fail, in each round.

    The host takes all steps of these rounds, because native ones keep their logits to themselves.
    """
    original = llm.engine.runner.logits

    def logits(requests: Sequence[Request], trees: Sequence[TokenTree]) -> Tensor:
        result = original(requests, trees)
        parts = torch.split(result, [len(tree) for tree in trees])
        for request, tree, part in zip(requests, trees, parts, strict=True):
            change(request, tree, part)
        return result

    with mock.patch.object(llm.engine.runner, "logits", logits), by_the_host(llm):
        yield


@contextmanager
def recorded(llm: LLM) -> Iterator[tuple[dict[Prefix, Tensor], list[Prefix]]]:
    """Collect logits by prefix while the block runs."""
    logits: dict[Prefix, Tensor] = {}
    unequal: list[Prefix] = []

    def record(request: Request, tree: TokenTree, rows: Tensor) -> None:
        for prefix, row in zip(prefixes_of(request, tree), rows.clone(), strict=True):
            if not torch.equal(logits.setdefault(prefix, row), row):
                unequal.append(prefix)

    with altered_logits(llm, record):
        yield logits, unequal


def run(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: SamplingParams | list[SamplingParams],
    spec: SpecConfig | str = "off",
) -> Run:
    """Generate and record."""
    with recorded(llm) as (logits, unequal):
        outputs = llm.generate(prompts, params, spec=spec)
    llm.engine.check_integrity()
    return Run(list(prompts), tokens_of(outputs), logits, unequal, outputs)


def differences(plain: Run, tree: Run) -> list[str]:
    """Where `tree` departs from `plain`, a line each; empty where tokens and bits are the same."""
    found = [
        f"prompt {i}: {a} and {b}" for i, (a, b) in enumerate(zip(plain.tokens, tree.tokens, strict=True)) if a != b
    ]
    common = plain.logits.keys() & tree.logits.keys()
    found += [f"logits after {len(p)} tokens" for p in common if not torch.equal(plain.logits[p], tree.logits[p])]
    found += [f"logits after {len(p)} tokens, computed twice" for p in [*plain.unequal, *tree.unequal]]
    for prompt, sequence in zip(plain.prompts, plain.sequences, strict=True):
        ends = [end for end in range(len(prompt), len(sequence)) if tuple(sequence[:end]) not in common]
        found += [f"the true prefix of {end} tokens was never scored" for end in ends]  # as a root or an accepted node
    return found


def assert_exact(llm: LLM, plain: Run, spec: SpecConfig | str, params: list[SamplingParams] | None = None) -> Run:
    """Asserts that an engine has the tokens and bits of a run of plain decoding, by default greedy; returns its own."""
    tree = run(llm, plain.prompts, params or greedy(len(plain.tokens[0])), spec)
    assert not (found := differences(plain, tree)), (spec, found[:10])
    return tree


def assert_every_node_exact(llm: LLM, spec: SpecConfig) -> None:
    """Asserts that all nodes, rejected ones too, have the bits of their path decoded plainly, as a prompt."""
    tree = run(llm, random_prompts((61, 120)), greedy(8), spec)
    plain = run(llm, [list(prefix) for prefix in tree.logits], greedy(1), "off")
    assert len(plain.logits) > 80
    assert not [len(p) for p in plain.logits if not torch.equal(plain.logits[p], tree.logits[p])]
    assert not differences(plain, plain)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch's threads while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
