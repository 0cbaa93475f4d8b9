"""Ctrl-C handling of the command line: exit code 130 without a traceback, from the first import on.

During imports, Ctrl-C exits immediately, because extension modules (including torch's) swallow a KeyboardInterrupt
raised in their own imports and continue half-initialised. Afterwards, commands get KeyboardInterrupt and can clean up.
"""

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # 128 + SIGINT, as in shells


def exit_on_interrupt() -> None:
    """Make Ctrl-C exit the process immediately. An ignored SIGINT (nohup) stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_now)


def raise_on_interrupt() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again, after all modules are imported."""
    if signal.getsignal(signal.SIGINT) is _exit_now:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit_now(number: int, frame: FrameType | None) -> None:
    if sys.stderr is not None:
        print_interrupted()
    os._exit(INTERRUPTED)


def exit_interrupted() -> NoReturn:
    """Exit after a reported Ctrl-C, once other threads (of a compiler) have cleaned up, or after two seconds."""
    if signal.getsignal(signal.SIGINT) in (_exit_now, signal.default_int_handler):
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    current, end = threading.current_thread(), time.monotonic() + 2
    # Polled, because a thread that is still starting cannot be joined.
    while any(thread is not current and not thread.daemon for thread in threading.enumerate()):
        if time.monotonic() > end:  # sys.exit would wait for the threads
            os._exit(INTERRUPTED)
        time.sleep(0.01)
    sys.exit(INTERRUPTED)


def print_interrupted() -> None:
    """Print "interrupted" to stderr, on a new line after the terminal's ^C."""
    print("\ninterrupted" if sys.stderr.isatty() else "interrupted", file=sys.stderr, flush=True)
