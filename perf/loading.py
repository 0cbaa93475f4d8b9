"""Measures load time and memory of a sharded checkpoint.

    python perf/loading.py                              # 8 GB, in the temporary folder
    python perf/loading.py --gigabytes 1 --json out.json

Writes a synthetic sharded Llama checkpoint in bfloat16 (removed at the end). Then, in one process:

- memory: peak increase of anonymous memory (RssAnon), sampled every few milliseconds while `load_weights` runs and
  every page of the result is touched; for weights as stored (memory-mapped) and cast to float16 (a copy of the files'
  size). Also for `convert` to float16.
- speed: `load_weights` against safetensors' `load_file` of the same files, alternating, every page touched
  (`treespec_weights.timing`): from the page cache, cast, and with the files evicted from the page cache before each
  load.
"""

import argparse
import os
import platform
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import measuring
import safetensors
import torch
from tqdm import tqdm

from treespec.startup.cost_measurement import processor
from treespec_weights import LLAMA, ModelShape, convert_checkpoint, load_weights, time_loading
from treespec_weights.load import expected_tensors
from treespec_weights.timing import touch
from treespec_weights.writer import Output, plan_shards, write_index, write_json, write_shard

BLOCK = 1 << 24  # number of random values, which are repeated to fill tensors
INTERVAL = 0.003  # seconds between two samples


def shape_of(num_bytes: int) -> ModelShape:
    """Return a shape of about `num_bytes` in bfloat16, with realistic tensors of at most a sixteenth of it."""
    hidden = 256
    while 2 * 16 * (2 * hidden) ** 2 <= num_bytes / 16:
        hidden *= 2

    def shape(layers: int) -> ModelShape:
        return ModelShape(
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=7 * hidden // 2,
            num_heads=hidden // 64,
            num_kv_heads=hidden // 256,
            head_dim=64,
            vocab_size=16 * hidden,
        )

    layer = 2 * (shape(2).num_parameters() - shape(1).num_parameters())
    return shape(max(1, round((num_bytes - 2 * shape(1).num_parameters()) / layer) + 1))


def write_synthetic(folder: Path, shape: ModelShape, shard_bytes: int, seed: int = 0) -> None:
    """Write a sharded bfloat16 checkpoint of a shape."""
    folder.mkdir()
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed)).mul_(0.02).bfloat16()
    order = {name: index for index, name in enumerate(shape.parameters())}
    placements = sorted(expected_tensors(shape, LLAMA), key=lambda placement: order[next(iter(placement.params))])
    shards = plan_shards([[Output(placement.name, "BF16", placement.shape)] for placement in placements], shard_bytes)
    for shard in tqdm(shards, desc="writing", unit="file", leave=False, disable=None):
        write_shard(folder, shard, _tensors(block, shard.outputs))
    write_index(folder, shards)
    keys = {LLAMA.config_keys[name]: getattr(shape, name) for name in LLAMA.config_keys}
    write_json(folder, "config.json", keys | {"model_type": "llama", "dtype": "bfloat16"})


def _tensors(block: torch.Tensor, outputs: Sequence[Output]) -> Iterator[torch.Tensor]:
    for output in outputs:
        size = output.nbytes // 2
        yield block.repeat(-(-size // len(block)))[:size].view(output.shape)


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
    largest = max(2 * placement_size for placement_size in map(_values, shape.parameters().values()))
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


def _values(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def measure(gigabytes: float, root: Path | None = None, repeats: int = 3, shard_bytes: int = 2 * 10**9) -> Any:
    """Write the checkpoint, measure memory and speed, and return the document."""
    shape = shape_of(round(gigabytes * 1e9))
    size = 2 * shape.num_parameters()
    with tempfile.TemporaryDirectory(prefix="treespec-loading-", dir=root) as temporary:
        free = shutil.disk_usage(temporary).free
        if free < 2.2 * size:
            raise SystemExit(
                f"{2.2 * size / 1e9:.1f} GB of disk are needed, {free / 1e9:.1f} are free; --gigabytes less"
            )
        folder = Path(temporary) / "model"
        write_synthetic(folder, shape, min(shard_bytes, size // 4))
        memory = measure_memory(folder, shape)
        speed = {
            "from the page cache": time_loading(folder, repeats=repeats),
            "from the page cache, cast to float16": time_loading(folder, torch.float16, repeats=repeats),
            "from the disk": time_loading(folder, repeats=repeats, cold=True),
        }
        files = len(list(folder.glob("*.safetensors")))
    for row in speed.values():
        del row["folder"]
    return {
        "bytes": size,
        "files": files,
        "layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "memory": memory,
        "speed": speed,
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
    for name, row in document["speed"].items():
        rate, plain_rate = row["load_weights"]["gb_per_second"], row["plain"]["gb_per_second"]
        lines.append(f"  {name:<38}{rate:>10.2f} GB/s, plain read {plain_rate:.2f}, share {row['share']:.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=3, help="loads per kind")
    parser.add_argument("--folder", type=Path, help="folder of the checkpoint; default: the temporary folder")
    parser.add_argument("--json", type=Path, help="also write the document to FILE")
    options = parser.parse_args()
    document = measure(options.gigabytes, options.folder, options.repeats)
    print(show(document))
    measuring.write_json(options.json, document)


if __name__ == "__main__":
    main()
