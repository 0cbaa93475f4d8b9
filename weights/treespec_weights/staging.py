"""Create folders atomically: write under a temporary name, then rename."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from treespec_weights.draft_vocabulary import FILE as RANKS
from treespec_weights.errors import OptionError, WriteError
from treespec_weights.files import file_inside
from treespec_weights.state_projection import FILE as STATES
from treespec_weights.writer import Shard, is_written, write_index, write_shard

SUFFIX = ".partial"
_CARRIED = (".json", ".jinja", ".txt", ".md", ".model")


def resolve_destination(destination: Path | str, source: Path) -> Path:
    """Return the absolute path of a folder to create from `source`, in an existing, resolved parent.

    Raises OptionError if the destination exists and is not empty, or is inside of the source; FileNotFoundError or
    NotADirectoryError if its parent is not a folder.
    """
    if not os.fspath(destination):
        raise OptionError("the destination is empty; name a new folder")
    path = Path(os.path.abspath(destination))
    parent = Path(os.path.realpath(path.parent))
    if not parent.exists():
        raise FileNotFoundError(f"no such folder: {str(parent)!r}; cannot create {path.name!r} in it")
    if not parent.is_dir():
        raise NotADirectoryError(f"{str(parent)!r} is a file; cannot create {path.name!r} in it")
    path = parent / path.name
    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir() or any(path.iterdir())):
        raise OptionError(f"{str(destination)!r} exists already; name a new folder")
    if path.is_relative_to(source):
        raise OptionError(f"{str(destination)!r} is in {str(source)!r}; name a folder outside of it")
    return path


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise WriteError if the disk has less than `num_bytes` bytes free."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < num_bytes:
        message = f"{num_bytes / 1e9:.2f} GB needed, {free_bytes / 1e9:.2f} GB free"
        raise WriteError.of(folder, "file", folder.name, message)


def write_shards(
    folder: Path,
    shards: Sequence[Shard],
    tensors: Callable[[Shard], Iterable[Tensor]],  # returns the values of a shard's outputs, as for `write_shard`
    on_bytes: Callable[[int, int], None] | None,  # called with the bytes written so far and the total
) -> list[str]:
    """Write the files that do not exist yet, and the index. Returns the names of those that did."""
    resumed = [shard.file for shard in shards if is_written(folder, shard)]
    total = sum(shard.tensor_bytes for shard in shards)
    done = sum(shard.tensor_bytes for shard in shards if shard.file in resumed)
    check_room(folder, total - done)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if on_bytes:
            on_bytes(done, total)

    for shard in shards:
        if shard.file not in resumed:
            write_shard(folder, shard, tensors(shard), advance)
    write_index(folder, shards)
    return resumed


def partial_of(place: Path) -> Path:
    """Return the temporary folder for the contents of `place`, a result of `resolve_destination`."""
    return place.parent / f"{place.name}{SUFFIX}"


def create_partial(partial: Path, remedy: str) -> None:
    """Create a temporary folder. Raises OptionError, which names the remedy, if it exists, and WriteError."""
    try:
        partial.mkdir()
    except FileExistsError:
        raise OptionError(f"{str(partial)!r} already exists{remedy}") from None
    except OSError as error:
        raise WriteError.of(partial, "file", partial.name, f"cannot create it: {error.strerror}") from error


@contextmanager
def staged(place: Path) -> Iterator[Path]:
    """Yield a temporary folder, renamed to `place` (of `resolve_destination`) at the end or removed on an error.

    Raises OptionError if the temporary folder exists, left by a killed process or in use by a running one; WriteError
    if it cannot be created or renamed.
    """
    partial = partial_of(place)
    create_partial(partial, "; if no other process is writing it, delete it")
    try:
        yield partial
        publish(partial, place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def publish(partial: Path, place: Path) -> None:
    """Rename a finished folder to its destination. Raises WriteError if the destination exists by now."""
    try:
        os.replace(partial, place)  # replaces an empty folder, never a non-empty one
    except OSError as error:
        raise WriteError.of(place, "file", place.name, f"cannot be renamed: {error.strerror}") from error


def carried_files(source: Path, *written: str) -> list[str]:
    """Return the files to copy along with a checkpoint's weights: tokenizer, draft vocabulary, licence, model card.

    Files named `written` are those of the caller. Raises CheckpointError for a link to a file outside of the folder.
    """
    if source.is_file():
        return []  # a GGUF file has no others
    names = sorted(entry.name for entry in source.iterdir() if entry.is_file())
    carried = [
        name
        for name in names
        if name not in written and not name.startswith(".") and not name.endswith(".index.json")
        if Path(name).suffix in _CARRIED
        or name in (RANKS, STATES)
        or name.upper().startswith(("LICENSE", "LICENCE", "NOTICE"))
    ]
    for name in carried:  # fail before anything is written
        file_inside(source, name)
    return carried


def copy_files(source: Path, names: list[str], folder: Path) -> None:
    """Copy files, following links as `file_inside` allows. Raises CheckpointError and WriteError."""
    for name in names:
        path = file_inside(source, name)
        try:
            shutil.copyfile(path, folder / name)
        except OSError as error:
            raise WriteError.of(folder, "file", name, f"cannot be copied: {error.strerror}") from error
