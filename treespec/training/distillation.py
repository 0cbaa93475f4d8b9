"""Distillation of drafts from lessons, in the draft's own vocabulary."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treespec.training.draft_vocabulary import rows_of_tokens
from treespec.training.lessons import Lessons
from treespec.training.loop import StepLoss, mixed_precision
from treespec.training.target_states import TargetStates

WINDOW = 320  # tokens of a training row
STEP_TOKENS = 2048  # generated tokens per step
BATCH_ROWS = 8  # lessons padded to a common length
ARGMAX_SHARE = 0.3  # weight of the cross-entropy to the target's most likely token


@dataclass(frozen=True)
class LessonBatch:
    """A batch of lessons, padded at the end."""

    tokens: Tensor  # int64 [rows, length], target token ids
    inputs: Tensor  # int64 [rows, length], draft rows of the tokens
    positions: Tensor  # int64 [targets, 2], row and position predicting each target
    ids: Tensor  # int64 [targets, TOP], draft rows of the target's top tokens; the last row for unknown tokens
    probs: Tensor  # float32 [targets, TOP], the target's probabilities; 0 for unknown tokens
    # for heads, returns the target's states at the tokens, bfloat16 [rows, length, layers * hidden]
    read_states: Callable[[], Tensor] | None = field(default=None, kw_only=True)

    def select(self, targets: Tensor) -> "LessonBatch":
        """Return the batch with only these targets, by index or mask."""
        return replace(self, positions=self.positions[targets], ids=self.ids[targets], probs=self.probs[targets])


Prediction = tuple[Tensor, LessonBatch]
"""Logits, float32 [targets, rows], and the batch restricted to these targets."""


class Curriculum:
    """Random selection of each step's lessons with given odds. It depends only on the seed and the step.

    A step has about `STEP_TOKENS` generated tokens. `window_lengths`, int64 [lessons], are the tokens per lesson in a
    batch.
    """

    def __init__(self, lessons: Lessons, target_ids: np.ndarray, target_size: int, seed: int, device: torch.device):
        self.lessons, self.seed, self.device = lessons, seed, device
        self._rows = rows_of_tokens(target_ids, target_size)
        self._ids = self._rows[lessons.top_ids]
        self._probs = np.where(self._ids < len(target_ids) - 1, np.exp(lessons.top_logprobs.astype(np.float32)), 0.0)
        self._targets, lengths = lessons.targets, np.diff(lessons.starts)
        self._cuts = np.maximum(np.minimum(lengths - WINDOW, lessons.firsts - 1), 0)
        self.window_lengths = np.minimum(lengths - self._cuts, WINDOW) - 1
        self.count = max(round(STEP_TOKENS / max(float(lessons.generated.mean()), 1.0)), 1)
        self.odds = np.full(len(lessons), 1 / len(lessons))
        self._states: TargetStates | None = None

    def read_states(self, target: Any, layers: Sequence[int], file: Path) -> None:
        """Let all batches read the states of these layers of the target, until `close`."""
        self._states = TargetStates(target, layers, self.window_lengths, self.device, file)

    def close(self) -> None:
        if self._states is not None:
            self._states.close()

    def with_odds(self, odds: np.ndarray) -> "Curriculum":
        """Return a curriculum over the same lessons with other probabilities, float64 [lessons]."""
        result = copy.copy(self)
        result.odds = odds
        return result

    def batches(self, step: int) -> list[LessonBatch]:
        """Return a step's lessons in batches of similar length, to save padding."""
        indices = np.random.default_rng((self.seed, 2, step)).choice(len(self.lessons), self.count, p=self.odds)
        ordered = indices[np.argsort(np.diff(self.lessons.starts)[indices], kind="stable")]
        return [self.of(group) for group in np.array_split(ordered, -(-len(ordered) // BATCH_ROWS))]

    def of(self, indices: Sequence[int] | np.ndarray) -> LessonBatch:
        """Return these lessons as a batch; long prompts are truncated on the left."""
        lessons, windows, positions, targets = self.lessons, [], [], []
        for row, i in enumerate(indices):
            length, start = int(self.window_lengths[i]), int(lessons.starts[i] + self._cuts[i])
            first = int(lessons.firsts[i] - self._cuts[i])
            count = length + 1 - first
            windows.append(lessons.tokens[start : start + length])
            positions.append(np.stack((np.full(count, row), first - 1 + np.arange(count)), 1))
            targets.append(self._targets[i] + np.arange(count))
        tokens = np.zeros((len(windows), max(map(len, windows))), dtype=np.int64)
        inputs = np.zeros_like(tokens)
        for row, window in enumerate(windows):
            tokens[row, : len(window)], inputs[row, : len(window)] = window, self._rows[window]
        index = np.concatenate(targets)
        arrays = tokens, inputs, np.concatenate(positions), self._ids[index], self._probs[index]
        tensors = [torch.from_numpy(array).to(self.device) for array in arrays]
        read_states = None if self._states is None else partial(self._states.of, indices, tensors[0])
        return LessonBatch(*tensors, read_states=read_states)


def predict(model: Any, batch: LessonBatch, seed: Sequence[int]) -> Iterator[Prediction]:
    """Yield a draft's predictions for a batch, by depth below the verified tokens.

    An SSM has one depth: its logits at all target positions, without the last row, which is for unknown tokens.
    """
    if hasattr(model, "predict"):  # a head
        yield from model.predict(batch, seed)
        return
    with mixed_precision(batch.inputs.device):
        hidden = model.get_decoder()(input_ids=batch.inputs, use_cache=False).last_hidden_state
        logits: Tensor = model.get_output_embeddings()(hidden[batch.positions[:, 0], batch.positions[:, 1]])
    yield logits[:, :-1].float(), batch


def lesson_loss(model: Any, curriculum: Curriculum, step: int) -> StepLoss:
    """Return the loss of a step's lessons: the mean over all predictions, weighted by `decay` to the power of depth."""
    decay = getattr(model, "decay", 1.0)
    total, weight, hits, count = torch.zeros(1, dtype=torch.float32, device=curriculum.device)[0], 0.0, 0.0, 0
    for number, batch in enumerate(curriculum.batches(step)):
        for depth, (logits, targets) in enumerate(predict(model, batch, (curriculum.seed, 5, step, number))):
            total = total + decay**depth * distillation_losses(logits, targets).sum()
            weight += decay**depth * len(logits)
            if depth == 0:
                hits += float((logits.detach().argmax(1) == targets.ids[:, 0]).sum())
                count += len(logits)
    return StepLoss(total / weight, count, hits / count)


def distillation_losses(logits: Tensor, batch: LessonBatch) -> Tensor:
    """Return the loss of each target of a `Prediction`, [targets].

    Cross-entropy to the target's distribution over the draft's vocabulary, plus cross-entropy to its top token.
    """
    top_ids = batch.ids.clamp(max=logits.shape[1] - 1)
    logprobs = logits.gather(1, top_ids) - logits.logsumexp(1, keepdim=True)
    soft = -(batch.probs * logprobs).sum(1)
    argmax_loss = -logprobs[:, 0] * (batch.ids[:, 0] < logits.shape[1])
    return (1 - ARGMAX_SHARE) * soft + ARGMAX_SHARE * argmax_loss


@dataclass(frozen=True)
class Fit:
    """A draft's prediction quality on lessons."""

    hits: np.ndarray  # bool [targets], whether the draft's top token is the target's
    missed: list[np.ndarray]  # for each lesson, draft rows of the target's top tokens that the draft missed

    @property
    def agreement(self) -> float:
        return float(self.hits.mean())


@torch.inference_mode()
def evaluate(model: nn.Module, curriculum: Curriculum) -> Fit:
    """Evaluate a draft's predictions below verified tokens, on all lessons of a curriculum."""
    model.eval()
    hits, missed, count = [], list[np.ndarray](), len(curriculum.lessons)
    for start in range(0, count, BATCH_ROWS):
        batch = curriculum.of(range(start, min(start + BATCH_ROWS, count)))
        logits, targets = next(predict(model, batch, (curriculum.seed, 6, start)))
        rows, first = targets.positions[:, 0].cpu().numpy(), targets.ids[:, 0].cpu().numpy()
        hit = logits.argmax(1).cpu().numpy() == first
        hits.append(hit)
        missed += [first[~hit & (rows == row)] for row in range(len(batch.inputs))]
    return Fit(np.concatenate(hits), missed)
