"""Distil drafts from the target's probabilities on training text, then on its own continuations.

A lesson is a token sequence with the target's most probable next tokens at every position, computed once and shared by
all drafts. Boost-tuning (SpecInfer, arXiv 2305.09781, section 3) trains later drafts with more weight on the positions
where all earlier drafts miss the target's token.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from treespec.runner import Runner
from treespec.training.files import replacing, write_json
from treespec.training.loop import Budget, PauseRequest, Progress, ProgressLog, StepLoss
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_training.data import Mixture
from treespec_training.shapes import logits_of

LENGTH = 256  # tokens per lesson
PROMPT_LENGTHS = (32, 128)
TOP = 32  # 32 of 4,096 tokens have about 97% of the target's probability
TEXT_SHARE = 0.25  # fraction of the lessons' budget spent on text lessons
TEXT_PHASE = 0.3  # fraction of a draft's budget spent on text lessons
TEMPERATURE = 0.7
FIRST_WINDOW = 1_000_000_000  # offset that separates the lessons' windows from the target's training steps


@dataclass(frozen=True)
class Lessons:
    """Sequences with the target's probabilities of each next token.

    tokens: uint16 [count, LENGTH]. top_ids: uint16 [count, LENGTH - 1, TOP], most probable first.
    top_logprobs: float16, same shape. kinds: int64 [count], index of the kind of text that a sequence was cut from.
    """

    tokens: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    kinds: np.ndarray

    @staticmethod
    def load(paths: Sequence[Path]) -> "Lessons":
        """Load and join shards."""
        shards = [np.load(path) for path in paths]
        return Lessons(*(np.concatenate([shard[name] for shard in shards]) for name in Lessons.__annotations__))

    def save(self, path: Path) -> None:
        """Write one shard."""
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **vars(self))


def _top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (ids, logprobs) of the most probable tokens, both [..., TOP]. logits: [..., vocab]."""
    logprobs, ids = logits.float().log_softmax(-1).topk(TOP, dim=-1)
    return ids, logprobs


def _lessons(tokens: Tensor, tops: Sequence[tuple[Tensor, Tensor]], kinds: np.ndarray) -> Lessons:
    ids = torch.cat([top[0] for top in tops], 1)
    logprobs = torch.cat([top[1] for top in tops], 1)
    return Lessons(
        tokens.cpu().numpy().astype(np.uint16),
        ids.cpu().numpy().astype(np.uint16),
        logprobs.cpu().numpy().astype(np.float16),
        kinds,
    )


@torch.inference_mode()
def text_lessons(target: LlamaForCausalLM, windows: Tensor, kinds: np.ndarray) -> Lessons:
    """Create lessons from real text. windows: int64 [count, LENGTH]; kinds: [count]."""
    tops = [_top(target(input_ids=part[:, :-1], use_cache=False).logits) for part in windows.split(16)]
    joined = [(torch.cat([top[0] for top in tops]), torch.cat([top[1] for top in tops]))]
    return _lessons(windows, joined, kinds)


@torch.inference_mode()
def continuation_lessons(
    teacher: Runner, prompts: Tensor, kinds: np.ndarray, length: int, generator: torch.Generator
) -> Lessons:
    """Create lessons by continuing prompts: the first half greedily, the second half at temperature 0.7.

    Args:
        teacher: runs the target, with a cache for all prompts at once.
        prompts: int64 [count, prompt length].
        kinds: [count], kinds of the prompts.
        length: tokens of each result, including the prompt.
        generator: random generator on the model's device.
    """
    target, cache, greedy_rows = teacher.target, teacher.cache, len(prompts) // 2
    names = [f"lesson {row}" for row in range(len(prompts))]
    pages = [cache.reserve(name, length) for name in names]
    tokens = inputs = prompts
    tops = []
    while tokens.shape[1] < length:
        past = tokens.shape[1] - inputs.shape[1]
        rows = [RequestRows.chain(past, inputs.shape[1], own) for own in pages]
        hidden = target.forward(inputs.flatten(), target.plan(rows, cache.pools[0]), cache.pools[0])
        logits = target.logits(hidden[: inputs.numel()]).unflatten(0, inputs.shape)
        tops.append(_top(logits))
        inputs = tops[-1][0][:, -1:, 0].clone()
        probs = (logits[greedy_rows:, -1].float() / TEMPERATURE).softmax(-1)
        inputs[greedy_rows:] = torch.multinomial(probs, 1, generator=generator)
        tokens = torch.cat([tokens, inputs], 1)
    for name in names:
        cache.release(name)
    return _lessons(tokens, tops, kinds)


