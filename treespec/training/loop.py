"""Training loop of target and drafts: annealed over a time budget, with pause and resume."""

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

from treespec.startup.options import is_slow
from treespec.training.muon import Float32Muon
from treespec.utils.files import replacing

logger = logging.getLogger(__name__)

WARMUP = 0.02
FINAL_RATE = 0.05
SLOW_RATE = 0.05  # learning rate of trained parameters relative to new ones
CHECKPOINT_SECONDS = 120.0
LOG_SECONDS = 30.0
AVERAGED = 1.0, 0.7, 0.5  # shares of the trained weights in an average with those before training


class StepLoss(NamedTuple):
    """Loss of one optimizer step: its mean, the number of tokens, and the accuracy on them, if known."""

    mean: Tensor
    tokens: int
    agreement: float | None = None


# (model, step, fraction of the schedule completed) -> loss
LossFunction = Callable[[nn.Module, int, float], StepLoss]


class Paused(Exception):
    """Raised after a signal requested a stop and all state needed to resume was written."""


class PauseRequest:
    """Flag set by SIGINT or SIGTERM, checked by long loops between steps."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch the two signals and set the flag while the block runs."""
        signals = (signal.SIGINT, signal.SIGTERM)
        previous = [signal.signal(number, self._on_signal) for number in signals]
        try:
            yield
        finally:
            for number, handler in zip(signals, previous, strict=True):
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self.requested = True

    def check(self) -> None:
        """Raise `Paused` if a stop was requested."""
        if self.requested:
            raise Paused


@dataclass(frozen=True)
class Budget:
    """Length of a stage: minutes of training time, or `max_steps` steps if given.

    A stage may be the part of a longer schedule from `start` to `end`, both in [0, 1]. `minutes` and `max_steps` then
    measure the whole schedule.
    """

    minutes: float
    max_steps: int | None = None
    start: float = 0.0
    end: float = 1.0

    def progress(self, step: int, elapsed: float) -> float:
        """Return the completed fraction of the schedule, in [start, end]."""
        fraction = step / self.max_steps if self.max_steps is not None else elapsed / (60 * self.minutes)
        return min(self.end, self.start + fraction)


@dataclass
class TrainingProgress:
    """Counters of a checkpoint: optimizer steps, tokens trained on, seconds of training without pauses."""

    step: int = 0
    tokens: int = 0
    elapsed: float = 0.0


def learning_rate(progress: float, peak: float) -> float:
    """Return the learning rate: linear warm-up over the first 2% of the budget, then linear decay to 5% of the peak."""
    if progress < WARMUP:
        return peak * max(progress / WARMUP, 0.01)
    return peak * (1 - (1 - FINAL_RATE) * (progress - WARMUP) / (1 - WARMUP))


def optimizers_for(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Create the optimizers: Muon for the layers' matrices, AdamW for embedding, head and norms.

    Muon's steps are scaled to AdamW's RMS, so that one learning rate serves both, times a group's "rate":
    `SLOW_RATE` for the `slow_parameters` of a model that has such.
    """
    slow = {id(parameter) for parameter in getattr(model, "slow_parameters", list)()}

    def groups_of(parameters: Iterable[Tensor], **options: float) -> list[dict[str, Any]]:
        """Return a group of the slow parameters, and one of the others, without empty groups."""
        by_rate = {SLOW_RATE: list[Tensor](), 1.0: list[Tensor]()}
        for parameter in parameters:
            by_rate[SLOW_RATE if id(parameter) in slow else 1.0].append(parameter)
        return [{"params": of_rate, "rate": rate, **options} for rate, of_rate in by_rate.items() if of_rate]

    muon = Float32Muon if is_slow(torch.bfloat16, next(model.parameters()).device) else torch.optim.Muon
    ends = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    ends.append(model.get_output_embeddings())  # type: ignore[operator]
    embeddings = list({id(end.weight): end.weight for end in ends}.values())  # only one if they are tied
    matrices = [p for p in model.parameters() if p.ndim == 2 and all(p is not embedding for embedding in embeddings)]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = groups_of(embeddings, weight_decay=0.1) + groups_of(vectors, weight_decay=0.0)
    return [
        muon(groups_of(matrices), lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True),
    ]


def mixed_precision(device: torch.device) -> torch.autocast:
    """Return the context of a training step's passes: bfloat16 autocast, unless bfloat16 is slow on the device."""
    return torch.autocast(device.type, torch.bfloat16, enabled=not is_slow(torch.bfloat16, device))


def save_checkpoint(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], progress: TrainingProgress
) -> None:
    """Write all state of a resumable run.

    Windows and noise depend only on (seed, step), so no generator state is stored.
    """
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": vars(progress),
    }
    with replacing(path) as temporary:
        torch.save(state, temporary)


