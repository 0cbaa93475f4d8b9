"""Compiled libraries, which all tests share: each is built once, by whichever process needs it first."""

from pathlib import Path

from treespec.startup.load_models import libraries_folder

LIBRARIES = libraries_folder()


def share_libraries(cache_folder: Path) -> Path:
    """Let a cache folder of a test's own hold the shared libraries; returns it."""
    LIBRARIES.mkdir(parents=True, exist_ok=True)
    cache_folder.mkdir(parents=True, exist_ok=True)
    (cache_folder / "compiled").symlink_to(LIBRARIES, target_is_directory=True)
    return cache_folder
