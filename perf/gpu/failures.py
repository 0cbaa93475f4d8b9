"""Full failure reports in `errors.log`; documents keep one line each.

They are in a single file, which can be sent and read as a whole.
"""

import faulthandler
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

NAME = "errors.log"
MAX_BYTES = 4 << 20  # of the log, of which then the last half is kept


def note(out: Path, heading: str, text: str) -> None:
    """Append a failure to the log of a results folder."""
    with section(out, heading) as log:
        log.write(text.rstrip() + "\n")


def note_stacks(out: Path, heading: str) -> None:
    """Append the stacks of all threads."""
    with section(out, heading) as log:
        faulthandler.dump_traceback(log)


@contextmanager
def section(out: Path, heading: str, name: str = NAME) -> Iterator[TextIO]:
    """Open the log to append under a heading with the time."""
    out.mkdir(parents=True, exist_ok=True)
    _shorten(out / name)
    with (out / name).open("a", encoding="utf-8") as log:
        log.write(f"\n=== {heading}, {datetime.now(UTC).isoformat(timespec='seconds')}\n")
        log.flush()  # faulthandler bypasses Python's buffer
        yield log


def _shorten(path: Path) -> None:
    if path.exists() and path.stat().st_size > MAX_BYTES:
        path.write_bytes(path.read_bytes()[-MAX_BYTES // 2 :])


def trace(error: BaseException) -> str:
    """Return the whole traceback, including notes from other processes."""
    return "".join(traceback.format_exception(error))


def last_line(error: BaseException) -> str:
    """Return the last line of a traceback with its location; of a long message, only the first line."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text[:400]} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text[:400]
