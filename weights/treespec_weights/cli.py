"""Commands of `treespec weights`."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm  # type: ignore[import-untyped]

from treespec_weights import hub
from treespec_weights.convert import SHARD_BYTES, convert_checkpoint
from treespec_weights.describe import describe, describe_conversion, describe_timing, describe_verification
from treespec_weights.documents import read_model
from treespec_weights.dtypes import DTYPES
from treespec_weights.errors import OptionError
from treespec_weights.files import resolve_folder
from treespec_weights.grow import grow_checkpoint, grown_shape
from treespec_weights.heads import compare_head, read_head
from treespec_weights.inspection import compare_draft, inspect_checkpoint
from treespec_weights.mtp import MTP, MtpForm
from treespec_weights.sizes import parse_bytes, parse_size
from treespec_weights.timing import time_loading
from treespec_weights.transform import FORMATS
from treespec_weights.verify import verify_checkpoint

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

DRAFTS = "Compare a draft's folder, or 'mtp', the checkpoint's MTP layer (a folder: './mtp'); may be repeated."
Folder = Annotated[
    Path, typer.Argument(help="A folder of config.json and safetensors, or a GGUF file.", show_default=False)
]
Destination = Annotated[Path, typer.Argument(help="The folder to create; it must not exist yet.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Drafts = Annotated[list[str] | None, typer.Option("--draft", help=DRAFTS)]
Dtype = Annotated[str | None, typer.Option(metavar="|".join(DTYPES), help="Dtype of all tensors. [default: as stored]")]


@app.callback()
def commands() -> None:
    """Inspect, verify and convert safetensors checkpoints and GGUF files; time, grow and fetch safetensors."""


@app.command()
def inspect(folder: Folder, draft: Drafts = None, as_json: Json = False) -> None:
    """Show a checkpoint's family, shapes, dtypes and memory, and how well drafts match it."""
    report = inspect_checkpoint(folder)
    report["drafts"] = [_compare(report, name) for name in draft or []]
    _show(report, as_json, describe)


def _compare(report: dict[str, Any], draft: str) -> dict[str, Any]:
    form = MtpForm(resolve_folder(report["folder"])) if draft == MTP else read_head(draft)
    return compare_draft(report, inspect_checkpoint(draft)) if form is None else compare_head(report, form)


@app.command()
def verify(folder: Folder, as_json: Json = False) -> None:
    """Check files, index, config, tokenizer, names, shapes and every value. Exit code 1 on a problem."""
    with _bar("value") as advance:
        result = verify_checkpoint(folder, advance)
    problems = [problem._asdict() for problem in result.problems]
    checks = [{"name": c.name, "done": c.done, "problems": len(c.problems)} for c in result.checks]
    report = {"folder": str(folder), "ok": result.ok, "checks": checks, "problems": problems}
    _show(report, as_json, lambda _: describe_verification(folder, result))
    raise typer.Exit(0 if result.ok else 1)


@app.command()
def load(
    folder: Folder,
    dtype: Dtype = None,
    device: Annotated[str, typer.Option(help="Target device: cpu, cuda, cuda:1.")] = "cpu",
    repeats: Annotated[int, typer.Option(min=1, help="Loads of each kind.")] = 3,
    cold: Annotated[bool, typer.Option("--cold", help="Drop the files from the page cache before each load.")] = False,
    as_json: Json = False,
) -> None:
    """Time loading a checkpoint, against a plain safetensors read of the same files."""
    with _bar("load") as advance:
        report = time_loading(folder, _dtype(dtype), _device(device), repeats, cold, advance)
    _show(report, as_json, describe_timing)


@app.command()
def convert(
    source: Folder,
    destination: Destination,
    dtype: Dtype = None,
    shard_size: Annotated[str, typer.Option(help="Size of a file: 500MB, 2GB, 1.5GiB.")] = f"{SHARD_BYTES // 10**9}GB",
    layout: Annotated[
        str | None, typer.Option(metavar="FAMILY", help="Names and fused tensors of another family, such as llama.")
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(FORMATS),
            help="Quantise the layers' matrices, in compressed-tensors' format; fp8-all: also embedding and head.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted conversion.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint: to another dtype, shard size or family's layout, or quantised. The result is atomic."""
    with _bar("B") as advance:
        report = convert_checkpoint(
            source,
            destination,
            dtype=_dtype(dtype),
            shard_bytes=parse_bytes(shard_size),
            layout=layout,
            resume=resume,
            quantization=quantize,
            on_bytes=advance,
        )
    _show(report, as_json, describe_conversion)


@app.command()
def grow(
    source: Folder,
    destination: Destination,
    size: Annotated[str, typer.Option(help="Number of parameters: 120M, 0.5B, 7B.", show_default=False)],
    vocab: Annotated[int | None, typer.Option(min=1, help="Tokens. [default: unchanged]", show_default=False)] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of the random weights.")] = 0,
    as_json: Json = False,
) -> None:
    """Write a larger model that computes the same function, to measure the cost of its size with real acceptance."""
    with _bar("B") as advance:
        root = resolve_folder(source)
        inspect_checkpoint(root)  # fail early on errors of the final report, such as an unusable tokenizer
        shape = grown_shape(read_model(root)[0], parse_size(size), vocab)
        grow_checkpoint(root, destination, shape, seed, on_bytes=advance)
        report = inspect_checkpoint(destination)
    _show(report, as_json, describe)


@app.command()
def fetch(
    hub_id: Annotated[str, typer.Argument(help="A model of the Hugging Face hub: owner/model.", show_default=False)],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.", show_default=False)] = None,
    to: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Instead of the hub's cache.")] = None,
    as_json: Json = False,
) -> None:
    """Fetch a model from the hub, safetensors only, and print its local folder."""
    folder = hub.fetch(hub_id, revision, to)
    _show({"hub_id": hub_id, "revision": revision, "folder": str(folder)}, as_json, lambda report: report["folder"])


def _dtype(name: str | None) -> Any:
    if name is not None and name not in DTYPES:
        raise OptionError(f"--dtype {name}: valid are {', '.join(DTYPES)}")
    return None if name is None else DTYPES[name]


def _device(name: str) -> Any:
    import torch

    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise OptionError(f"--device {name}: valid are names such as cpu, cuda, cuda:1")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"--device {name}: torch sees {torch.cuda.device_count()} GPUs here")
    return device


@contextmanager
def _bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar if stderr is a terminal. Yields a function to call with the amount done and the total."""
    with tqdm(unit=unit, unit_scale=True, leave=False, disable=not sys.stderr.isatty()) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance


def _show(report: dict[str, Any], as_json: bool, text: Callable[[dict[str, Any]], str]) -> None:
    typer.echo(json.dumps(report, indent=2) if as_json else text(report))
