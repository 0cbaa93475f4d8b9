"""Ctrl-C in a command: exit code 130 and no traceback, from the first import on.

While modules are imported the process ends at once. A KeyboardInterrupt is no help there: extension modules, torch's
among them, clear exceptions that come from what they import, and go on with a half of it. What a command does
afterwards is interrupted by the exception, so that it can clean up.
"""

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it


def exit_on_interrupt() -> None:
    """Let Ctrl-C end the process without unwinding it. Where SIGINT is ignored, as behind nohup, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_now)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again: modules are imported, work begins."""
    if signal.getsignal(signal.SIGINT) is _exit_now:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit_now(number: int, frame: FrameType | None) -> None:
    if sys.stderr is not None:
        print_interrupted()
    os._exit(INTERRUPTED)


def exit_interrupted() -> NoReturn:
    """End the process after Ctrl-C was reported. Threads, such as those that wait for a compiler, have two seconds to
    clean up; a further Ctrl-C ends it at once."""
    if signal.getsignal(signal.SIGINT) in (_exit_now, signal.default_int_handler):
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    end = time.monotonic() + 2
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    running = [thread for thread in others if not thread.daemon]
    for thread in running:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in running):  # an ordinary exit would wait for them
        os._exit(INTERRUPTED)
    sys.exit(INTERRUPTED)


def print_interrupted() -> None:
    """Tell the user, on a line of its own: a terminal has just echoed ^C."""
    print("\ninterrupted" if sys.stderr.isatty() else "interrupted", file=sys.stderr, flush=True)
