"""Folders that are there whole or not at all: written beside their place, renamed at the end."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treespec_weights.errors import OptionError, Problem, WriteError
from treespec_weights.files import file_inside

SUFFIX = ".partial"
_CARRIED = (".json", ".jinja", ".txt", ".md", ".model")


def free_place(destination: Path | str, source: Path) -> Path:
    """The absolute path of a folder that is to be made; its parent exists and is resolved.

    Args:
        destination: where.
        source: a result of `resolve_folder`: what the folder is made of.

    Raises OptionError where something is there already (an empty folder does not count) or that lies in the source,
    FileNotFoundError or NotADirectoryError where the parent is no folder.
    """
    if not os.fspath(destination):
        raise OptionError("the destination is empty; name a new folder")
    path = Path(os.path.abspath(destination))
    parent = Path(os.path.realpath(path.parent))
    if not parent.exists():
        raise FileNotFoundError(f"no such folder: {str(parent)!r}; {path.name!r} was to be made in it")
    if not parent.is_dir():
        raise NotADirectoryError(f"{str(parent)!r} is a file; {path.name!r} was to be made in it")
    path = parent / path.name
    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir() or any(path.iterdir())):
        raise OptionError(f"{str(destination)!r} exists already; name a new folder")
    if path.is_relative_to(source):
        raise OptionError(f"{str(destination)!r} lies in {str(source)!r}; name a folder outside of it")
    return path


def check_room(folder: Path, needed: int) -> None:
    """Raises WriteError where a disk has less than `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        message = f"{needed / 1e9:.2f} GB are to be written, and {free / 1e9:.2f} GB are free"
        raise WriteError(folder, [Problem("file", repr(folder.name), message)])


def partial_of(place: Path) -> Path:
    """The folder in which the contents of `place`, a result of `free_place`, are put together."""
    return place.parent / f"{place.name}{SUFFIX}"


@contextmanager
def staged(place: Path) -> Iterator[Path]:
    """A new folder beside `place`, a result of `free_place`; it becomes `place` at the end, and is removed on an error.

    Raises OptionError where the folder is there already, of a process that was killed or is at work. WriteError where
    it cannot be made or renamed.
    """
    partial = partial_of(place)
    try:
        partial.mkdir()
    except FileExistsError:
        raise OptionError(
            f"{str(partial)!r} is there already: left over, or another process is writing it; delete it if none is"
        ) from None
    except OSError as error:
        raise WriteError(partial, [Problem("file", repr(partial.name), f"cannot be made: {error.strerror}")]) from error
    try:
        yield partial
        publish(partial, place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def publish(partial: Path, place: Path) -> None:
    """Renames a finished folder to its place. Raises WriteError where that has been taken meanwhile."""
    try:
        os.replace(partial, place)  # over an empty folder too; never over one that holds something
    except OSError as error:
        raise WriteError(place, [Problem("file", repr(place.name), f"cannot be renamed: {error.strerror}")]) from error


def carried_files(source: Path, *written: str) -> list[str]:
    """The files of a checkpoint folder that go along with its weights: tokenizer, generation config, licence, card.

    Args:
        source: a result of `resolve_folder`.
        written: names that the caller writes itself.

    Raises CheckpointError for a link that leads outside.
    """
    names = sorted(entry.name for entry in source.iterdir() if entry.is_file())
    carried = [
        name
        for name in names
        if name not in written and not name.startswith(".") and not name.endswith(".index.json")
        if Path(name).suffix in _CARRIED or name.upper().startswith(("LICENSE", "LICENCE", "NOTICE"))
    ]
    for name in carried:  # now, not when everything else is written
        file_inside(source, name)
    return carried


def copy_files(source: Path, names: list[str], folder: Path) -> None:
    """Copies files, following links as `file_inside` allows. Raises CheckpointError, and WriteError."""
    for name in names:
        path = file_inside(source, name)
        try:
            shutil.copyfile(path, folder / name)
        except OSError as error:
            raise WriteError(folder, [Problem("file", repr(name), f"cannot be copied: {error.strerror}")]) from error
