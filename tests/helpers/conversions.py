"""Checkpoints to convert, and what a conversion must keep of them: shared by the tests of converting."""

import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.models import make_llama
from treespec_weights import ModelShape, family_of, load_weights, read_config

Q = "model.layers.1.self_attn.q_proj.weight"


def make(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A random Llama checkpoint, with files beside the weights; sharded."""
    sizes = {"hidden_size": 24, "intermediate_size": 33, "head_dim": 10, "vocab_size": 63, "rms_norm_eps": 1e-3}
    make_llama(folder, 0, dtype, max_shard_size="9KB", **(sizes | options))
    beside = {"tokenizer.json": '{"model": {"vocab": {"a": 0}}}', "chat_template.jinja": "{{ messages }}"}
    beside |= {"LICENSE": "free", "pytorch_model.bin": "pickle", "modeling.py": "raise SystemExit"}
    for name, text in beside.items():
        (folder / name).write_text(text)
    return folder


def full_disk() -> AbstractContextManager[object]:
    """While it lasts, every disk says that it is full."""
    return mock.patch("shutil.disk_usage", return_value=mock.Mock(free=0))


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Let writes that make a file larger than `size` bytes fail, as on a disk that fills."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def loaded(path: Path, dtype: torch.dtype | None = None, **options: Any) -> dict[str, Tensor]:
    """The parameters of a folder or file."""
    config = read_config(path)
    family = family_of(config, path)
    return load_weights(path, ModelShape.from_hf(config, family, path), family, dtype, **options)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def assert_same(folder: Path, other: Path, dtype: torch.dtype | None = None) -> None:
    """Asserts that two folders hold the same decoder parameters, bit for bit."""
    assert_equal(loaded(other, dtype), loaded(folder, dtype))
