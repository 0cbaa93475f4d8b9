"""Lessons: the target's continuations of training prompts, with its most likely next tokens at every position."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treespec.errors import RequestError
from treespec.llm import LLM
from treespec.outputs import RequestOutput
from treespec.sampling_params import SamplingParams
from treespec.text.prompt_files import encode_prompt
from treespec.training.files import replacing
from treespec.training.prompts import TrainingPrompt

TOP = 16  # most likely tokens stored per position
PER_SHARD = 128  # prompts of a shard
RAW_TOKENS = (16, 96)  # length of the beginning of a raw text that is continued
MAX_PROMPT_TOKENS = 384


@dataclass(frozen=True)
class Lessons:
    """Token sequences with the target's distribution after every position of its own output."""

    tokens: np.ndarray  # int32 [total tokens], all sequences concatenated
    starts: np.ndarray  # int64 [count + 1], bounds of the sequences
    firsts: np.ndarray  # int64 [count], index within a sequence of the first generated token
    # top_ids, top_logprobs: int32 and float16 [total generated tokens, TOP], most likely first, by generated token
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    groups: np.ndarray  # str [count]

    def __len__(self) -> int:
        return len(self.firsts)

    @property
    def generated(self) -> np.ndarray:
        """int64 [count], number of generated tokens of each sequence."""
        return np.diff(self.starts) - self.firsts

    @property
    def targets(self) -> np.ndarray:
        """int64 [count + 1], bounds of the sequences in `top_ids`."""
        return np.concatenate([[0], np.cumsum(self.generated)])

    def save(self, path: Path) -> None:
        """Write one shard atomically."""
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **vars(self))

    @classmethod
    def load(cls, paths: Sequence[Path]) -> "Lessons":
        """Read and concatenate shards."""
        shards = []
        for path in paths:
            with np.load(path) as file:
                shards.append(cls(**{name: file[name] for name in cls.__dataclass_fields__}))
        return cls.concatenate(shards)

    @classmethod
    def concatenate(cls, shards: Sequence["Lessons"]) -> "Lessons":
        lengths = np.concatenate([np.diff(shard.starts) for shard in shards])
        joined = {name: np.concatenate([getattr(shard, name) for shard in shards]) for name in cls.__dataclass_fields__}
        return cls(**joined | {"starts": np.concatenate([[0], np.cumsum(lengths)])})

    def select(self, indices: np.ndarray) -> "Lessons":
        targets = self.targets
        pieces = [slice(self.starts[i], self.starts[i + 1]) for i in indices]
        rows = [slice(targets[i], targets[i + 1]) for i in indices]
        return Lessons(
            np.concatenate([self.tokens[piece] for piece in pieces]),
            np.concatenate([[0], np.cumsum([piece.stop - piece.start for piece in pieces])]),
            self.firsts[indices],
            np.concatenate([self.top_ids[row] for row in rows]),
            np.concatenate([self.top_logprobs[row] for row in rows]),
            self.groups[indices],
        )


def shard_path(folder: Path, number: int) -> Path:
    """Return the path of a shard, numbered from 0."""
    return folder / f"lessons-{number:05}.npz"


class LessonWriter:
    """Lets an engine continue prompts, by up to `max_tokens` each, and writes the results in shards.

    A shard depends only on the prompts, the seed and its number: interrupted runs continue at the next shard, and
    every shard has the bits of an uninterrupted run.
    """

    def __init__(self, llm: LLM, prompts: Sequence[TrainingPrompt], folder: Path, max_tokens: int, seed: int):
        self.llm, self.prompts, self.folder, self.max_tokens, self.seed = llm, prompts, folder, max_tokens, seed
        self._order = np.random.default_rng((seed, 0)).permutation(len(prompts))

    def write(self, number: int) -> int:
        """Write a shard and return its number of generated tokens.

        Every other prompt is continued greedily, the rest at the target's own temperature. After the last prompt they
        repeat, with other beginnings and seeds and the two ways exchanged.
        """
        rng = np.random.default_rng((self.seed, 1, number))
        repeats, indices = np.divmod(np.arange(PER_SHARD) + number * PER_SHARD, len(self.prompts))
        prompts = [self.prompts[i] for i in self._order[indices]]
        tokens = [self._encode(prompt, rng) for prompt in prompts]
        common: dict[str, Any] = {"max_tokens": self.max_tokens, "logprobs": TOP, "detokenize": False}
        temperature = self.llm.get_default_sampling_params().temperature or 0.7
        params = [
            SamplingParams(temperature=temperature if sampled else 0.0, seed=int(rng.integers(2**31)), **common)
            for sampled in (indices + repeats) % 2
        ]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in tokens], params, spec="off")
        lessons = _collect(outputs, [prompt.group for prompt in prompts])
        lessons.save(shard_path(self.folder, number))
        return int(lessons.generated.sum())

    def _encode(self, prompt: TrainingPrompt, rng: np.random.Generator) -> list[int]:
        """Return a prompt's tokens: the beginning of a raw text, of random length, and the end of anything else."""
        tokens = encode_prompt(self.llm.get_tokenizer(), prompt.content)
        if isinstance(prompt.content, str):
            return tokens[: int(rng.integers(*RAW_TOKENS))]
        return tokens[-min(MAX_PROMPT_TOKENS, self.llm.config.max_model_len // 2) :]


def _collect(outputs: Sequence[RequestOutput], groups: Sequence[str]) -> Lessons:
    """Convert outputs with log-probabilities to lessons; failed ones are left out."""
    kept = [(output, group) for output, group in zip(outputs, groups, strict=True) if output.error is None]
    if not kept:
        raise RequestError(f"no prompt of the shard could be continued: {outputs[0].error}")
    sequences = [output.prompt_token_ids + output.outputs[0].token_ids for output, _ in kept]
    positions = [position for output, _ in kept for position in output.outputs[0].logprobs or ()]
    rows = [sorted(((-entry.logprob, token) for token, entry in position.items()))[:TOP] for position in positions]
    return Lessons(
        np.array([token for sequence in sequences for token in sequence], dtype=np.int32),
        np.concatenate([[0], np.cumsum([len(sequence) for sequence in sequences])]),
        np.array([len(output.prompt_token_ids) for output, _ in kept]),
        np.array([[token for _, token in row] for row in rows], dtype=np.int32).reshape(-1, TOP),
        np.array([[-minus for minus, _ in row] for row in rows], dtype=np.float16).reshape(-1, TOP),
        np.array([group for _, group in kept]),
    )
