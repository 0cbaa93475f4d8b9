"""A lock between processes, for work that one of them does and the others wait for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger("treespec")


@contextmanager
def shared_work(path: Path, waiting_for: str, patience: float) -> Iterator[bool]:
    """Hold the lock of `path` while the block runs; says in the log that it waits for another process, or thread.

    The kernel releases the lock of a process that dies, however it dies. Where locks cannot be had (a file system
    without them, a folder that cannot be written), and where the holder takes longer than `patience`, the block runs
    without the lock, as the log says: its work must then be safe beside another's.

    Args:
        path: of the lock file; its folder exists. The file stays.
        waiting_for: what another process is doing, such as "compile decoder_cpu".
        patience: seconds to wait at most.

    Yields:
        whether the lock is held.
    """
    lock = FileLock(path, thread_local=False)
    held = False
    try:
        try:
            lock.acquire(timeout=0)
            held = True
        except Timeout:
            logger.warning("waiting for another process to %s (%s)", waiting_for, path)
            lock.acquire(timeout=patience)
            held = True
    except Timeout:
        logger.warning(
            "another process has taken more than %.0f s to %s: not waiting any longer", patience, waiting_for
        )
    except (OSError, NotImplementedError) as error:
        logger.warning("%s cannot be locked (%s): processes that start together may all %s", path, error, waiting_for)
    try:
        yield held
    finally:
        if held:
            lock.release()
