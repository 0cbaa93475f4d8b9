"""Lessons: the target's continuations of training prompts, with its most likely next tokens at every position."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from treespec.errors import RequestError, TreespecError
from treespec.llm import LLM, new_requests
from treespec.planning.round_costs import CostCurve
from treespec.request import Request
from treespec.sampling.logprobs import LogprobRows
from treespec.sampling_params import SamplingParams
from treespec.text.chat import Message
from treespec.text.prompt_files import encode_prompt
from treespec.text.training_prompts import SYNTHETIC, TrainingPrompt, user_turn
from treespec.utils.files import replacing

TOP = 16  # most likely tokens stored per position
PER_SHARD = 16  # prompts in each of the first shards
GROWTH = 16  # number of shards after which shards grow by this number of prompts
BATCHES = (16, 32, 64)  # candidate numbers of prompts to continue at once
GOOD_RATE = 0.9  # minimum share of the best candidate's tokens per second
RAW_TOKENS = (16, 96)  # length of the beginning of a raw text to continue
MAX_PROMPT_TOKENS = 384
MAX_TURN_TOKENS = 128  # maximum tokens of a prompt that the target writes itself
TURN_TEMPERATURES = (0.6, 1.0)  # 97 % and 86 % of SmolLM2's questions end at these temperatures
_NO_LOGPROBS = np.empty((0, 2 + 2 * TOP), dtype=np.int32)


@dataclass(frozen=True)
class Lessons:
    """Token sequences with the target's distribution at each position of its own output."""

    tokens: np.ndarray  # int32 [total tokens], concatenated sequences
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


class _Continuation(NamedTuple):
    prompt: list[int]
    tokens: list[int]
    logprobs: np.ndarray  # `LogprobRows.packed` by token
    error: TreespecError | None

    @classmethod
    def of(cls, request: Request) -> "_Continuation":
        rows = [_NO_LOGPROBS, *(request.packed_logprobs or ())]
        tokens = request.output_token_ids
        return cls(request.prompt_token_ids, tokens, np.concatenate(rows)[: len(tokens)], request.error)