def load_checkpoint(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> TrainingProgress:
    """Load a checkpoint written by `save_checkpoint` into model and optimizers."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return TrainingProgress(**state["progress"])


def read_progress(path: Path) -> TrainingProgress:
    return TrainingProgress(**torch.load(path, map_location="cpu", weights_only=True, mmap=True)["progress"])


def train(
    name: str,
    model: nn.Module,
    loss_of: LossFunction,
    budget: Budget,
    peak_rate: float,
    checkpoint: Path,
    pause: PauseRequest,
    held_out: Callable[[nn.Module], float] | None = None,
) -> TrainingProgress:
    """Train until the budget is spent, resuming from `checkpoint` if it exists.

    `held_out` returns the agreement on held-out data, which is logged after every checkpoint. Raises Paused if a signal
    arrived; the checkpoint then holds the state after the last complete step.
    """
    optimizers = optimizers_for(model)
    progress = load_checkpoint(checkpoint, model, optimizers) if checkpoint.exists() else TrainingProgress()
    model.train()
    log = ProgressLog(name, progress)
    last_save = time.monotonic()
    while (fraction := budget.progress(progress.step, progress.elapsed)) < budget.end:
        if pause.requested:
            log.close()
            save_checkpoint(checkpoint, model, optimizers, progress)
            raise Paused
        started = time.monotonic()
        rate = learning_rate(fraction, peak_rate)
        loss = loss_of(model, progress.step, fraction)
        loss.mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["rate"]
            optimizer.step()
            optimizer.zero_grad()
        progress.step += 1
        progress.tokens += loss.tokens
        progress.elapsed += time.monotonic() - started
        log.update(fraction, progress, loss)
        if time.monotonic() - last_save > CHECKPOINT_SECONDS:
            save_checkpoint(checkpoint, model, optimizers, progress)
            if held_out is not None:
                log.held_out = held_out(model)
                model.train()
            last_save = time.monotonic()
    save_checkpoint(checkpoint, model, optimizers, progress)
    log.close()
    return progress


def average_weights(model: nn.Module, start: Sequence[Tensor], agreement: Callable[[nn.Module], float]) -> float:
    """Average the trained weights with those before training, `start`, and return the share of the trained ones.

    Training on new lessons forgets some of what earlier ones taught; an average keeps more of both (WiSE-FT, arXiv
    2109.01903). The share is the one of `AVERAGED` with the highest agreement on held-out lessons.
    """
    parameters = [*model.parameters()]
    trained = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def mix(share: float) -> None:
        for parameter, before, after in zip(parameters, start, trained, strict=True):
            parameter.copy_(before.lerp(after, share))

    agreements = dict[float, float]()
    for share in AVERAGED:
        mix(share)
        agreements[share] = agreement(model)
    best = max(AVERAGED, key=agreements.__getitem__)
    mix(best)
    figures = ", ".join(f"{share:.0%}: {value:.3f}" for share, value in agreements.items())
    logger.info("held-out agreement by the share of the new weights in an average with the start: %s", figures)
    return best


class ProgressLog:
    """A progress bar with averages over about 20 steps; if stderr is not a terminal, a line every 30 seconds."""

    def __init__(self, name: str, progress: TrainingProgress) -> None:
        self.held_out: float | None = None
        self._means: dict[str, float] = {}
        self._start = replace(progress)
        is_terminal = sys.stderr.isatty()
        bar_format = "{desc}: {percentage:.1f}% {bar}{postfix}, {remaining} left" + "\n" * (not is_terminal)
        seconds = 1.0 if is_terminal else LOG_SECONDS
        self.bar = tqdm(total=1.0, desc=name, mininterval=seconds, bar_format=bar_format)
        self._is_first = True

    def update(self, fraction: float, progress: TrainingProgress, loss: StepLoss | None = None) -> None:
        """Move the bar to the completed fraction and show the metrics of a training step or of lessons."""
        for name, value in (("loss", loss.mean.item()), ("agreement", loss.agreement)) if loss is not None else ():
            if value is not None:
                self._means[name] = 0.95 * self._means.get(name, value) + 0.05 * value
        rate = (progress.tokens - self._start.tokens) / max(progress.elapsed - self._start.elapsed, 1e-9)
        figures = [f"{progress.tokens} tokens" if loss is None else f"step {progress.step}", f"{rate:.0f} tokens/s"]
        figures += [f"{name} {mean:.3f}" for name, mean in self._means.items()]
        figures += [] if self.held_out is None else [f"held-out {self.held_out:.3f}"]
        self.bar.set_postfix_str(", ".join(figures), refresh=False)
        if self._is_first:  # exclude steps of earlier runs from the speed
            self.bar.initial = self.bar.n = self.bar.last_print_n = min(fraction, 1.0)
            self._is_first = False
        self.bar.update(min(fraction, 1.0) - self.bar.n)

    def close(self) -> None:
        self.bar.close()
