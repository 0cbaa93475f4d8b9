"""File lock for work by one process while other processes wait for its result."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger("treespec")


@contextmanager
def shared_work(path: Path, waiting_for: str, patience: float) -> Iterator[bool]:
    """Hold the lock of a file in an existing folder while the block runs; yield whether it is held.

    Logs a warning if it has to wait for another process to do `waiting_for`, such as "compile decoder_cpu". The system
    releases the lock when its process dies. If locking is not possible (a file system without locks, a read-only
    folder), or if the holder takes longer than `patience` seconds, the block runs without the lock, with a warning. Its
    work must be safe to run concurrently.
    """
    lock = FileLock(path, thread_local=False)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.warning("waiting for another process to %s, for at most %.3g s (%s)", waiting_for, patience, path)
            lock.acquire(timeout=patience)
    except Timeout:
        logger.warning("another process took more than %.3g s to %s; not waiting any longer", patience, waiting_for)
    except (OSError, NotImplementedError) as error:
        logger.warning("cannot lock %s (%s); concurrently starting processes may all %s", path, error, waiting_for)
    try:
        yield lock.is_locked
    finally:
        lock.release()
