"""A training run: lessons, a generalist, specialists, and a report."""

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from treespec.drafters.table.stored_table import StoredTable
from treespec.drafters.table.table_drafter import NAME as TABLE
from treespec.drafters.table.table_drafter import TableDrafter
from treespec.errors import ConfigError
from treespec.llm import LLM
from treespec.models.model_config import ModelConfig
from treespec.startup.options import resolve_device, resolve_model
from treespec.text.prompt_files import has_chat_template
from treespec.text.prompt_tokenizer import UserTokenizer, load_tokenizer
from treespec.text.training_prompts import read_training_prompts
from treespec.training import dflash, state_ssm
from treespec.training.distillation import STEP_TOKENS, Curriculum, evaluate, lesson_loss
from treespec.training.draft_vocabulary import choose_vocabulary
from treespec.training.lessons import MAX_PROMPT_TOKENS, PER_SHARD, Lessons, LessonWriter, shard_path
from treespec.training.loop import (
    Budget,
    Paused,
    PauseRequest,
    ProgressLog,
    StepLoss,
    TrainingProgress,
    average_weights,
    train,
)
from treespec.training.report import REPEATS, TrainingReport, measure_drafts
from treespec.training.settings import TrainingSettings
from treespec.training.sizing import LEAST_LAYERS, choose_size, measure_level, most_rows
from treespec.training.specialisation import cluster_errors, cluster_groups, odds_of
from treespec.training.student import make_student, open_model, open_student, read_vocabulary, write_student
from treespec.training.table import count_lessons, table_agreement
from treespec.training.texts import Texts, tokenize_texts
from treespec.utils.files import remove_temporary, replacing, write_json
from treespec.utils.options import takes_options
from treespec_weights import read_config
from treespec_weights.files import resolve_folder

logger = logging.getLogger(__name__)

LESSON_SHARE = 0.4  # share of the time for lessons
GENERALIST_SHARE = 0.6  # share of the training time for the generalist; the rest is for the specialists
HELD_OUT = 0.04  # share of the lessons held out
WATCHED = 64  # held-out lessons evaluated during training
REPORT_PROMPTS = 8
REPORT_SHARE = 0.15  # maximum time for the report, as a share added to the run's time
PEAK_RATE = 2.5e-3
HEAD_RATE = 1e-3  # of the weights that a state SSM has in addition to a trained SSM
RUNNING = 64  # maximum number of lessons written at once
EPOCHS = 6  # passes over the lessons per draft, with `tokens`


class DraftSize(NamedTuple):
    target_ids: np.ndarray  # int64 [rows], see `treespec_weights.draft_vocabulary`
    layers: int
    hidden: int | None  # None for the target's width


