"""What a benchmark's measurements count: rounds, accepted tokens and seconds, of our engine and of transformers."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.gguf_files import write_gguf
from tests.helpers.models import (
    VOCAB,
    OracleDrafter,
    greedy,
    make_llama,
    open_llm,
    random_prompts,
    reduce_vocabulary,
    tiny,
    tokens_of,
)
from treespec import SpecConfig
from treespec.bench.measure import Run, Sample, interleave, run_ours, sampling_seed
from treespec.bench.modes import Peer
from treespec.bench.peers import Transformers
from treespec.bench.report import acceptance_by_depth_of


def test_acceptance_of_an_oracle() -> None:
    assert acceptance_by_depth_of(Counter({3: 1, 0: 1, 1: 1, 2: 1})) == [0.75, 0.5, 0.25]
    target, _ = tiny()
    prompts = random_prompts([6, 11])
    plain = open_llm(target).generate(prompts, greedy(16), spec="off")
    truths = [output.prompt_token_ids + output.outputs[0].token_ids for output in plain]
    llm = open_llm(target, [OracleDrafter(truths, depth=3)])
    run = {"tree": lambda batch, seeds: run_ours(llm, SpecConfig(nodes=16), batch, 16)}
    [sample] = interleave(run, prompts, batch=1, repeats=1)["tree"]
    assert sample.tokens == tokens_of(plain)
    assert sample.passes == [4, 4] and sample.rounds == 8 and sample.decoded == 32
    assert sample.accepted == {3: 8} and acceptance_by_depth_of(sample.accepted) == [1.0, 1.0, 1.0]
    assert sample.accepted_by_source["oracle"] == 24
    assert interleave(run, prompts, batch=2, repeats=1)["tree"][0].rounds == 4


@pytest.mark.slow
def test_every_batch_is_decoded_by_every_mode_in_turn() -> None:
    """With the same seeds in every mode, and others in every repeat."""
    ran: list[tuple[str, list[int]]] = []

    def mode(name: str) -> Run:
        def run(prompts: Sequence[list[int]], seeds: Sequence[int]) -> Sample:
            ran.append((name, list(seeds)))
            return Sample(tokens=list(prompts), decoded=len(prompts), nodes=1, stages={"draft": 1.0})

        return run

    samples = interleave({name: mode(name) for name in "abc"}, [[1], [2], [3]], batch=2, repeats=2, seed=5)
    assert [len(seeds) for _, seeds in ran] == [2, 2, 2, 1, 1, 1] * 2
    assert ["".join(name for name, _ in ran[i : i + 3]) for i in range(0, 12, 3)] == ["abc", "bca", "cab", "abc"]
    by_mode = [[seed for name, seeds in ran if name == each for seed in seeds] for each in "abc"]
    assert by_mode[0] == by_mode[1] == by_mode[2] and len(set(by_mode[0])) == 6
    assert by_mode[0][0] == sampling_seed(5, 0, 0) and by_mode[0][-1] == sampling_seed(5, 1, 2)
    for sample in samples["b"]:
        assert sample.tokens == [[1], [2], [3]]
        assert (sample.decoded, sample.nodes, sample.stages) == (3, 2, {"draft": 2})


@pytest.mark.slow
def test_transformers_reads_gguf_targets_and_reduced_drafts(tmp_path: Path) -> None:
    target = make_llama(tmp_path / "target", 0)
    file = write_gguf(tmp_path / "target.gguf", target)
    known = np.array([*range(0, VOCAB, 2), -1])
    draft = reduce_vocabulary(tmp_path / "draft", target, known)
    peers = Transformers(file, {"ssm": draft}, torch.device("cpu"), torch.float32)
    prompts = random_prompts((5, 9))
    plain = [peers.run(Peer("hf-plain", "plain", "plain"), 24, [prompt]) for prompt in prompts]
    assisted = [peers.run(Peer("hf-assisted", "assisted", "assisted", "ssm", 3), 24, [prompt]) for prompt in prompts]
    assert [sample.tokens for sample in assisted] == [sample.tokens for sample in plain]
    # The draft is the target on half of the tokens, so it predicts all of these.
    accepted = sum(24 - sample.passes[0] for sample in assisted)
    assert accepted > 0 and all(sample.passes == [24] for sample in plain)
