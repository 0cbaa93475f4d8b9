"""Benchmarks of grown models: enlargement of the target, and of the drafts if the vocabulary grows."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from treespec.bench.options import Options
from treespec.errors import ConfigError
from treespec.startup.options import resolve_device, resolve_folders, resolve_model
from treespec_weights import ModelShape, as_folder
from treespec_weights.documents import read_model
from treespec_weights.errors import OptionError
from treespec_weights.files import resolve_folder
from treespec_weights.grow import grow_checkpoint, grown_shape, widened
from treespec_weights.sizes import parse_size


class GrownTarget(NamedTuple):
    source: Path  # folder of the source model
    shape: ModelShape
    of: str  # name of the source model

    @property
    def figures(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "of": self.of,
            "parameters": shape.num_parameters(),
            "shape": f"{shape.num_layers} layers, hidden {shape.hidden_size}, MLP {shape.intermediate_size}, "
            f"{shape.num_heads} heads, {shape.num_kv_heads} KV heads, {shape.vocab_size} tokens",
        }


@contextmanager
def grown(
    options: Options, size: str, vocab: int | None, keep: str | Path | None
) -> Iterator[tuple[Options, GrownTarget]]:
    """Grow the target, and the drafts if the vocabulary grows; yield options for the grown models and a summary."""
    source, drafts = resolve_model(options.model), resolve_folders(options.model, options.drafts)
    source_shape, _ = read_model(resolve_folder(source))
    with ExitStack() as stack:
        try:
            shape = grown_shape(source_shape, parse_size(size, "--grow"), vocab, ("--grow", "--grow-vocab"))
            root = Path(keep or stack.enter_context(TemporaryDirectory(prefix="treespec-grown-")))
            root.mkdir(parents=True, exist_ok=True)
            grow_checkpoint(source, root / "target", shape, options.seed, resolve_device(options.device))
            folders = [str(folder) for _, folder in drafts]
            if shape.vocab_size > source_shape.vocab_size:
                folders = _grow_drafts(drafts, root, shape.vocab_size, options.seed)
        except OptionError as error:
            raise ConfigError(str(error)) from error
        name = "embedded target" if options.model is None else str(options.model)
        yield replace(options, model=root / "target", drafts=folders), GrownTarget(source, shape, name)


def _grow_drafts(drafts: Sequence[tuple[str, Path]], root: Path, vocab: int, seed: int) -> list[str]:
    """Grow drafts to the target's vocabulary and return their folders; padding suppresses the added tokens."""
    folders = []
    for i, (name, folder) in enumerate(drafts, start=1):
        shape, _ = read_model(resolve_folder(folder))
        padded = widened(shape, 4, vocab, shape.num_layers, 0)
        with as_folder(folder, torch.bfloat16) as source:  # the embedded drafts are stored in fp8
            grow_checkpoint(source, root / name, padded, seed + i)
        folders.append(str(root / name))
    return folders