def make_lessons(
    target: LlamaForCausalLM,
    teacher: Runner,
    text: Mixture,
    folder: Path,
    budget: Budget,
    batch: int,
    pause: PauseRequest,
) -> Progress:
    """Fill `folder` with shards `text-*.npz` and `continued-*.npz` until the budget is spent; resumes by shard.

    Args:
        target, teacher: the same model, to read whole windows and to continue them.
        text: source of the windows.
        folder, budget, pause: destination, time budget and pause request.
        batch: lessons per shard.

    Raises:
        Paused: a signal arrived between two shards.
    """
    device = next(target.parameters()).device
    reader = target.to(torch.bfloat16).eval()
    state_file = folder / "progress.json"
    progress = Progress(**json.loads(state_file.read_text())) if state_file.exists() else Progress()
    log = ProgressLog("lessons", progress, budget)
    while (done := budget.progress(progress.step, progress.elapsed)) < 1:
        pause.check()
        started = time.monotonic()
        shard = progress.step
        cut, kinds = text.windows(FIRST_WINDOW + shard, batch, LENGTH)
        windows = torch.from_numpy(cut).to(device)
        if done < TEXT_SHARE:
            text_lessons(reader, windows, kinds).save(folder / f"text-{shard:04}.npz")
        else:
            rng = np.random.default_rng((text.seed, 1, shard))
            generator = torch.Generator(device).manual_seed(int(rng.integers(2**62)))
            prompts = windows[:, : int(rng.integers(*PROMPT_LENGTHS))]
            lessons = continuation_lessons(teacher, prompts, kinds, LENGTH, generator)
            lessons.save(folder / f"continued-{shard:04}.npz")
        progress.step += 1
        progress.tokens += windows.numel()
        progress.elapsed += time.monotonic() - started
        write_json(state_file, vars(progress))
        log.update(done, progress)
    log.close()
    return progress


def distillation_loss(
    model: nn.Module, tokens: Tensor, top_ids: Tensor, top_logprobs: Tensor, weights: Tensor, argmax_share: float
) -> Tensor:
    """Compute the weighted mean of the cross-entropies to the target's probabilities and to its argmax.

    Args:
        model: the draft.
        tokens: int64 [batch, length + 1].
        top_ids, top_logprobs: the target's most probable next tokens, [batch, length, TOP]; their probabilities are
            renormalised to sum to 1.
        weights: float [batch, length].
        argmax_share: weight of the argmax term in [0, 1].
    """
    logits = logits_of(model, tokens[:, :-1]).float()
    logprobs = logits.gather(-1, top_ids) - logits.logsumexp(-1, keepdim=True)
    soft = -(top_logprobs.softmax(-1) * logprobs).sum(-1)
    loss = (1 - argmax_share) * soft - argmax_share * logprobs[..., 0]
    return (loss * weights).sum() / weights.sum()


@torch.inference_mode()
def missed(drafts: Sequence[LlamaForCausalLM], lessons: Lessons) -> np.ndarray:
    """Return where no draft's top token is the target's: bool [count, LENGTH - 1], all true without drafts."""
    result = np.ones(lessons.top_ids.shape[:2], bool)
    for draft in drafts:
        device = next(draft.parameters()).device
        for start in range(0, len(result), 64):
            tokens = torch.from_numpy(lessons.tokens[start : start + 64, :-1].astype(np.int64)).to(device)
            choice = logits_of(draft, tokens).argmax(-1).cpu().numpy()
            result[start : start + 64] &= choice != lessons.top_ids[start : start + 64, :, 0]
    return result


def _odds(lessons: Lessons, shares: Sequence[float]) -> np.ndarray:
    """Return the probability of drawing each lesson, [count], such that each kind of text gets its share."""
    odds = np.array(shares, float)[lessons.kinds] / np.bincount(lessons.kinds, minlength=len(shares))[lessons.kinds]
    return odds / odds.sum()


class Curriculum:
    """Loss function of a draft for `train`: text lessons first, then the target's continuations.

    Args:
        text, continued: the two kinds of lessons.
        shares: shares of the kinds of text in the drawn lessons, [num kinds].
        earlier: drafts trained before this one.
        hit_weight: weight of positions where an earlier draft has the target's top token; others have weight 1
            (boost-tuning; 1 disables it).
        batch: lessons per step.
        seed: seed; the lessons of a step depend only on (seed, step).
        loss: `distillation_loss` or its compiled form.
    """

    def __init__(
        self,
        text: Lessons,
        continued: Lessons,
        shares: Sequence[float],
        earlier: Sequence[LlamaForCausalLM],
        hit_weight: float,
        batch: int,
        seed: int,
        loss: Callable[..., Tensor] = distillation_loss,
    ) -> None:
        self.phases = [
            (lessons, np.where(missed(earlier, lessons), 1.0, hit_weight).astype(np.float32), _odds(lessons, shares))
            for lessons in (text, continued)
        ]
        self.batch, self.seed, self.loss = batch, seed, loss

    def __call__(self, model: nn.Module, step: int, done: float) -> StepLoss:
        """Return one step's loss."""
        phase = int(done >= TEXT_PHASE)
        lessons, weights, odds = self.phases[phase]
        rows = np.random.default_rng((self.seed, 2, step)).choice(len(odds), self.batch, p=odds)
        device = next(model.parameters()).device
        arrays = (lessons.tokens[rows].astype(np.int64), lessons.top_ids[rows].astype(np.int64))
        tokens, ids = (torch.from_numpy(array).to(device) for array in arrays)
        logprobs = torch.from_numpy(lessons.top_logprobs[rows].astype(np.float32)).to(device)
        weight = torch.from_numpy(weights[rows]).to(device)
        return StepLoss(self.loss(model, tokens, ids, logprobs, weight, 0.5 * phase), weight.numel())
