"""A tiny model that speaks: a byte-level tokenizer trained on the spot, and targets that say what a test wants."""

import argparse
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor

from tests.helpers.exactness import altered_logits, prefixes_of
from tests.helpers.models import VOCAB, OracleDrafter, drafting_by, new_folder, open_llm, tiny
from tests.helpers.tokenizers_made import renumber
from treespec import LLM
from treespec.request import Request
from treespec.tree import TokenTree
from treespec_weights.documents import read_config
from treespec_weights.draft_vocabulary import rank_tokens

END = "<|end|>"


def add_tokenizer(folder: Path, vocab: int = VOCAB, salt: str = "") -> Path:
    """Train a byte-level BPE of `vocab` tokens, the end token first, into a model's folder."""
    text = Path(argparse.__file__).read_text().splitlines()
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([salt * 500, *text], vocab_size=vocab, special_tokens=[END], show_progress=False)
    assert tokenizer.get_vocab_size() == vocab
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def rank_half(folder: Path) -> list[int]:
    """Give a target a tokenizer with ids in no order; returns the half of its tokens that cut heads keep, ascending."""
    renumber(add_tokenizer(folder), np.random.default_rng(0).permutation(VOCAB))
    config = read_config(folder)
    ranked = rank_tokens(folder, [config["eos_token_id"]])
    return sorted(ranked[ranked < config["vocab_size"]][: config["vocab_size"] // 2].tolist())


@functools.cache
def speaking_folder() -> Path:
    """`tiny`'s target with a tokenizer."""
    folder = new_folder("speaking") / "target"
    shutil.copytree(tiny()[0], folder)
    return add_tokenizer(folder)


@functools.cache
def speaking_llm(ssms: int = 2, **options: Any) -> LLM:
    """An engine over the speaking target; its drafts have no tokenizer of their own."""
    return open_llm(speaking_folder(), tiny()[1][:ssms], **options)


@contextmanager
def scripted(llm: LLM, sequences: Sequence[Sequence[int]], depth: int = 8) -> Iterator[OracleDrafter]:
    """While the block runs the target goes on as the sequences do, and an oracle drafts them `depth` deep.

    The passes are computed all the same; only the choices are put in their place. Off the sequences, and past their
    end, the target says something else.
    """
    continuation = {tuple(sequence[:end]): sequence[end] for sequence in sequences for end in range(1, len(sequence))}

    def choose(request: Request, tree: TokenTree, logits: Tensor) -> None:
        for prefix, row in zip(prefixes_of(request, tree), logits, strict=True):
            row[continuation.get(prefix, 1 + (prefix[-1] * 7 + len(prefix)) % (VOCAB - 1))] = 2 * row.abs().max() + 1

    oracle = OracleDrafter(sequences, depth)
    with altered_logits(llm, choose), drafting_by(llm, oracle):
        yield oracle


@contextmanager
def making_requests(llm: LLM, **changes: Any) -> Iterator[None]:
    """Make requests with other parts of the engine's factory while the block runs."""
    with mock.patch.object(llm, "request_factory", replace(llm.request_factory, **changes)):
        yield


@contextmanager
def around_steps(llm: LLM, around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Run every step of the engine inside a context of its own while the block runs."""
    original = llm.engine.step

    def step() -> list[Request]:
        with around():
            return original()

    with mock.patch.object(llm.engine, "step", step):
        yield


@contextmanager
def checked(llm: LLM) -> Iterator[list[list[str]]]:
    """Check the engine after each step while the block runs; collects the running requests of every step."""
    running: list[list[str]] = []

    @contextmanager
    def step() -> Iterator[None]:
        yield
        llm.engine.check_integrity()
        running.append([request.request_id for request in llm.engine.scheduler.running])

    with around_steps(llm, step):
        yield running
