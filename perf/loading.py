"""Measures the memory that loading and converting a sharded checkpoint needs.

    python perf/loading.py                              # 8 GB, in the temporary folder
    python perf/loading.py --gigabytes 1 --json out.json

Grows the embedded target to a sharded Llama checkpoint in bfloat16 (removed at the end; `treespec weights grow` writes
the same, and `treespec weights load` measures the speed of loading it). Then, in one process, measures the peak
increase of anonymous memory (RssAnon), sampled every few milliseconds while `load_weights` runs and every page of the
result is touched; for weights as stored (memory-mapped) and cast to float16 (a copy of the files' size). Also for
`convert` to float16.
"""

import math
import os
import platform
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import measuring
import safetensors
import torch

from treespec.startup.cost_measurement import processor
from treespec_weights import (
    LLAMA,
    ModelShape,
    convert_checkpoint,
    default_folder,
    grow_checkpoint,
    grown_shape,
    load_weights,
    read_config,
)
from treespec_weights.timing import touch

INTERVAL = 0.003  # seconds between samples


@contextmanager
def anonymous_peak() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the peak increase of the process's anonymous memory in the block, in bytes."""
    before, highest, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(INTERVAL):
            highest = max(highest, anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: max(highest, anonymous_bytes()) - before
    finally:
        done.set()
        thread.join()


def anonymous_bytes() -> int:
    """Return the anonymous memory of the process in bytes (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def measure_memory(folder: Path, shape: ModelShape) -> dict[str, dict[str, Any]]:
    """Measure peaks of anonymous memory, also relative to the size of the files' tensors."""
    size = 2 * shape.num_parameters()
    largest = max(2 * math.prod(sizes) for sizes in shape.parameters().values())
    result: dict[str, dict[str, Any]] = {}
    for name, dtype in (("load, as stored", None), ("load, cast to float16", torch.float16)):
        with anonymous_peak() as peak:
            weights = load_weights(folder, shape, dtype=dtype)
            touch(weights.values())
            result[name] = {"anonymous_bytes": peak(), "of_size": peak() / size}
        del weights
    copy = folder.parent / "converted"
    with anonymous_peak() as peak:
        convert_checkpoint(folder, copy, dtype=torch.float16)
        result["convert to float16"] = {"anonymous_bytes": peak(), "of_largest_tensor": peak() / largest}
    shutil.rmtree(copy)
    return result


def measure(gigabytes: float, root: Path | None) -> Any:
    """Write the checkpoint, measure memory, and return the document."""
    source = default_folder("target")
    shape = grown_shape(ModelShape.from_hf(read_config(source), LLAMA, source), round(gigabytes * 1e9 / 2))
    size = 2 * shape.num_parameters()
    with tempfile.TemporaryDirectory(prefix="treespec-loading-", dir=root) as temporary:
        free = shutil.disk_usage(temporary).free
        if free < 2.2 * size:
            raise SystemExit(
                f"{2.2 * size / 1e9:.1f} GB of disk are needed, but {free / 1e9:.1f} are free; lower --gigabytes"
            )
        folder = Path(temporary) / "model"
        grow_checkpoint(source, folder, shape, seed=0)
        memory = measure_memory(folder, shape)
        files = len(list(folder.glob("*.safetensors")))
    return {
        "bytes": size,
        "files": files,
        "layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "memory": memory,
        "machine": {
            "cpus": os.cpu_count(),
            "processor": processor(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "safetensors": safetensors.__version__,
            "python": platform.python_version(),
        },
    }


def show(document: dict[str, Any]) -> str:
    """Format the document."""
    lines = [f"{document['bytes'] / 1e9:.2f} GB in {document['files']} files"]
    for name, row in document["memory"].items():
        share = f"{row['of_size']:.3f} of the files" if "of_size" in row else f"{row['of_largest_tensor']:.2f} tensors"
        lines.append(f"  {name:<38}{row['anonymous_bytes'] / 1e6:>10,.0f} MB anonymous, {share}")
    return "\n".join(lines)


def main() -> None:
    parser = measuring.parser(__doc__, grows=False)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--folder", type=Path, help="folder of the checkpoint; default: the temporary folder")
    options = parser.parse_args()
    document = measure(options.gigabytes, options.folder)
    print(show(document))
    measuring.write_json(options.json, document)


if __name__ == "__main__":
    main()
