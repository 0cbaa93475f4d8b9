"""Grown models: the function of a small model in a larger shape, to measure at sizes without weights of that size.

The cost of a pass is the larger shape's, and the tokens are the small model's, so acceptance is real. What is added
computes with random weights and reaches nothing:

- hidden dimensions are padded with zeros: embeddings and every projection into the residual stream have zero rows
  there. An RMSNorm over `ratio` times the width sees 1 / ratio of the mean square; eps is divided by the ratio and the
  scale by its root. Both are exact where the ratio is a power of 4, the only ratios that are used.
- extra heads and MLP units have zero columns in `o` and `down`. Heads come in whole KV groups after the model's own, so
  that every head keeps its KV head.
- extra layers have zero `o` and `down`: they add nothing to the residual stream.
- extra vocabulary (only where asked for) must never win, nor take probability from the drafts' own tokens. One padded
  hidden dimension carries `_TINY` in every embedding, too small to change any mean square in fp32, and every norm but
  the last has scale 0 there. The last norm raises it to a large positive value, which the head's padding rows, zero
  elsewhere, turn into a large negative logit. So such a model needs padded dimensions and its own head.

A product with a zero is zero as long as the other factor is finite; random weights of usual size see to that. So every
sum has the small model's terms, and zeros. A library may group the terms of a longer row otherwise (oneDNN: 704 MLP
units among 2,048; not among 1,024). Then logits differ in their last bits, as they do between machines, and the
benchmark counts the tokens that do.
"""

import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from treespec.build import resolve_device, resolve_drafts, resolve_model
from treespec.errors import ConfigError
from treespec_weights import LLAMA, ModelShape, family_of, load_weights, read_config
from treespec_weights.files import resolve_folder

if TYPE_CHECKING:
    from treespec.bench.run import Options

SHARD_BYTES = 1 << 30
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}
_WIDEN = 4  # MLP units per hidden dimension, where the size leaves the choice
_NARROWEST = 2  # the least of those, for a wider hidden dimension
_TINY, _RAISED = 2.0**-40, 2.0**52
_COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json",
           "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")  # fmt: skip

# By parameter: what its rows and its columns count. Those named in `_TO_RESIDUAL` are zero where anything was added.
_AXES = {
    "embed": ("vocab", "hidden"), "lm_head": ("vocab", "hidden"), "attn_norm": ("hidden",), "mlp_norm": ("hidden",),
    "final_norm": ("hidden",), "q": ("q", "hidden"), "k": ("kv", "hidden"), "v": ("kv", "hidden"), "o": ("hidden", "q"),
    "gate": ("inter", "hidden"), "up": ("inter", "hidden"), "down": ("hidden", "inter"), "q_bias": ("q",),
    "k_bias": ("kv",), "v_bias": ("kv",), "o_bias": ("hidden",), "gate_bias": ("inter",), "up_bias": ("inter",),
    "down_bias": ("hidden",),
}  # fmt: skip
_TO_RESIDUAL = ("embed", "lm_head", "o", "down", "o_bias", "down_bias")
_NORMS = ("attn_norm", "mlp_norm", "final_norm")


