"""Recognise and load published drafts that predict several tokens in one pass.

DFlash (arXiv 2602.06036) in the layouts of its authors, transformers and speculators; DSpark (arXiv 2607.05147), which
adds a bias that depends on a node's token, in the layout of speculators; PARD (arXiv 2504.18583), whose folders hold
ordinary models with a mask token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec_weights.draft_tensors import DraftOptions, DraftTensors, config_error, layers_of
from treespec_weights.families import family_of
from treespec_weights.load import load_weights
from treespec_weights.rules import FamilyRules, ModelShape

PARALLEL_BLOCK = 8  # tokens per pass that PARD's drafts are trained to predict
_TRANSFORMERS = "muse_glimmer_assistant"  # transformers' model type of DFlash drafts, which have Qwen3 layers


@dataclass(frozen=True)
class BlockForm:
    """Description of a block draft, read from its published folder."""

    folder: Path  # folder of the draft
    kind: Literal["dflash", "pard"]  # "dflash" or "pard"
    # target layers whose inputs it reads, in the order of the draft's projection; empty for "pard"
    layers: tuple[int, ...]
    config: dict[str, Any]  # config of its layers, in the form of a model's config.json
    rules: FamilyRules  # family of its layers
    block_size: int  # number of rows of a pass, including the root
    mask_token: int  # token of the rows below the root
    predicts_next: bool  # a row predicts the token after its position, not the one at its position
    # layers are numbered by their outputs; transformers returns the last one after the final norm
    by_output: bool = False
    markov_rank: int = 0  # rank of a DSpark draft's bias, which depends on a node's token; 0 for none
    gated: bool = False  # whether the hidden state gates this bias

    @property
    def name(self) -> str:
        if self.markov_rank:
            return "DSpark draft"
        return "DFlash draft" if self.kind == "dflash" else "PARD draft"

    @property
    def block(self) -> int:
        """Number of tokens that a pass predicts."""
        return self.block_size if self.predicts_next else self.block_size - 1

    def describe(self, layers: Sequence[int]) -> str:
        """Describe what the draft does, given the result of `read_layers`."""
        reads = f"reads the inputs of the target's layers {', '.join(map(str, layers))} and " if layers else ""
        return f"{reads}predicts {self.block} tokens in a pass"

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers to read in a target with `num_layers` layers, numbered as in `HeadForm.read_layers`."""
        if not all(0 <= layer <= num_layers for layer in self.layers):
            message = f"{self.layers}, and the target has {num_layers} layers; use a draft of this target"
            raise config_error(self.folder, "target_layer_ids", message)
        return tuple(layer + (self.by_output and layer == num_layers) for layer in self.layers)


class MarkovWeights(NamedTuple):
    """Weights of a DSpark draft's bias, which depends on a node's token."""

    embed: Tensor  # token embedding, [vocab, rank]
    out: Tensor  # [rows of the vocabulary head, rank]
    gate: tuple[Tensor, Tensor] | None  # weight [rank, hidden + rank] and bias [rank], or None


class BlockWeights(NamedTuple):
    """Weights of a block draft, in the compute dtype."""

    # decoder parameters by name. A DFlash draft has one row of `embed`, and no `lm_head` if it uses the target's.
    decoder: dict[str, Tensor]
    # projection of the target's states, [hidden, number of layers * hidden of the target]; None for "pard"
    fc: Tensor | None
    state_norm: Tensor | None  # norm of the projected states, [hidden]; None for "pard"
    embed: Tensor | None  # own embeddings of "dflash", [vocab, hidden]; None for the target's
    mask: Tensor | None = None  # embedding of the mask token of "pard", [hidden]; None for "dflash", which looks it up
    markov: MarkovWeights | None = None  # only DSpark drafts have it

    @property
    def num_parameters(self) -> int:
        """Number of parameters that a pass reads, without embeddings."""
        tied = self.mask is not None and "lm_head" not in self.decoder
        tensors = [tensor for name, tensor in self.decoder.items() if tied or name != "embed"]
        tensors += [tensor for tensor in (self.fc, self.state_norm) if tensor is not None]
        if self.markov is not None:
            tensors += [self.markov.out, *(self.markov.gate or ())]
        return sum(tensor.numel() for tensor in tensors)


