"""Grow a model: embed the function of a small model in a larger shape, to benchmark sizes without trained weights.

A pass costs as much as one of the larger shape and produces the small model's tokens, so acceptance is realistic. The
added parts compute with random weights and have no effect on the result:

- Hidden dimensions are padded with zeros: embeddings and every projection into the residual stream have zero rows
  there. An RMSNorm over `ratio` times the width sees 1 / ratio of the mean square, so eps is divided by the ratio and
  the scale by its square root. Both are exact for powers of 4, the only ratios used.
- Extra heads and MLP units have zero columns in `o` and `down`. Heads are added in whole KV groups after the model's
  own, so that every head keeps its KV head.
- Extra layers have zero `o` and `down`, so they add nothing to the residual stream.
- Extra vocabulary (optional) must never be chosen, nor take probability from other tokens. One padded hidden dimension
  is `_TINY` in every embedding, too small to change any mean square in fp32, and every norm but the last has scale 0
  there. The last norm scales it to a large positive value, which the head's padding rows, zero elsewhere, turn into a
  large negative logit. A grown vocabulary therefore requires padded dimensions and an untied head.

A product with zero is zero if the other factor is finite, which random weights of usual magnitude ensure, so every sum
consists of the small model's terms and zeros. A library may group the terms of a longer row differently (oneDNN does
for 704 MLP units among 2,048, not among 1,024). Then logits differ in their last bits, as between machines. The
benchmark counts the tokens that differ.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from treespec_weights.checkpoint import INDEX
from treespec_weights.documents import CONFIG, read_config
from treespec_weights.dtypes import NAMES
from treespec_weights.errors import OptionError
from treespec_weights.families import LLAMA, family_of
from treespec_weights.files import resolve_folder
from treespec_weights.load import expected_tensors, load_weights
from treespec_weights.quant_config import scheme_of
from treespec_weights.rules import ModelShape
from treespec_weights.staging import carried_files, copy_files, resolve_destination, staged, write_shards
from treespec_weights.writer import Output, plan_shards, write_json

SHARD_BYTES = 1 << 30
_WIDEN = 4  # preferred MLP units per hidden dimension
_NARROWEST = 2  # minimum MLP units per hidden dimension
_TINY, _RAISED = 2.0**-40, 2.0**52

# Parameters that are zero in added parts, and norm weights.
_TO_RESIDUAL = ("embed", "lm_head", "o", "down", "o_bias", "down_bias")
_NORMS = ("attn_norm", "mlp_norm", "final_norm")


def grown_shape(
    shape: ModelShape, size: int, vocab: int | None = None, options: tuple[str, str] = ("--size", "--vocab")
) -> ModelShape:
    """Return a shape of about `size` parameters that contains `shape`.

    Chooses the widest hidden dimension (times 1, 4, 16 ...) at which the model's own number of layers fits with an MLP
    of twice the width. Then uses an MLP of four times the width and as many layers as fit. Raises OptionError, which
    names `options`, if the model is larger than `size`, or the vocabulary would shrink.
    """
    if shape.experts is not None:
        raise OptionError(f"{options[0]} {size}: models with experts cannot be grown")
    if shape.sizes:
        raise OptionError(f"{options[0]} {size}: models with layers of unequal sizes cannot be grown")
    vocab = shape.vocab_size if vocab is None else vocab
    if vocab < shape.vocab_size:
        raise OptionError(f"{options[1]} {vocab}: the model has {shape.vocab_size} tokens already")
    padded = vocab > shape.vocab_size
    ratio = 4 if padded else 1
    if widened(shape, ratio, vocab, shape.num_layers, 1).num_parameters() > size:
        least = widened(shape, ratio, vocab, shape.num_layers, 1).num_parameters()
        raise OptionError(f"{options[0]} {size / 1e6:.4g}M: this model can grow to {math.ceil(least / 1e6)}M or more")
    while widened(shape, 4 * ratio, vocab, shape.num_layers, _NARROWEST).num_parameters() <= size:
        ratio *= 4
    full = widened(shape, ratio, vocab, 1, _WIDEN)
    layer = widened(shape, ratio, vocab, 2, _WIDEN).num_parameters() - full.num_parameters()
    layers = max(shape.num_layers, 1 + round((size - full.num_parameters()) / layer))
    grown = replace(full, num_layers=layers)
    one_unit = replace(grown, intermediate_size=grown.intermediate_size + 1).num_parameters() - grown.num_parameters()
    units = grown.intermediate_size + (size - grown.num_parameters()) / one_unit
    step = max(64, grown.hidden_size // 4)  # MLP sizes of published models are multiples of such a step
    return replace(grown, intermediate_size=max(shape.intermediate_size, step * round(units / step)))


def widened(shape: ModelShape, ratio: int, vocab: int, layers: int, widen: int) -> ModelShape:
    """Return `shape` with hidden dimension and heads times `ratio`, and an MLP of `widen` times the new hidden size."""
    hidden = shape.hidden_size * ratio
    return replace(
        shape,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=shape.num_heads * ratio,
        num_kv_heads=shape.num_kv_heads * ratio,
        intermediate_size=max(shape.intermediate_size, widen * hidden),
        vocab_size=vocab,
        tied=shape.tied and vocab == shape.vocab_size,
    )


def grow_checkpoint(
    source: Path,
    folder: Path,
    shape: ModelShape,
    seed: int,
    device: torch.device | str = "cpu",
    on_bytes: Callable[[int, int], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face folder that computes `source`'s function in the larger `shape`, atomically.

    `source` is of the Llama family. No size of `shape` is below the source's, and the hidden dimension is 4 ** n times
    as wide. `device` draws the random weights (a CPU uses one thread); devices draw different numbers. `on_bytes` is
    called with the bytes written so far and the total. Raises OptionError, CheckpointError and WriteError.
    """
    source = resolve_folder(source)
    if source.is_file():
        raise OptionError(f"{source} is a GGUF file; convert it first: treespec weights convert {source.name} NEW")
    target = resolve_destination(folder, source)
    config = read_config(source)
    rules = family_of(config, source)
    if rules is not LLAMA:
        raise OptionError(f"{source}: {rules.model_type} models cannot be grown; valid: {LLAMA.model_type}")
    if (scheme := scheme_of(config, source)) is not None:
        raise OptionError(f"{source} is quantised ({scheme.name}); grow the original checkpoint")
    old = ModelShape.from_hf(config, rules, source)
    small = load_weights(source, old, rules)
    if old.tied and not shape.tied:
        small["lm_head"] = small["embed"].clone()
    generator = torch.Generator(device).manual_seed(seed)
    dtype = small["embed"].dtype
    if shape.vocab_size > old.vocab_size and dtype == torch.float16:
        raise OptionError(f"{source}: float16 has no room for a grown vocabulary; valid: bfloat16, float32")
    parameters = shape.parameters()
    names = {param: placement.name for placement in expected_tensors(shape, rules) for param in placement.params}
    outputs = [Output(names[name], NAMES[dtype], size) for name, size in parameters.items()]
    shards = plan_shards([[output] for output in outputs], shard_bytes)
    tensors = (_grown(name, size, small.get(name), old, shape, dtype, generator) for name, size in parameters.items())
    config |= {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6) / _ratio(old, shape),
    }
    carried = carried_files(source, CONFIG, INDEX)
    with staged(target) as partial:
        write_shards(partial, shards, lambda shard: itertools.islice(tensors, len(shard.outputs)), on_bytes)
        write_json(partial, CONFIG, config)
        copy_files(source, carried, partial)