def parse_size(text: str) -> int:
    """Parameters from a size such as 0.5B, 120M or 900K.

    Raises:
        ConfigError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB])", text.strip().upper())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"--grow {text}: valid are sizes such as 120M, 0.5B or 7B")
    return round(float(match[1]) * _UNITS[match[2]])


def grown_shape(shape: ModelShape, size: int, vocab: int | None = None) -> ModelShape:
    """The shape of about `size` parameters that holds `shape`.

    The widest hidden dimension (times 1, 4, 16 ...) at which the model's own number of layers still has an MLP of
    twice the width; there an MLP of four times the width and as many layers as the size asks for.

    Raises:
        ConfigError: the model is larger than `size` already, or the vocabulary would shrink.
    """
    vocab = vocab or shape.vocab_size
    if vocab < shape.vocab_size:
        raise ConfigError(f"--grow-vocab {vocab}: the model has {shape.vocab_size} tokens already")
    padded = vocab > shape.vocab_size
    ratio = 4 if padded else 1
    if _wide(shape, ratio, vocab, shape.num_layers, 1).num_parameters() > size:
        least = _wide(shape, ratio, vocab, shape.num_layers, 1).num_parameters()
        raise ConfigError(f"--grow {size / 1e6:.4g}M: this model can be grown from {math.ceil(least / 1e6)}M on")
    while _wide(shape, 4 * ratio, vocab, shape.num_layers, _NARROWEST).num_parameters() <= size:
        ratio *= 4
    full = _wide(shape, ratio, vocab, 1, _WIDEN)
    layer = _wide(shape, ratio, vocab, 2, _WIDEN).num_parameters() - full.num_parameters()
    layers = max(shape.num_layers, 1 + round((size - full.num_parameters()) / layer))
    wide = replace(full, num_layers=layers)
    one_unit = replace(wide, intermediate_size=wide.intermediate_size + 1).num_parameters() - wide.num_parameters()
    units = wide.intermediate_size + (size - wide.num_parameters()) / one_unit
    step = max(64, wide.hidden_size // 4)  # as real models have it
    return replace(wide, intermediate_size=max(shape.intermediate_size, step * round(units / step)))


def _wide(shape: ModelShape, ratio: int, vocab: int, layers: int, widen: int) -> ModelShape:
    """`shape` with hidden dimension and heads times `ratio`, and an MLP of `widen` times that width."""
    hidden = shape.hidden_size * ratio
    return replace(
        shape, hidden_size=hidden, num_layers=layers, num_heads=shape.num_heads * ratio,
        num_kv_heads=shape.num_kv_heads * ratio, intermediate_size=max(shape.intermediate_size, widen * hidden),
        vocab_size=vocab, tied=shape.tied and vocab == shape.vocab_size,
    )  # fmt: skip


def grow(source: Path, folder: Path, shape: ModelShape, seed: int, device: torch.device | str = "cpu") -> None:
    """Write a Hugging Face folder that computes `source`'s function in the larger `shape`.

    Args:
        source: a checkpoint of the Llama family.
        folder: where to write; made where it is missing.
        shape: at least as large as the source's in every respect, with a hidden dimension 4 ** n times as wide.
        seed: of the random weights.
        device: where they are drawn (on a CPU by one thread). Another device draws others.

    Raises:
        ConfigError: the source is of another family. CheckpointError: it cannot be read.
    """
    source = resolve_folder(source)
    config = read_config(source)
    rules = family_of(config, source)
    if rules is not LLAMA:
        raise ConfigError(f"{source}: {rules.model_type} models cannot be grown; valid: {LLAMA.model_type}")
    old = ModelShape.from_hf(config, rules, source)
    growth = _Growth(old, shape)
    folder.mkdir(parents=True, exist_ok=True)
    names = {rule.params[0]: rule.name for rule in rules.tensors}
    small = load_weights(source, old, rules)
    if old.tied and not shape.tied:
        small["lm_head"] = small["embed"].clone()
    generator = torch.Generator(device).manual_seed(seed)
    dtype = small["embed"].dtype
    if shape.vocab_size > old.vocab_size and dtype == torch.float16:
        raise ConfigError(f"{source}: float16 has no room for a grown vocabulary; valid: bfloat16, float32")
    tensors = (
        (_tensor_name(names, name), growth.tensor(name, size, small.get(name), dtype, generator))
        for name, size in shape.parameters().items()
    )
    _write(folder, tensors)
    config |= {
        "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied, "rms_norm_eps": config.get("rms_norm_eps", 1e-6) / growth.ratio,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)


@dataclass(frozen=True)
class _Growth:
    """From the old shape to the new one."""

    old: ModelShape
    new: ModelShape

    @property
    def ratio(self) -> int:
        ratio = self.new.hidden_size // self.old.hidden_size
        power_of_4 = ratio & (ratio - 1) == 0 and ratio.bit_length() % 2 == 1
        assert ratio * self.old.hidden_size == self.new.hidden_size and power_of_4, "a width that is not 4 ** n times"
        return ratio

    def tensor(
        self, name: str, size: tuple[int, ...], own: Tensor | None, dtype: torch.dtype, generator: torch.Generator
    ) -> Tensor:
        """A parameter of the new shape; `own` is the old one, None in an added layer."""
        kind = name.rpartition(".")[2]
        if kind in _TO_RESIDUAL:
            tensor = torch.zeros(size, dtype=dtype)
        else:
            spread = size[1] ** -0.5 if len(size) > 1 else 0.1
            tensor = torch.empty(size, dtype=dtype, device=generator.device)
            tensor = tensor.normal_(float(kind in _NORMS), spread, generator=generator).cpu()
        if own is not None:
            scale = self.ratio**-0.5 if kind in _NORMS else 1.0
            tensor[tuple(slice(n) for n in own.shape)] = own * scale
        if self.new.vocab_size > self.old.vocab_size:
            self._silence(kind, tensor)
        return tensor

    def _silence(self, kind: str, tensor: Tensor) -> None:
        """Make the added tokens' logits large and negative, through the last hidden dimension."""
        if kind == "embed":
            tensor[:, -1] = _TINY
        elif kind == "lm_head":
            tensor[self.old.vocab_size :, -1] = -1.0
        elif kind in _NORMS:
            tensor[-1] = _RAISED if kind == "final_norm" else 0.0