class LessonWriter:
    """Continues prompts with an engine, by up to `max_tokens` tokens each, and writes the results in shards.

    For a share `synthetic` of the lessons, the target writes the prompt itself, as a user's turn of its chat template;
    turns without an end or equal to earlier ones are skipped. A shard depends only on the prompts, the seed and its
    number: interrupted runs continue with the next shard, and every shard has the bits of an uninterrupted run. `batch`
    prompts are continued at once; when a prompt ends, one of the next shard takes its place.
    """

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[TrainingPrompt],
        folder: Path,
        max_tokens: int,
        seed: int,
        synthetic: float = 0.0,
        per_shard: int = PER_SHARD,  # prompts in each of the first shards
    ):
        self.llm, self.prompts, self.folder, self.max_tokens, self.seed = llm, prompts, folder, max_tokens, seed
        self.per_shard = per_shard
        self.batch = best_batch(llm.engine.host.planner.costs.curve, llm.config.max_num_seqs)
        self._synthetic = synthetic
        self._turn = user_turn(llm.get_tokenizer()) if synthetic else ([], 0)
        self._order = np.random.default_rng((seed, 0)).permutation(len(prompts))
        self._next = 0  # next prompt to start, counted over all shards
        self._running: dict[int, Request] = {}
        self._asking: dict[int, Request] = {}  # requests that write prompts
        self._ended: dict[int, _Continuation | None] = {}  # not in a shard yet; None for lessons without a prompt
        self._seen: set[bytes] = set()  # synthetic prompts of all shards so far

    def write(self, number: int, on_pass: Callable[[int], bool] = lambda tokens: True) -> int:
        """Write a shard and return its number of generated tokens. Call it with ascending numbers.

        `on_pass` is called after every target pass with the number of tokens that are not in a shard yet. If it returns
        False, the shard becomes the last one, with all of these tokens. If it raises, they are lost.
        """
        shard, rounds, goes_on = prompts_of_shard(number, self.per_shard), self.llm.rounds, True
        self._next = max(self._next, shard.start)
        if number and self._synthetic and not self._seen:
            self._seen = synthetic_prompts(Lessons.load([shard_path(self.folder, n)]) for n in range(number))
        rounds.check_threads()
        while goes_on and not all(i in self._ended for i in shard):
            with rounds.turn():
                while len(self._running) + len(self._asking) < self.batch and self._next < shard.stop + self.batch:
                    self._begin(self._next)
                    self._next += 1
                rounds.step()
                self._take([i for i, request in self._running.items() if request.finished])
                for i in [i for i, request in self._asking.items() if request.finished]:
                    self._answer(i, self._asking.pop(i))
            ended = sum(len(output.tokens) for output in self._ended.values() if output is not None)
            goes_on = on_pass(ended + sum(request.num_generated for request in self._running.values()))
        if not goes_on:
            with self.llm.between_rounds():
                self._take([i for i, request in self._running.items() if request.num_generated])
        entries = [(i, self._ended.pop(i)) for i in (shard if goes_on else sorted(self._ended))]
        fresh = [(output, self._group(i)) for i, output in entries if output is not None and self._is_new(i, output)]
        lessons = _collect(fresh)
        lessons.save(shard_path(self.folder, number))
        return int(lessons.generated.sum())

    def _take(self, prompts: Sequence[int]) -> None:
        """End the requests of these prompts, and keep their outputs."""
        for i in prompts:
            request = self._running.pop(i)
            self.llm.rounds.end([request])
            self._ended[i] = _Continuation.of(request)

    def close(self) -> None:
        with self.llm.rounds.turn():
            self.llm.rounds.end([*self._running.values(), *self._asking.values()])

    def _num_synthetic(self, i: int) -> int:
        """Return how many of the first `i` lessons have synthetic prompts."""
        return int(i * self._synthetic)

    def _is_synthetic(self, i: int) -> bool:
        return self._num_synthetic(i + 1) > self._num_synthetic(i)

    def _group(self, i: int) -> str:
        return SYNTHETIC if self._is_synthetic(i) else self._prompt(i).group

    def _prompt(self, i: int) -> TrainingPrompt:
        return self.prompts[self._order[(i - self._num_synthetic(i)) % len(self.prompts)]]

    def _begin(self, i: int) -> None:
        """Start a lesson: the request that writes its prompt, or the one that continues it."""
        rng = np.random.default_rng((self.seed, 1, i))
        if not self._is_synthetic(i):
            self._continue(i, self._encode(self._prompt(i).content, rng), rng)
            return
        params = SamplingParams(
            temperature=float(rng.uniform(*TURN_TEMPERATURES)),
            seed=int(rng.integers(2**31)),
            max_tokens=MAX_TURN_TOKENS,
            stop_token_ids=[self._turn[1]],
        )
        self._start(i, self._turn[0], params, self._asking)

    def _answer(self, i: int, turn: Request) -> None:
        """Continue a prompt written by a request, if the prompt has an end."""
        self.llm.rounds.end([turn])
        [output] = self.llm.request_factory.output([turn]).outputs
        if output.finish_reason == "stop" and (text := (output.text or "").strip()):
            rng, content = np.random.default_rng((self.seed, 5, i)), list[Message]([{"role": "user", "content": text}])
            self._continue(i, self._encode(content, rng), rng)
        else:
            self._ended[i] = None

    def _continue(self, i: int, tokens: list[int], rng: np.random.Generator) -> None:
        """Start the continuation of a prompt.

        Every other prompt is continued greedily, the others at the target's own temperature. After the last prompt,
        prompts repeat with other beginnings and seeds, and with greedy and sampled prompts exchanged.
        """
        if self._is_synthetic(i):
            is_sampled = self._num_synthetic(i) % 2
        else:
            repeats, prompt_index = divmod(i - self._num_synthetic(i), len(self.prompts))
            is_sampled = (prompt_index + repeats) % 2
        temperature = self.llm.get_default_sampling_params().temperature or 0.7
        params = SamplingParams(
            temperature=temperature if is_sampled else 0.0,
            seed=int(rng.integers(2**31)),
            max_tokens=self.max_tokens,
            logprobs=TOP,
            detokenize=False,
        )
        self._start(i, tokens, params, self._running)

    def _start(self, i: int, tokens: list[int], params: SamplingParams, running: dict[int, Request]) -> None:
        ((request,),) = new_requests(self.llm, [{"prompt_token_ids": tokens}], params, "off", None, None)
        if request.error is not None:
            self._ended[i] = _Continuation.of(request)
            return
        request.packed_logprobs = []
        self.llm.engine.scheduler.add(request)
        running[i] = request

    def _is_new(self, i: int, continuation: _Continuation) -> bool:
        """Return whether a lesson's prompt differs from all earlier synthetic prompts, and record it."""
        prompt = np.array(continuation.prompt, dtype=np.int32).tobytes()
        is_known = self._is_synthetic(i) and prompt in self._seen
        self._seen.add(prompt)
        return not is_known

    def _encode(self, content: str | list[int] | list[Message], rng: np.random.Generator) -> list[int]:
        """Return a prompt's tokens: a random-length beginning of a raw text, or the end of any other content."""
        tokens = encode_prompt(self.llm.get_tokenizer(), content)
        if isinstance(content, str):
            return tokens[: int(rng.integers(*RAW_TOKENS))]
        length = self.llm.config.max_model_len
        return tokens[-min(MAX_PROMPT_TOKENS, max(length - self.max_tokens, length // 2)) :]


def prompts_of_shard(number: int, per_shard: int = PER_SHARD) -> range:
    """Return the prompts of a shard, counted over all shards.

    The first shards are small, since a killed run loses the shard being written; later ones grow, to keep the number of
    files in the hundreds.
    """
    sizes = per_shard * (1 + np.arange(number + 1) // GROWTH)
    return range(int(sizes[:-1].sum()), int(sizes.sum()))


def synthetic_prompts(shards: Iterable[Lessons]) -> set[bytes]:
    """Return the synthetic prompts of some lessons, as the bytes of their tokens."""
    prompts = set[bytes]()
    for lessons in shards:
        for i in np.flatnonzero(lessons.groups == SYNTHETIC):
            start = lessons.starts[i]
            prompts.add(lessons.tokens[start : start + lessons.firsts[i]].tobytes())
    return prompts


def best_batch(curve: CostCurve, max_batch: int) -> int:
    """Return the smallest number of requests whose passes decode nearly the maximum tokens per second."""
    batches = [batch for batch in BATCHES if batch <= max_batch] or [max_batch]
    rates = [batch / float(curve.verify(batch)) for batch in batches]
    return next(batch for batch, rate in zip(batches, rates, strict=True) if rate >= GOOD_RATE * max(rates))


def _collect(continuations: Sequence[tuple[_Continuation, str]]) -> Lessons:
    """Convert continuations and their groups to lessons; skip failed ones."""
    succeeded = [(output, group) for output, group in continuations if output.error is None]
    if not succeeded:
        reason = continuations[0][0].error if continuations else "the target wrote no new prompt that ends; give data"
        raise RequestError(f"no prompt of the shard could be continued: {reason}")
    sequences = [output.prompt + output.tokens for output, _ in succeeded]
    rows = LogprobRows.unpacked(np.concatenate([output.logprobs for output, _ in succeeded]))
    return Lessons(
        np.array([token for sequence in sequences for token in sequence], dtype=np.int32),
        np.concatenate([[0], np.cumsum([len(sequence) for sequence in sequences])]),
        np.array([len(output.prompt) for output, _ in succeeded]),
        rows.tokens.numpy().astype(np.int32),
        rows.values.numpy().astype(np.float16),
        np.array([group for _, group in succeeded]),
    )
