"""What failed, in full: a document keeps one line of it, and `errors.log` beside it the rest.

One file for everything: it is to be sent and read as a whole.
"""

import faulthandler
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

NAME = "errors.log"


def note(out: Path, heading: str, text: str) -> None:
    """Append what is known of a failure to the log of a folder of results."""
    with section(out, heading) as log:
        log.write(text.rstrip() + "\n")


def note_stacks(out: Path, heading: str) -> None:
    """Append where every thread of this process stands."""
    with section(out, heading) as log:
        faulthandler.dump_traceback(log)


@contextmanager
def section(out: Path, heading: str, name: str = NAME) -> Iterator[TextIO]:
    """What is appended under a heading and the time."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / name).open("a", encoding="utf-8") as log:
        log.write(f"\n=== {heading}, {datetime.now(UTC).isoformat(timespec='seconds')}\n")
        log.flush()  # faulthandler writes past Python's buffer
        yield log


def trace(error: BaseException) -> str:
    """The whole traceback, with the notes of the error: what another process said of it."""
    return "".join(traceback.format_exception(error))


def last_line(error: BaseException) -> str:
    """The last line of a traceback, and where it was raised; of a long message the first line."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text[:400]} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text[:400]