def _ratio(old: ModelShape, new: ModelShape) -> int:
    ratio = new.hidden_size // old.hidden_size
    power_of_4 = ratio & (ratio - 1) == 0 and ratio.bit_length() % 2 == 1
    assert ratio * old.hidden_size == new.hidden_size and power_of_4, "a width that is not 4 ** n times"
    return ratio


def _grown(
    name: str,
    size: tuple[int, ...],
    small: Tensor | None,  # the original, or None in an added layer
    old: ModelShape,
    new: ModelShape,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    kind = name.rpartition(".")[2]
    if kind in _TO_RESIDUAL:
        tensor = torch.zeros(size, dtype=dtype, device="cpu")
    else:
        spread = size[1] ** -0.5 if len(size) > 1 else 0.1
        tensor = torch.empty(size, dtype=dtype, device=generator.device)
        tensor = tensor.normal_(float(kind in _NORMS), spread, generator=generator).cpu()
    if small is not None:
        tensor[tuple(slice(n) for n in small.shape)] = small * (_ratio(old, new) ** -0.5 if kind in _NORMS else 1.0)
    if new.vocab_size > old.vocab_size:  # the added tokens' logits are large and negative, by the last dimension
        if kind == "embed":
            tensor[:, -1] = _TINY
        elif kind == "lm_head":
            tensor[old.vocab_size :, -1] = -1.0
        elif kind in _NORMS:
            tensor[-1] = _RAISED if kind == "final_norm" else 0.0
    return tensor
