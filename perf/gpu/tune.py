"""Stages `autotune`, `autotune_grown` and `autotune_more`: run `treespec autotune` for some shapes.

The tuned file is copied to the results as `tuned-<device>.json`, from which a later run on another machine installs it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu.models import shape_of_size
from gpu.setting import ROOT, Setting
from gpu.stage import Context, Measurement
from treespec_kernels.tuning.tuned import package_folder, user_folder, writable_folder
from treespec_weights.rules import ModelShape

TUNED = "tuned-"


def measurements(sizes: Sequence[str], setting: Setting) -> Iterator[Measurement]:
    """Yield the tuning of some shapes of `SHAPES`."""
    for name in sizes:
        make, seconds = SHAPES[name]
        options = ["--dtype", str(setting.dtype).removeprefix("torch.")]
        options += ["--budget-seconds", str(1 if setting.dry else seconds)]
        if setting.dry:
            options += ["--ops", "tree_attention", "--nodes", "2", "--context", "20"]
        yield Measurement(name, partial(autotune, [*shape_options(make(setting)), *options]), seconds + 60.0)


def more_measurements(setting: Setting) -> Iterator[Measurement]:
    """Yield the tuning of the smaller shapes, and the cost curves of the embedded models."""
    if not setting.dry:
        yield from measurements(("1B", "grown 1B"), setting)
    budget = [] if setting.dry else ["--budget-seconds", "60"]
    yield Measurement("embedded", partial(autotune, ["--seconds", "0.2" if setting.dry else "5", *budget]), 150.0)


SHAPES: dict[str, tuple[Callable[[Setting], ModelShape], int]] = {
    "8B": (lambda setting: setting.target, 120),
    "grown 8B": (lambda setting: setting.target if setting.dry else shape_of_size("8B"), 90),
    "1B": (lambda setting: setting.small, 60),
    "grown 1B": (lambda setting: shape_of_size("1B"), 60),
}
"""Shapes by name, with seconds for their tuning."""


def modules() -> tuple[str, ...]:
    """Return the modules of the tuning of a shape, which runs in another process."""
    return ("treespec.cli.kernels", "treespec_kernels.tuning.workloads")


def more_modules() -> tuple[str, ...]:
    return ("treespec.cli.autotune",)


def shape_options(shape: ModelShape) -> list[str]:
    """Return the command-line options of a model's shape."""
    sizes = {
        "heads": shape.num_heads,
        "kv-heads": shape.num_kv_heads,
        "head-dim": shape.head_dim,
        "hidden": shape.hidden_size,
        "intermediate": shape.intermediate_size,
        "vocab": shape.vocab_size,
        "layers": shape.num_layers,
    }
    return [part for name, size in sizes.items() for part in (f"--{name}", str(size))]


def autotune(options: Sequence[str], context: Context) -> dict[str, Any]:
    """Run the command and return its JSON.

    Raises:
        RuntimeError: the command failed.
    """
    setting = context.setting
    environment = dict(os.environ)
    paths = [str(ROOT / part) for part in ("", "kernels", "weights")]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "treespec", "autotune", "--json", "--device", setting.device.type, *options]
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        output, errors = child.communicate()
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    if child.returncode != 0:
        failure = RuntimeError(f"{' '.join(command[2:])} ended with {child.returncode}: {_tail(output + errors)}")
        failure.add_note((output + errors)[-20000:])
        raise failure
    document = json.loads(output)
    copied = copy_files(document, setting.out)
    return {"command": " ".join(command[2:]), "document": document, "copied": copied}


def copy_files(document: dict[str, Any], folder: Path) -> list[str]:
    """Copy the tuned file named by the document to `folder`, and return the names of the copies."""
    source = document.get("kernels", {}).get("file")
    if source is None or not Path(source).is_file():
        return []
    copied = folder / f"{TUNED}{Path(source).name}"
    shutil.copy(source, copied)
    return [copied.name]


def install(folder: Path) -> list[str]:
    """Install the tuned files of a results folder that this machine lacks, and return their names."""
    installed = []
    for path in sorted(folder.glob(f"{TUNED}*.json")):
        name = path.name.removeprefix(TUNED)
        if not any((place / name).exists() for place in (user_folder(), package_folder())):
            writable_folder().mkdir(parents=True, exist_ok=True)
            shutil.copy(path, writable_folder() / name)
            installed.append(name)
    return installed


def _tail(text: str) -> str:
    return " ".join(text.split())[-300:]


def describe(document: dict[str, Any]) -> str:
    lines = []
    for name, figures in document["measurements"].items():
        if "error" in figures:
            lines.append(f"  {name:10} ERROR {figures['error'][:150]}")
            continue
        lines.append(f"  {name:10} {figures['seconds']:.0f} s, copied {', '.join(figures['copied']) or 'nothing'}")
        for result in figures["document"].get("kernels", {}).get("results", ()):
            load = max(result["loads"], key=lambda each: each["weight"], default=None)
            key = ", ".join(f"{part} {value}" for part, value in result["key"].items() if part != "dtype")
            times = "nothing measured"
            if load is not None and load["default_microseconds"] is not None:
                times = (
                    f"{load['microseconds']:.1f} us, default {load['default_microseconds']:.1f}, "
                    f"{load['share_of_copy']:.0%} of copy"
                )
            lines.append(
                f"    {result['op']} {key}: {times}; {result['measured']} measured, "
                f"{len(result['failed'])} failed, {result['left']} left"
            )
    return "\n".join(lines)
