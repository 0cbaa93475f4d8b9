"""Settings of a training run, from which `train_drafts` and the flags of `treespec train` are generated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from treespec.errors import ConfigError
from treespec.utils.options import check_values, option

LEAST_ROWS = 64  # minimum rows of a draft's vocabulary
WIDTH_STEP = 64
HEADS = ("state-ssm", "dflash")  # kinds of drafts that read the target's states
_OF_SSMS = ("ssms", "specialise", "texts", "generalist")  # do not apply to heads
_OF_MODELS = ("start", "layers", "hidden")  # do not apply to "dflash"
_OF_CALL = ("out", "table", "device", "resume")  # settings that may change when a run is resumed


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a run. A resumed run must repeat all but `out`, `table`, `device` and `resume`.

    Args:
        target: a folder, a GGUF file or a hub id.
        data: texts like those that the target will continue: UTF-8 files, or JSON lines with messages, prompt or text,
            or folders of them; none with `lessons`. A text's group is its subfolder, or its entry's kind. Optional for
            a chat model.
        out: folder of the drafts ssm-1, ssm-2 and so on.
        synthetic: share of the lessons whose prompts the target writes itself with its chat template, 0 to 1. Defaults
            to 1 without data, else to 0.5, or to 0 for a target without a chat template.
        lessons: the `out` of an earlier run of the same target, whose lessons are used instead of new ones.
        texts: files and folders with raw text to pre-train on by next-token prediction, without target passes.
        ssms: number of drafts, 1 to 8, or 0 with `table`.
        table: also count the lessons into an n-gram table, OUT/table, a model-free draft source. Can be added when a
            run is resumed.
        minutes: time for lessons and training; 60 if neither `minutes` nor `tokens` is given.
        tokens: number of tokens that the target writes as lessons, instead of `minutes`; reproducible. Training then
            makes 6 passes over them per draft.
        specialise: "errors" clusters lessons by what a generalist gets wrong, "folders" by the data's groups.
        generalist: also train a draft on all lessons for as long as each SSM, for comparison.
        start: a trained draft of this target to initialise the drafts from, instead of the target's layers. They keep
            its size and its tokens, add tokens that the lessons need, and end as an average with the draft if that
            agrees more with held-out lessons.
        layers: number of layers of a draft; None chooses by measured costs.
        hidden: width of a draft, a multiple of 64; None is the target's, or less by measured costs.
        vocabulary: maximum rows of a draft's vocabulary; None chooses by measured costs.
        max_tokens: maximum tokens of a lesson.
        head: kind of draft to train instead of SSMs, which reads the target's states: "state-ssm" or "dflash".
        seed: random seed of the whole run.
        device: "auto", "cpu" or "cuda".
        resume: continue the run in `out`.
    """

    target: str | Path
    data: Sequence[str | Path]
    out: str | Path
    _: KW_ONLY
    lessons: str | Path | None = None
    texts: Sequence[str | Path] = ()
    ssms: int = option(3, ge=0, le=8)
    table: bool = False
    minutes: float | None = None
    tokens: int | None = option(None, ge=1)
    specialise: str = option("errors", choices=("errors", "folders"))
    generalist: bool = False
    start: str | Path | None = None
    layers: int | None = option(None, ge=1)
    hidden: int | None = None
    vocabulary: int | None = option(None, ge=LEAST_ROWS)
    max_tokens: int = option(160, ge=2)
    synthetic: float | None = option(None, ge=0.0, le=1.0)
    head: str | None = option(None, choices=HEADS)
    seed: int = option(0, ge=0, le=2**64 - 1)
    device: str = "auto"
    resume: bool = False

    def __post_init__(self) -> None:
        if self.minutes is None and self.tokens is None:
            object.__setattr__(self, "minutes", 60.0)

    def stored(self) -> dict[str, Any]:
        """Return the settings that a resumed run must not change, as JSON values."""
        values = {name: value for name, value in asdict(self).items() if name not in _OF_CALL}
        document: dict[str, Any] = json.loads(json.dumps(values, default=str))
        return document

    def check(self) -> None:
        """Raise ConfigError for values out of range."""
        check_values(self)
        if self.lessons is not None and (self.data or self.synthetic is not None):
            raise ConfigError("lessons=... replaces new lessons; omit data and synthetic")
        if not self.data and self.lessons is None and self.synthetic not in (None, 1):
            raise ConfigError(f"synthetic={self.synthetic} without data; pass data, or omit synthetic")
        if not self.ssms and (self.generalist or self.start is not None or not self.table):
            raise ConfigError("ssms=0 trains nothing; pass table without generalist and start, or more SSMs")
        if self.generalist and self.ssms == 1:
            raise ConfigError("ssms=1 is already a generalist; choose more SSMs, or omit generalist")
        if self.minutes is not None and self.tokens is not None:
            raise ConfigError("minutes and tokens exclude each other; pass one of them")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"minutes={self.minutes}; valid: more than 0")
        defaults = {info.name: info.default for info in fields(self)}
        of_others = _OF_SSMS + (_OF_MODELS if self.head == "dflash" else ())
        changed = [name for name in of_others if getattr(self, name) != defaults[name]]
        if self.head is not None and changed:
            raise ConfigError(f"{changed[0]} does not apply to head={self.head!r}; omit it")
        if self.start is not None and (self.layers, self.hidden) != (None, None):
            raise ConfigError("start=... determines layers and width; omit them")
        if self.hidden is not None and (self.hidden < WIDTH_STEP or self.hidden % WIDTH_STEP):
            raise ConfigError(f"hidden={self.hidden}; valid: multiples of {WIDTH_STEP}")