class TrainingRun:
    """One training run, stage by stage; every stage resumes from the files in `out/work`.

    `out` receives `ssm-1`, `ssm-2`, ..., `generalist` and `table` if requested, and `report.json`; lessons and
    checkpoints stay in `out/work`. Raises ConfigError if `out` holds a run (pass `resume`) or a run with other
    settings, and ModelError if the target's family is not native.
    """

    def __init__(self, settings: TrainingSettings, pause: PauseRequest):
        settings.check()
        self.settings, self.out, self.pause = settings, (out := Path(settings.out)), pause
        self.work = out / "work"
        self._trained: list[Any] = []  # drafts to keep if the run is interrupted
        self.device = resolve_device(settings.device)
        file = self.work / "settings.json"
        if file.exists() or (out.exists() and any(out.iterdir())):
            if not settings.resume:
                raise ConfigError(f"{out} exists and is not empty; use --resume to continue its run, or another --out")
            if not file.exists():
                raise ConfigError(f"{out} is not empty and holds no run to resume; choose another --out")
            stored, given = json.loads(file.read_text()), settings.stored()
            if other := {name: stored.get(name) for name in given if stored.get(name) != given[name]}:
                raise ConfigError(
                    f"{out} holds a run with other settings: {other}; repeat them, or choose another --out"
                )
        self.config = config = ModelConfig.from_hf(resolve_folder(resolve_model(settings.target)))
        self.target = config.folder  # or a GGUF file
        self.num_layers, self.target_size = config.shape.num_layers, config.shape.vocab_size
        max_positions = min(MAX_PROMPT_TOKENS + settings.max_tokens, config.max_positions)
        # options of every `LLM` of the run
        self.options: dict[str, Any] = {"device": str(self.device), "max_model_len": max_positions}

    @cached_property
    def llm(self) -> LLM:
        """The target without drafts. Large batches are compute-bound, where drafting gains nothing."""
        logger.info("loading %s", self.target)
        return LLM(self.target, drafts=[], max_num_seqs=RUNNING, **self.options)

    def first_layers(self, count: int) -> Any:
        """Return the target's embedding, head and at least the first `count` layers as a transformers model."""
        model, count = self.__dict__.get("_opened"), min(count, self.num_layers)
        if model is None or model.config.num_hidden_layers < count:
            self._opened = model = open_model(self.target, layers=count)
        return model

    def free(self, *names: str) -> None:
        """Drop references to the engine ("llm") or to opened layers ("_opened")."""
        for name in names:
            self.__dict__.pop(name, None)

    def run(self) -> TrainingReport:
        """Run all remaining stages. On a requested stop, write the drafts trained so far to `out` and raise Paused."""
        remove_temporary(self.out)
        lessons = self.make_lessons()
        is_held_out = held_out(len(lessons), self.settings.seed)
        training, evaluated = (lessons.select(np.flatnonzero(part)) for part in (~is_held_out, is_held_out))
        if self.settings.table:
            with replacing(self.out / TABLE) as temporary:
                table = count_lessons(training, self.target_size)
                table.save(temporary)
            logger.info("table: %.1f MB", table.nbytes / 1e6)
        if not self.settings.ssms:
            return self._report([], evaluated, {})
        self.draft = self.choose_draft(lessons)
        curriculum = self.curriculum(training)
        self._watched = self.curriculum(evaluated.select(np.arange(len(evaluated))[:WATCHED]))
        if self.settings.head is not None:
            return self.train_head(curriculum, evaluated)
        try:
            students = self.train_specialists(curriculum, self.train_generalist(curriculum))
        except Paused:
            self.export(self._trained)
            raise
        return self.finish(students, evaluated)

    def earlier_lessons(self, out: Path) -> Lessons:
        """Return the lessons of another run; with `tokens`, only as many shards as needed for them."""
        folder, shards, num_tokens = out / "work" / "lessons", list[Lessons](), 0
        while shard_path(folder, len(shards)).exists() and num_tokens < (self.settings.tokens or math.inf):
            shards.append(Lessons.load([shard_path(folder, len(shards))]))
            num_tokens += int(shards[-1].generated.sum())
        if not shards:
            raise ConfigError(f"{out} has no lessons; pass the output folder of an earlier run")
        lessons = Lessons.concatenate(shards)
        if (largest := int(max(lessons.tokens.max(), lessons.top_ids.max()))) >= self.target_size:
            raise ConfigError(
                f"{out} has lessons of another target: token {largest}, but this target has {self.target_size} tokens"
            )
        self.begin()
        return lessons

    def make_lessons(self) -> Lessons:
        """Write lessons until their share of the budget is spent, and return all of them."""
        settings, folder = self.settings, self.work / "lessons"
        if settings.lessons is not None:
            return self.earlier_lessons(Path(settings.lessons))
        state = self.work / "lessons.json"
        progress = TrainingProgress(**json.loads(state.read_text())) if state.exists() else TrainingProgress()

        share = LESSON_SHARE if settings.ssms else 1.0
        budget = Budget(share * (settings.minutes or 0.0))

        def spent(state: TrainingProgress = progress) -> float:
            if settings.tokens is not None:
                return state.tokens / settings.tokens
            return budget.progress(state.step, state.elapsed)

        if spent() < 1:
            synthetic, paths = self.synthetic, [Path(path) for path in settings.data]
            chat = has_chat_template(self.checked_tokenizer())
            prompts = read_training_prompts(paths, chat) if paths else []
            if not chat and any(isinstance(part, dict) for prompt in prompts for part in prompt.content[:1]):
                names = ", ".join(map(str, paths))
                raise ConfigError(f"{names}: 'messages', but {self.target} has no chat template; pass prompt or text")
            llm = self.llm
            self.begin()
            self.free("_opened")
            writer = LessonWriter(llm, prompts, folder, settings.max_tokens, settings.seed, synthetic, PER_SHARD)
            synthetic_text = f", {synthetic:.0%} written by the target" if synthetic else ""
            log = ProgressLog(f"lessons from {len(prompts)} prompts{synthetic_text}, {writer.batch} at once", progress)
            with closing(writer), closing(log):
                while spent() < 1:
                    began = time.monotonic()

                    def goes_on(tokens: int, began: float = began) -> bool:
                        self.pause.check()
                        elapsed = progress.elapsed + time.monotonic() - began
                        current = replace(progress, tokens=progress.tokens + tokens, elapsed=elapsed)
                        log.update(spent(current), current)
                        return settings.tokens is not None or spent(current) < 1 or not current.step

                    progress.tokens += writer.write(progress.step, goes_on)
                    progress.step += 1
                    progress.elapsed += time.monotonic() - began
                    write_json(state, vars(progress))
        return Lessons.load([shard_path(folder, number) for number in range(progress.step)])

    @property
    def synthetic(self) -> float:
        """The share of synthetic prompts. Raises ConfigError without both data and a chat template."""
        if has_chat_template(self.checked_tokenizer()):
            share = self.settings.synthetic
            return share if share is not None else 0.5 if self.settings.data else 1.0
        if self.settings.synthetic or not self.settings.data:
            raise ConfigError(f"{self.target} has no chat template, so it cannot write prompts itself; give data")
        return 0.0

    def choose_draft(self, lessons: Lessons) -> DraftSize:
        """Choose the drafts' vocabulary, layers and width once, from the lessons and measured passes."""
        settings, file = self.settings, self.work / "vocabulary.npz"
        if not file.exists():
            config = self.first_layers(LEAST_LAYERS + 1).config
            max_rows = settings.vocabulary
            if max_rows is None:
                max_rows = most_rows(int(self.llm.stats()["memory"]["target_weights"]), config.hidden_size)
            self.free("llm")  # frees its memory for the measurements
            required = self.end_tokens
            if settings.start is not None:
                start = resolve_folder(settings.start)
                required = sorted({*required, *read_vocabulary(start, self.target_size)[:-1].tolist()})
            target_ids = choose_vocabulary(lessons, self.target_size, required, max_rows)

            def write(layers: int, hidden: int | None, folder: Path) -> None:
                student = make_student(self.first_layers(layers), layers, hidden, target_ids, self.end_tokens)
                write_student(student, folder, target_ids, self.target_size)

            layers, hidden, rows = 1, None, len(target_ids) - 1
            if settings.start is not None:
                layers = read_config(start)["num_hidden_layers"]
            elif settings.head != "dflash":
                measure = partial(measure_level, self.target, write, self.options)
                layers, hidden = choose_size(measure, config, self.num_layers, settings.layers, settings.hidden)
            if settings.head != "dflash":
                width = hidden or config.hidden_size
                logger.info("drafts of %d layers, width %d, %d of %d tokens", layers, width, rows, self.target_size)
            else:
                logger.info("DFlash draft of %d of %d tokens", rows, self.target_size)
            with replacing(file) as temporary, temporary.open("wb") as stream:
                np.savez(stream, target_ids=target_ids, layers=layers, hidden=hidden or 0)
        with np.load(file) as arrays:
            return DraftSize(arrays["target_ids"], int(arrays["layers"]), int(arrays["hidden"]) or None)

    @cached_property
    def tokenizer(self) -> UserTokenizer | None:
        """The target's tokenizer, or None."""
        stored = load_tokenizer(None, self.target)
        return None if stored is None else UserTokenizer(stored)

    def checked_tokenizer(self) -> Any:
        """Return the target's tokenizer. Raises ConfigError if it has none."""
        if self.tokenizer is None:
            raise ConfigError(f"{self.target} has no tokenizer to encode the data; add tokenizer files there")
        return self.tokenizer.base

    @property
    def end_tokens(self) -> list[int]:
        """End tokens of the target and its tokenizer."""
        ends = *self.config.eos_token_ids, *(() if self.tokenizer is None else self.tokenizer.eos_token_ids)
        return sorted({token for token in ends if token < self.target_size})

    def begin(self) -> None:
        """Unless a run is resumed, check the inputs and store the settings."""
        file = self.work / "settings.json"
        if not file.exists():
            self.check_inputs()
            write_json(file, self.settings.stored())

    def check_inputs(self) -> None:
        """Check before writing lessons that drafts can be made from the target, `start` and the texts."""
        if self.settings.texts:
            logger.info("texts: %d tokens", len(self.text_tokens))
        if self.settings.head == "state-ssm":
            state_ssm.check_target(self.config)
        if self.settings.start is not None:
            read_vocabulary(resolve_folder(self.settings.start), self.target_size)
            return
        if self.settings.head == "dflash":
            dflash.draft_config(self.first_layers(1).config)
            return
        ends = self.end_tokens
        make_student(self.first_layers(1), 1, self.settings.hidden, np.array([*ends, -1]), ends)

    def curriculum(self, lessons: Lessons) -> Curriculum:
        return Curriculum(lessons, self.draft.target_ids, self.target_size, self.settings.seed, self.device)

    def _budget(self, share: float, lessons: Lessons) -> Budget:
        """Return the budget of a stage that has this share of the training."""
        if self.settings.minutes is not None:
            fraction = 1.0 if self.settings.lessons is not None else 1 - LESSON_SHARE
            return Budget(self.settings.minutes * fraction * share)
        drafts = self.settings.ssms if self.settings.head is None else 1
        steps = EPOCHS * drafts * int(lessons.generated.sum()) / STEP_TOKENS
        return Budget(0.0, max(round(steps * share), 4))

    @cached_property
    def text_tokens(self) -> np.ndarray:
        """The tokens of all texts, int32 [tokens]."""
        return tokenize_texts([Path(path) for path in self.settings.texts], self.checked_tokenizer())

    def train_generalist(self, curriculum: Curriculum) -> Any:
        """Train one draft on all lessons, mixed with the texts (if any) as `Texts.is_text_step` decides."""
        texts = None
        if self.settings.texts:
            tokens = self._stored("texts", lambda: self.text_tokens)
            texts = Texts(tokens, self.draft.target_ids, self.target_size, self.settings.seed, self.device)
        model = self._make_student().to(self.device)
        self.free("llm", "_opened")
        self._trained = [model]
        share = GENERALIST_SHARE if self.settings.ssms > 1 else 1.0
        continues = self.settings.start is not None
        start = [parameter.detach().clone() for parameter in model.parameters()] if continues else []
        rate = PEAK_RATE / 2 if continues else PEAK_RATE  # keeps more of the start's knowledge
        self._train("generalist", model, curriculum, self._budget(share, curriculum.lessons), rate, texts)
        if continues:
            average_weights(model, start, self._agreement)
        return model

    def _make_student(self) -> Any:
        torch.manual_seed(self.settings.seed)
        target_ids, layers, hidden = self.draft
        if self.settings.start is None:
            return make_student(self.first_layers(layers), layers, hidden, target_ids, self.end_tokens)
        return open_student(resolve_folder(self.settings.start), target_ids, self.first_layers(1))

    def _train(
        self, name: str, model: Any, curriculum: Curriculum, budget: Budget, rate: float, texts: Texts | None = None
    ) -> None:
        def loss(model: Any, step: int, fraction: float) -> StepLoss:
            if texts is not None and texts.is_text_step(step, fraction):
                return texts.loss(model, step)
            return lesson_loss(model, curriculum, step)

        train(name, model, loss, budget, rate, self.work / f"{name}.ckpt", self.pause, self._agreement)

    def _agreement(self, model: Any) -> float:
        """Return the share of held-out positions whose most likely token the draft predicts."""
        return evaluate(model, self._watched).agreement

    def train_specialists(self, curriculum: Curriculum, generalist: Any) -> list[Any]:
        """Train drafts from the generalist, each mostly on its own cluster of lessons.

        With `generalist`, also train a draft on all lessons for as long.
        """
        settings = self.settings
        if settings.ssms == 1:
            return [generalist]

        def clusters() -> np.ndarray:
            if settings.specialise == "folders":
                return cluster_groups(curriculum.lessons.groups, settings.ssms)
            missed, rows = evaluate(generalist, curriculum).missed, len(self.draft.target_ids)
            return cluster_errors(missed, rows, settings.ssms, settings.seed)

        cluster_of = self._stored("clusters", clusters)
        odds = {f"specialist-{i + 1}": odds_of(cluster_of, i) for i in range(settings.ssms)}
        if settings.generalist:
            odds["generalist-2"] = curriculum.odds
        budget = self._budget((1 - GENERALIST_SHARE) / len(odds), curriculum.lessons)
        students: list[Any] = []
        for name, lesson_odds in odds.items():
            student = type(generalist)(generalist.config).to(self.device)
            student.load_state_dict(generalist.state_dict())
            students.append(student)
            self._trained = students
            self._train(name, student, curriculum.with_odds(lesson_odds), budget, PEAK_RATE / 2)
        return students

    def train_head(self, curriculum: Curriculum, lessons: Lessons) -> TrainingReport:
        """Train a draft that reads the target's states, write it, measure it, and write the report.

        `lessons` are the held-out ones.
        """
        name, start = str(self.settings.head), self.settings.start
        student = self._make_student() if name == "state-ssm" else None
        self.free("llm", "_opened")
        target = open_model(self.target)
        head: Any
        if student is None:
            torch.manual_seed(self.settings.seed)
            layers = dflash.read_layers(self.num_layers)
            head = dflash.make_dflash(target, self.draft.target_ids, len(layers)).to(self.device)
        else:
            layers = state_ssm.read_layers(self.num_layers)
            num_values = len(layers) * self.config.shape.hidden_size
            folder = None if start is None else resolve_folder(start)
            head = state_ssm.StateSsm(student, num_values, self.config.norm_eps, folder).to(self.device)
        held_out = self.curriculum(lessons)
        curricula = {"train": curriculum, "watched": self._watched, "held-out": held_out}
        for label, reader in curricula.items():
            reader.read_states(target, layers, self.work / f"states-{label}.bin")

        def export() -> None:
            with replacing(self.out / name) as temporary:
                head.write(temporary, self.draft.target_ids, target.config)

        rate = HEAD_RATE if start else PEAK_RATE
        try:
            self._train(name, head, curriculum, self._budget(1.0, curriculum.lessons), rate)
        except Paused:
            export()
            raise
        export()
        agreement = {name: evaluate(head, held_out).agreement}
        for reader in curricula.values():
            reader.close()
        return self._report([name], lessons, agreement)

    def _stored(self, name: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
        """Return an array of `work`, computed and stored on first use."""
        file = self.work / f"{name}.npy"
        if not file.exists():
            with replacing(file) as temporary, temporary.open("wb") as stream:
                np.save(stream, compute())
        stored: np.ndarray = np.load(file)
        return stored

    def finish(self, students: Sequence[Any], lessons: Lessons) -> TrainingReport:
        """Write the drafts in descending order of benefit, measure them, and write the report."""
        self.pause.check()
        curriculum = self.curriculum(lessons)
        hits = [evaluate(student, curriculum).hits for student in students]
        count = self.settings.ssms
        order = [*by_benefit(hits[:count]), *range(count, len(hits))]
        names = self.export([students[i] for i in order])
        agreement = {name: float(hits[i].mean()) for name, i in zip(names, order, strict=True)}
        return self._report(names[:count], lessons, agreement)

    def _report(self, names: Sequence[str], lessons: Lessons, agreement: dict[str, float]) -> TrainingReport:
        """Measure the drafts of `out` on held-out prompts, and write the report."""
        prompts = [lessons.tokens[a : a + n].tolist() for a, n in zip(lessons.starts[:-1], lessons.firsts, strict=True)]
        prompts = prompts[:: max(len(prompts) // REPORT_PROMPTS, 1)][:REPORT_PROMPTS]
        if self.settings.table:
            table = TableDrafter(StoredTable.load(self.out / TABLE, self.target_size))
            names, agreement = [TABLE, *names], {TABLE: table_agreement(table, lessons), **agreement}
        folders = [self.out / name for name in names]
        self.free("llm", "_opened")
        seconds = 60 * REPORT_SHARE * (self.settings.minutes or 60.0)
        max_tokens = self.settings.max_tokens
        options, check = self.options, self.pause.check
        report = measure_drafts(self.target, folders, prompts, agreement, max_tokens, options, seconds, check, REPEATS)
        write_json(self.out / "report.json", {"settings": self.settings.stored(), **report.as_dict()})
        return report

    def export(self, students: Sequence[Any]) -> list[str]:
        """Write students to `out/ssm-1`, ..., the generalist last, each atomically, and return the names."""
        names = [f"ssm-{i + 1}" if i < self.settings.ssms else "generalist" for i in range(len(students))]
        for name, student in zip(names, students, strict=True):
            with replacing(self.out / name) as temporary:
                write_student(student, temporary, self.draft.target_ids, self.target_size)
        return names


def held_out(count: int, seed: int) -> np.ndarray:
    """Return a mask of held-out lessons, bool [count]: a share `HELD_OUT`, at least two if there are four."""
    indices = np.random.default_rng((seed, 4)).permutation(count)[: max(round(HELD_OUT * count), min(2, count // 2))]
    return np.isin(np.arange(count), indices)


def by_benefit(hits: Sequence[np.ndarray]) -> list[int]:
    """Order drafts greedily, each by the number of positions that only it hits among the drafts so far."""
    order: list[int] = []
    covered = np.zeros_like(hits[0])
    while len(order) < len(hits):
        remaining = [i for i in range(len(hits)) if i not in order]
        best = max(remaining, key=lambda i: int((hits[i] & ~covered).sum()))
        covered |= hits[best]
        order.append(best)
    return order


@takes_options(TrainingSettings)
def train_drafts(settings: TrainingSettings) -> TrainingReport:
    """Train draft models for a target; see `TrainingSettings` for the arguments.

    Ctrl-C stops after the current step and writes the drafts trained so far to `out`; `resume=True` continues. With
    `tokens`, the same seed gives the same weights on the same machine.

    Returns:
        Acceptance and speed with 0, 1, ... drafts, and the recommended number.

    Raises:
        ConfigError: an invalid argument, or data without text. Paused: stopped by a signal. OSError: a path does not
            exist, or the disk is full. Also the errors of `LLM`.
    """
    pause = PauseRequest()
    with pause.listening():
        return TrainingRun(settings, pause).run()
