"""Build backend: setuptools, with editable installs that type checkers and editors can read.

The packages lie in several folders, and for such a layout setuptools installs an import hook, which only a running
interpreter understands. Here an editable install is a .pth file that names one folder, `.editable`, which links to the
packages and to nothing else: with the repository's root on `sys.path` its `tests`, `perf` and `kernels` would be
importable as well.
"""

import base64
import hashlib
import os
import sys
import tempfile
import zipfile
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # the other hooks are setuptools' own

ROOT = Path(__file__).resolve().parents[1]
LINKS = ROOT / ".editable"
PACKAGES = ("treespec", "kernels/treespec_kernels", "weights/treespec_weights")
WHEEL = "Wheel-Version: 1.0\nGenerator: treespec build_backend\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def build_editable(
    wheel_directory: str, config_settings: dict[str, object] | None = None, metadata_directory: str | None = None
) -> str:
    """Write an editable wheel (PEP 660) and return its name. Without symbolic links it is setuptools' own."""
    try:
        _link_packages()
    except OSError as error:  # Windows without developer mode
        print(f"no symbolic links here ({error}): type checkers will not find the packages", file=sys.stderr)
        return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    with tempfile.TemporaryDirectory() as folder:
        if metadata_directory is None:
            metadata_directory = str(Path(folder, build_meta.prepare_metadata_for_build_editable(folder)))
        dist_info = Path(metadata_directory)
        files = {
            path.relative_to(dist_info.parent).as_posix(): path.read_bytes()
            for path in sorted(dist_info.rglob("*"))
            if path.is_file()
        }
    stem = dist_info.name.removesuffix(".dist-info")
    files[f"{dist_info.name}/WHEEL"] = WHEEL.encode()
    files[f"__editable__.{stem}.pth"] = f"{LINKS}\n".encode()
    files[f"{dist_info.name}/RECORD"] = _record(files, f"{dist_info.name}/RECORD")
    name = f"{stem}-0.editable-py3-none-any.whl"
    with zipfile.ZipFile(Path(wheel_directory, name), "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
    return name


def _link_packages() -> None:
    LINKS.mkdir(exist_ok=True)
    for package in PACKAGES:
        link = LINKS / Path(package).name
        target = os.path.join("..", *package.split("/"))  # relative, so that a moved or copied clone keeps working
        if not (link.is_symlink() and os.readlink(link) == target):
            link.unlink(missing_ok=True)
            link.symlink_to(target, target_is_directory=True)


def _record(files: dict[str, bytes], own_name: str) -> bytes:
    """The wheel's RECORD: path, hash and size of each file."""
    lines = []
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(content)}")
    return "\n".join([*lines, f"{own_name},,", ""]).encode()