def _tensor_name(names: dict[str, str], parameter: str) -> str:
    """The checkpoint's name of a decoder parameter."""
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)", parameter)
    return names[f"layers.{{i}}.{layer[2]}"].replace("{i}", layer[1]) if layer else names[parameter]


def _write(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Shards of about `SHARD_BYTES` with their index; no more than one of them is in memory."""
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in tensors:
        shard[name] = tensor
        total += tensor.nbytes
        if sum(each.nbytes for each in shard.values()) >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


@dataclass(frozen=True)
class Grown:
    """A grown target: the folder of the small one, the shape it was grown to, and how to name the small one."""

    source: Path
    shape: ModelShape
    of: str

    @property
    def figures(self) -> dict[str, Any]:
        """What the document says of it."""
        shape = self.shape
        return {
            "of": self.of,
            "parameters": shape.num_parameters(),
            "shape": f"{shape.num_layers} layers, hidden {shape.hidden_size}, MLP {shape.intermediate_size}, "
            f"{shape.num_heads} heads, {shape.num_kv_heads} KV heads, {shape.vocab_size} tokens",
        }


@contextmanager
def grown(options: "Options", size: str, vocab: int | None, keep: Path | None) -> Iterator[tuple["Options", Grown]]:
    """Benchmark options with the target grown to `size`, and how it was.

    The folders are removed afterwards unless `keep` names where they stay. Drafts are grown only with the vocabulary.
    """
    source, drafts = resolve_model(options.model), resolve_drafts(options.model, options.drafts)[0]
    old = _shape_of(source)
    shape = grown_shape(old, parse_size(size), vocab)
    with ExitStack() as stack:
        root = keep if keep is not None else Path(stack.enter_context(TemporaryDirectory(prefix="treespec-grown-")))
        grow(source, root / "target", shape, options.seed, resolve_device(options.device))
        folders = [str(folder) for _, folder in drafts]
        if shape.vocab_size > old.vocab_size:
            folders = _grow_drafts(drafts, root, shape.vocab_size, options.seed)
        name = "embedded target" if options.model is None else str(options.model)
        yield replace(options, model=root / "target", drafts=folders), Grown(source, shape, name)


def _grow_drafts(drafts: Sequence[tuple[str, Path]], root: Path, vocab: int, seed: int) -> list[str]:
    """The drafts with the target's vocabulary, and with padded dimensions to silence the added tokens."""
    folders = []
    for i, (name, folder) in enumerate(drafts, start=1):
        shape = _shape_of(folder)
        wide = _wide(shape, 4, vocab, shape.num_layers, 0)
        grow(folder, root / name, wide, seed + i)
        folders.append(str(root / name))
    return folders


def _shape_of(folder: Path) -> ModelShape:
    folder = resolve_folder(folder)
    config = read_config(folder)
    return ModelShape.from_hf(config, family_of(config, folder), folder)
