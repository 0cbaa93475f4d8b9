"""Stage `autotune`: runs `treespec autotune` for the relevant shapes and copies the tuned file to the results."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu.models import shape_of_size
from gpu.setting import ROOT, Setting
from gpu.stage import Context, Measurement
from treespec_weights.rules import ModelShape


def measurements(setting: Setting) -> Iterator[Measurement]:
    if setting.dry:
        shapes = {"tiny": (setting.target, 1)}
    else:
        shapes = {"8B": (setting.target, 120), "grown 8B": (shape_of_size("8B"), 90), "1B": (setting.small, 60)}
        shapes["grown 1B"] = (shape_of_size("1B"), 60)
    for name, (shape, seconds) in shapes.items():
        options = ["--dtype", str(setting.dtype).removeprefix("torch."), "--budget-seconds", str(seconds)]
        if setting.dry:
            options += ["--ops", "tree_attention", "--nodes", "2", "--context", "20"]
        yield Measurement(name, partial(autotune, [*shape_options(shape), *options]), seconds + 60.0)
    budget = [] if setting.dry else ["--budget-seconds", "60"]
    yield Measurement("embedded", partial(autotune, ["--seconds", "0.2" if setting.dry else "5", *budget]), 150.0)


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
    copied = folder / "tuned" / Path(source).name
    copied.parent.mkdir(exist_ok=True)
    shutil.copy(source, copied)
    return [str(copied.relative_to(folder))]


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