def dflash_form(folder: Path, raw: Mapping[str, Any]) -> BlockForm:
    """Return the form of a DFlash draft. Raises CheckpointConfigError for invalid values, and for sliding windows."""
    nested = raw.get("dflash_config")
    values = {**raw, **nested} if isinstance(nested, dict) else dict(raw)
    by_input = isinstance(values.get("transformer_layer_config"), dict)  # speculators; the others number outputs
    key = "aux_hidden_state_layer_ids" if by_input else "target_layer_ids"
    layers = values.get(key)
    if not (isinstance(layers, list) and layers and all(type(layer) is int for layer in layers)):
        raise config_error(folder, key, f"{layers!r}; expected a list of the target's layers")
    for name, least in (("block_size", 2), ("mask_token_id", 0)):
        if type(values.get(name)) is not int or values[name] < least:
            raise config_error(folder, name, f"{values.get(name)!r}; expected an int, at least {least}")
    base_config = {**raw, "model_type": "qwen3"} if raw.get("model_type") == _TRANSFORMERS else raw
    config, rules = layers_of(folder, base_config)
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise config_error(folder, "layer_types", "DFlash drafts with sliding windows are not supported")
    is_dspark, rank, bias = values.get("speculators_model_type") == "dspark", 0, "vanilla"
    if is_dspark:
        rank, bias = values.get("markov_rank", 256), values.get("markov_head_type", "vanilla")
        if type(rank) is not int or rank < 0 or bias not in ("vanilla", "gated"):
            reason = f"{bias!r} of rank {rank!r}; supported: vanilla and gated, of a rank from 0 on"
            raise config_error(folder, "markov_head_type", reason)
    return BlockForm(
        folder,
        "dflash",
        tuple(layer if by_input else layer + 1 for layer in layers),
        config,
        rules,
        values["block_size"],
        values["mask_token_id"],
        bool(values.get("sample_from_anchor", is_dspark)),
        not by_input,
        rank,
        bias == "gated",
    )


def pard_form(folder: Path, raw: Mapping[str, Any]) -> BlockForm:
    """Return the form of a PARD draft. Raises CheckpointConfigError if the mask token is not in the vocabulary."""
    token, size = raw["pard_token"], raw.get("vocab_size")
    if type(token) is not int or type(size) is not int or not 0 <= token < size:
        raise config_error(folder, "pard_token", f"{token!r}; expected a token of the vocabulary of {size}")
    return BlockForm(folder, "pard", (), dict(raw), family_of(dict(raw), folder), PARALLEL_BLOCK, token, True)


def load_block(form: BlockForm, shape: ModelShape, options: DraftOptions) -> tuple[BlockWeights, np.ndarray | None]:
    """Load a block draft; arguments, result and errors as in `load_head`."""
    target_hidden, dtype, device, kept = options
    if form.kind == "pard":
        return _load_pard(form, shape, options), kept
    hidden, tensors = shape.hidden_size, DraftTensors(form.folder, dtype, device)
    count, head = len(form.layers), tensors.raw("lm_head.weight")
    tensors.check_states(count, target_hidden)
    embed = tensors.own_embedding(shape)
    if hidden != target_hidden and (head is None or embed is None):
        reason = f"{hidden}, the target has {target_hidden}, whose embeddings and vocabulary head the draft uses"
        raise config_error(form.folder, "hidden_size", reason)
    size = shape.vocab_size
    tokens = tensors.narrowed(kept, size) if head is None else tensors.head_tokens(len(head), size, kept)
    rows = size if tokens is None else len(tokens)
    decoder = tensors.take_layers(shape, form.rules, ())
    if head is not None:
        decoder["lm_head"] = tensors.take("lm_head.weight", rows, hidden)
    weights = BlockWeights(
        decoder,
        tensors.take("fc.weight", hidden, count * target_hidden),
        tensors.take("hidden_norm.weight", hidden),
        embed,
        markov=_markov(form, tensors, shape, rows),
    )
    tensors.check()
    if not form.mask_token < shape.vocab_size:
        reason = f"{form.mask_token}, and the vocabulary has {shape.vocab_size} tokens"
        raise config_error(form.folder, "mask_token_id", reason)
    return weights, tokens


def _markov(form: BlockForm, tensors: DraftTensors, shape: ModelShape, rows: int) -> MarkovWeights | None:
    """Return the weights of a DSpark draft's bias, or None; `rows` is the number of rows of its vocabulary head."""
    if not (rank := form.markov_rank):
        return None
    gate = None
    if form.gated:
        weight = tensors.take("markov_head.gate_proj.weight", rank, shape.hidden_size + rank)
        gate = weight, tensors.take("markov_head.gate_proj.bias", rank)
    return MarkovWeights(
        tensors.take("markov_head.markov_w1.weight", shape.vocab_size, rank),
        tensors.take("markov_head.markov_w2.weight", rows, rank),
        gate,
    )


def _load_pard(form: BlockForm, shape: ModelShape, options: DraftOptions) -> BlockWeights:
    """Load a PARD draft, whose vocabulary starts with the target's. `shape.vocab_size` is the target's."""
    draft_shape = ModelShape.from_hf(form.config, form.rules, form.folder)
    if draft_shape.vocab_size < shape.vocab_size:
        reason = f"{draft_shape.vocab_size}, and the target has {shape.vocab_size} tokens; use a draft for this target"
        raise config_error(form.folder, "vocab_size", reason)
    decoder = load_weights(form.folder, draft_shape, form.rules, options.dtype, options.device)
    embed = decoder["embed"]
    for name in decoder.keys() & {"embed", "lm_head"}:
        decoder[name] = decoder[name][: shape.vocab_size]
    if options.kept is not None:
        decoder.setdefault("lm_head", embed)
        decoder["lm_head"] = decoder["lm_head"][torch.from_numpy(options.kept)]
    return BlockWeights(decoder, None, None, None, embed[form.mask_token].clone())
