"""Settings of a training run, from which `train_drafts` and the flags of `treespec train` are generated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from treespec.utils.options import check_values, option

LEAST_ROWS = 64  # of a draft's vocabulary
WIDTH_STEP = 64
HEADS = ("eagle3", "dflash")  # kinds of draft heads that can be trained
_OF_SSMS = ("ssms", "specialise", "texts", "generalist", "start", "layers", "hidden")  # do not apply to heads
_OF_CALL = ("out", "table", "device", "resume")  # may differ where a run is resumed


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a run. A resumed run must have the same, except for `out`, `table`, `device` and `resume`.

    Args:
        target: a folder, a GGUF file or a hub id.
        data: texts like those that the target will continue: UTF-8 files, or JSON lines with messages, prompt or text,
            and folders of them; none with `lessons`. Groups are a folder's subfolders, or an entry's kind. A chat model
            needs none.
        out: folder of the drafts ssm-1, ssm-2 and so on.
        synthetic: share of the lessons whose prompts the target writes itself, 0 to 1, which needs a chat template.
            None is 1 without data, else a half, or 0 for a target without chat template.
        lessons: the `out` of an earlier run of the same target, whose lessons are used instead of new ones.
        texts: files and folders with raw text to pre-train on, by their own next tokens; these need no pass of the
            target.
        ssms: number of drafts, 1 to 8, or 0 with `table`.
        table: also count the lessons into an n-gram table, OUT/table, which drafts without a model. May be given when a
            run is resumed.
        minutes: time for lessons and training; 60 if neither `minutes` nor `tokens` is given.
        tokens: tokens that the target writes as lessons, instead of `minutes`; reproducible. Training then makes 6
            passes over them per draft.
        specialise: "errors" clusters lessons by what a generalist gets wrong, "folders" by the data's groups.
        generalist: also train a draft on all lessons, for as long as each SSM, to compare them with.
        start: a trained draft of this target that the drafts start from, instead of the target's layers. They have its
            size and its tokens, and further ones that the lessons need.
        layers: layers of a draft; None chooses by this machine's costs.
        hidden: width of a draft, a multiple of 64; None is the target's, or less by costs.
        vocabulary: most rows of a draft's vocabulary; None chooses by costs.
        max_tokens: tokens of a lesson.
        head: kind of a draft head that is trained instead of SSMs and reads the target's states: "eagle3", "dflash".
        seed: seed of everything.
        device: "auto", "cpu" or "cuda".
        resume: continue the run in `out`.
    """

    target: str | Path
    data: Sequence[str | Path]
    out: str | Path
    _: KW_ONLY
    lessons: str | Path | None = None
    texts: Sequence[str | Path] = ()
    ssms: int = option(3, least=0, most=8)
    table: bool = False
    minutes: float | None = None
    tokens: int | None = option(None, least=1)
    specialise: str = option("errors", choices=("errors", "folders"))
    generalist: bool = False
    start: str | Path | None = None
    layers: int | None = option(None, least=1)
    hidden: int | None = None
    vocabulary: int | None = option(None, least=LEAST_ROWS)
    max_tokens: int = option(160, least=2)
    synthetic: float | None = option(None, least=0.0, most=1.0)
    head: str | None = option(None, choices=HEADS)
    seed: int = 0
    device: str = "auto"
    resume: bool = False

    def __post_init__(self) -> None:
        if self.minutes is None and self.tokens is None:
            object.__setattr__(self, "minutes", 60.0)

    def stored(self) -> dict[str, Any]:
        """Return what a resumed run must not change, as JSON holds it."""
        values = {name: value for name, value in asdict(self).items() if name not in _OF_CALL}
        document: dict[str, Any] = json.loads(json.dumps(values, default=str))
        return document

    def check(self) -> None:
        """Raise ConfigError for values out of range."""
        from treespec.errors import ConfigError

        check_values(self)
        if self.lessons is not None and (self.data or self.synthetic is not None):
            raise ConfigError("lessons of an earlier run are used instead of new ones; leave data and synthetic out")
        if not self.data and self.lessons is None and self.synthetic not in (None, 1):
            raise ConfigError(f"synthetic={self.synthetic} without data; give data, or leave synthetic out")
        if not self.ssms and (self.generalist or self.start is not None or not self.table):
            raise ConfigError("ssms=0 trains nothing; give table, without generalist and start, or more SSMs")
        if self.generalist and self.ssms == 1:
            raise ConfigError("ssms=1 is a generalist; give more SSMs, or leave generalist out")
        if self.minutes is not None and self.tokens is not None:
            raise ConfigError("give minutes or tokens, one of them")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"minutes={self.minutes}; valid: more than 0")
        defaults = {stated.name: stated.default for stated in fields(self)}
        changed = [name for name in _OF_SSMS if getattr(self, name) != defaults[name]]
        if self.head is not None and changed:
            raise ConfigError(f"{changed[0]} is for SSMs; leave it out to train a head")
        if self.start is not None and (self.layers, self.hidden) != (None, None):
            raise ConfigError("a start has its own layers and width; leave them out")
        if self.hidden is not None and (self.hidden < WIDTH_STEP or self.hidden % WIDTH_STEP):
            raise ConfigError(f"hidden={self.hidden}; valid: multiples of {WIDTH_STEP}")
