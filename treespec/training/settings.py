"""Settings of a training run."""

from dataclasses import dataclass, fields

from treespec.errors import ConfigError
from treespec.training.sizing import WIDTH_STEP

LEAST_ROWS = 64  # of a draft's vocabulary
HEADS = ("eagle3", "dflash")  # kinds of draft heads that can be trained
OF_SSMS = (
    "ssms",
    "specialise",
    "texts",
    "generalist",
    "start",
    "layers",
    "hidden",
)  # settings that do not apply to heads


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a run, which a resumed run must not change.

    Attributes:
        target: folder, GGUF file or hub id.
        data: files and folders; none with `lessons`.
        lessons: the `out` of an earlier run of the same target, whose lessons are used instead of new ones.
        texts: files and folders with raw text that the generalist is pre-trained on.
        ssms: number of drafts.
        minutes: of lessons and training together; None if `tokens` is given.
        tokens: generated tokens of the lessons; training then makes `EPOCHS` passes over them per draft.
        specialise: "errors" clusters lessons by what a generalist gets wrong, "folders" by the data's groups.
        generalist: also train a draft on all lessons, for as long as each of the others, to compare them with.
        start: folder of a trained draft of this target that the drafts start from, instead of the target's layers. They
            have its size.
        layers, hidden, vocabulary: of a draft; None chooses them from this machine's costs.
        max_tokens: of a lesson.
        seed: of everything.
        head: kind of the draft head that is trained instead of SSMs, one of `HEADS`; None for SSMs.
    """

    target: str
    data: tuple[str, ...]
    lessons: str | None = None
    texts: tuple[str, ...] = ()
    ssms: int = 3
    minutes: float | None = 60.0
    tokens: int | None = None
    specialise: str = "errors"
    generalist: bool = False
    start: str | None = None
    layers: int | None = None
    hidden: int | None = None
    vocabulary: int | None = None
    max_tokens: int = 160
    seed: int = 0
    head: str | None = None

    def check(self) -> None:
        """Raise ConfigError for values out of range."""
        if bool(self.data) == (self.lessons is not None):
            raise ConfigError("give data, or lessons of an earlier run, one of them")
        if not 1 <= self.ssms <= 8:
            raise ConfigError(f"ssms={self.ssms}; valid: 1 to 8")
        if self.generalist and self.ssms == 1:
            raise ConfigError("ssms=1 is a generalist; give more SSMs, or leave generalist out")
        if (self.minutes is None) == (self.tokens is None):
            raise ConfigError("give minutes or tokens, one of them")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"minutes={self.minutes}; valid: more than 0")
        if self.tokens is not None and self.tokens < 1:
            raise ConfigError(f"tokens={self.tokens}; valid: at least 1")
        if self.specialise not in ("errors", "folders"):
            raise ConfigError(f"specialise={self.specialise!r}; valid: 'errors', 'folders'")
        if self.max_tokens < 2:
            raise ConfigError(f"max_tokens={self.max_tokens}; valid: at least 2")
        if self.head not in (None, *HEADS):
            raise ConfigError(f"head={self.head!r}; valid: {', '.join(map(repr, HEADS))}")
        others = {option.name: option.default for option in fields(self) if option.name in OF_SSMS}
        changed = [name for name, default in others.items() if getattr(self, name) != default]
        if self.head is not None and changed:
            raise ConfigError(f"{changed[0]} is for SSMs; leave it out to train a head")
        if self.start is not None and (self.layers, self.hidden, self.vocabulary) != (None, None, None):
            raise ConfigError("a start has its own layers, width and vocabulary; leave them out")
        if self.hidden is not None and (self.hidden < WIDTH_STEP or self.hidden % WIDTH_STEP):
            raise ConfigError(f"hidden={self.hidden}; valid: multiples of {WIDTH_STEP}")
        if self.layers is not None and self.layers < 1:
            raise ConfigError(f"layers={self.layers}; valid: at least 1")
        if self.vocabulary is not None and self.vocabulary < LEAST_ROWS:
            raise ConfigError(f"vocabulary={self.vocabulary}; valid: at least {LEAST_ROWS} rows")
