"""Recognise and load published draft heads.

EAGLE-3 (arXiv 2503.01840) in the layouts of its authors, of SpecForge and SGLang, and of speculators; EAGLE-1 and
EAGLE-2 (arXiv 2401.15077, 2406.16858), which have the same heads, in the layouts of their authors and of speculators;
parallel EAGLE heads (P-EAGLE) in the layout of speculators; block drafts (block_drafts.py); heads without attention
(state_heads.py); and assistants of Gemma 4 (assistants.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from treespec_weights.assistants import AssistantForm, AssistantWeights, assistant_form, load_assistant
from treespec_weights.block_drafts import PARALLEL_BLOCK, BlockForm, BlockWeights, dflash_form, load_block, pard_form
from treespec_weights.documents import CONFIG, read_config, read_model
from treespec_weights.draft_tensors import (
    FIRST_LAYER,
    DraftOptions,
    DraftTensors,
    config_error,
    layers_of,
    tensor_names,
)
from treespec_weights.draft_vocabulary import read_draft_vocabulary
from treespec_weights.errors import CheckpointError, UnsupportedModelError
from treespec_weights.files import resolve_folder
from treespec_weights.mtp import MtpForm, check_predictor
from treespec_weights.rules import FamilyRules, ModelShape
from treespec_weights.state_heads import StateForm, load_state_head, medusa_form, speculator_form
from treespec_weights.state_projection import StateSsmForm, load_state_projection, state_ssm_form

SUPPORTED = (
    "EAGLE-1, EAGLE-2 and EAGLE-3 heads of the layouts of EAGLE, SpecForge and speculators; parallel EAGLE heads of "
    "speculators; DFlash drafts of the layouts of its authors, transformers and speculators; DSpark drafts of "
    "speculators; PARD drafts; Medusa and MLPSpeculator heads; assistants of Gemma 4"
)
_OTHER_KINDS = {  # part of an architecture or model type -> name of the kind
    "arctic": "an Arctic speculator",
    "hydra": "a Hydra head",
    "dflash2": "a DFlash 2 draft",
    "xpress": "an Xpress draft",
}
_PROJECTIONS = tuple(f"layers.0.{name}{suffix}" for name in "qkv" for suffix in ("", "_bias"))


@dataclass(frozen=True)
class HeadForm:
    """Description of a draft head, read from its published folder."""

    folder: Path  # folder of the head
    layers: tuple[int, ...] | None  # target layers; None for the default, which depends on the target's depth
    by_output: bool  # `layers` counts layers by their outputs, as SpecForge and SGLang do, not by their inputs
    config: dict[str, Any]  # config of the head's layers, in the form of a model's config.json
    rules: FamilyRules  # family of the head's layers
    residual_after_norm: bool  # the residual stream begins with the normalised feature
    norm_output: bool  # the feature of a drafted token is the output after the final norm
    kind: Literal["eagle", "eagle3"] = "eagle3"  # "eagle" is EAGLE-1 and EAGLE-2
    block: int = 0  # number of tokens that a parallel EAGLE head predicts in a pass; 0 for other heads
    mask_token: int = 0  # token of a parallel head's pairs after the root

    @property
    def name(self) -> str:
        if self.block:
            return "parallel EAGLE head"
        return "EAGLE-3 head" if self.kind == "eagle3" else "EAGLE head"

    def describe(self, layers: Sequence[int]) -> str:
        """Describe what the head reads, given the result of `read_layers`."""
        if self.kind == "eagle":
            return "reads the target's output states"
        reads = f"reads the inputs of the target's layers {', '.join(map(str, layers))}"
        return f"{reads} and predicts {self.block} tokens in a pass" if self.block else reads

    def read_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of a target with `num_layers` layers whose inputs the head reads, ascending.

        `num_layers` stands for the last layer's output, `num_layers` + 1 for this output after the final norm. Raises
        CheckpointConfigError if the target has no such layer.
        """
        if self.kind == "eagle":
            return (num_layers + 1,)
        default = (2, num_layers // 2, num_layers - 3)
        layers = tuple(sorted(self.layers or default))
        # Some published heads number inputs, others outputs; these numbers distinguish them.
        if self.by_output and layers != default and layers[-1] != num_layers:
            layers = tuple(layer + 1 for layer in layers)
        if not all(0 <= layer <= num_layers for layer in layers):
            message = f"the head reads layers {layers}, and the target has {num_layers} layers"
            raise config_error(self.folder, "eagle_aux_hidden_state_layer_ids", message)
        return layers


class HeadWeights(NamedTuple):
    """Weights of a head, in the compute dtype."""

    # decoder parameters by name, without Q, K and V of the first layer and with one row of `embed`. EAGLE heads have no
    # `lm_head`, and no norms before attention and at the end, which are ones here
    decoder: dict[str, Tensor]
    # projection of the target's states, [hidden, number of layers * hidden of the target], or, in EAGLE, of a pair's
    # embedding and feature, [hidden, 2 * hidden]; and its bias or None
    fc: tuple[Tensor, Tensor | None]
    # Q, K and V of the first layer, [(num_heads + 2 * num_kv_heads) * head_dim, 2 * hidden], [..., hidden] in EAGLE;
    # and the bias or None
    qkv: tuple[Tensor, Tensor | None]
    # embed_norm, feature_norm: norms of the embedding and of the feature, [hidden]; None for EAGLE
    embed_norm: Tensor | None
    feature_norm: Tensor | None
    # norms of the target's states, over all of them, [1, number of layers * hidden], or of each, [number of layers,
    # hidden]; None without norms
    state_norms: Tensor | None
    embed: Tensor | None  # own embeddings [vocab, hidden]; None for the target's
    # replaces the target's states in the mask pairs of a parallel head, [number of layers, hidden of the target];
    # None for other heads
    mask_states: Tensor | None = None

    @property
    def num_parameters(self) -> int:
        """Number of parameters that a pass reads, without embeddings."""
        other_tensors = (*self.fc, *self.qkv, self.embed_norm, self.state_norms)
        return sum(t.numel() for t in self.decoder.values()) + sum(t.numel() for t in other_tensors if t is not None)


DraftForm: TypeAlias = HeadForm | BlockForm | StateForm | AssistantForm | MtpForm | StateSsmForm


def read_head(folder: Path | str) -> DraftForm | None:
    """Return the form of the draft head in a folder; None for an ordinary model. Raises CheckpointConfigError."""
    root = resolve_folder(folder)
    if root.is_file():
        return None
    if (form := state_ssm_form(root)) is not None:
        return form
    raw = read_config(root)
    names = [*(raw.get("architectures") or []), *(raw.get(key) for key in ("speculators_model_type", "model_type"))]
    names += [key for key in ("dflash_config", "medusa_num_heads") if key in raw]
    lowered = [name.lower() for name in names if isinstance(name, str)]
    other_kind = next((kind for marker, kind in _OTHER_KINDS.items() if any(marker in name for name in lowered)), None)
    if other_kind is not None:
        message = f"{other_kind}, which is not supported; supported: {SUPPORTED}"
        raise UnsupportedModelError.of(root, "config", CONFIG, message)

    def has(*markers: str) -> bool:
        return any(marker in name for name in lowered for marker in markers)

    kinds: list[tuple[bool, Callable[[Path, Mapping[str, Any]], DraftForm]]] = [
        (raw.get("model_type") in ("gemma4_assistant", "gemma4_unified_assistant"), assistant_form),
        (has("dflash", "dspark", "muse_glimmer_assistant"), dflash_form),
        (has("medusa"), medusa_form),
        (has("mlp_speculator", "mlpspeculator"), speculator_form),
        ("pard_token" in raw, pard_form),
        (has("eagle3", "peagle") or "draft_vocab_size" in raw, _eagle3_form),
    ]
    form_of = next((form_of for is_kind, form_of in kinds if is_kind), None)
    if form_of is None and not _is_eagle(raw, root):
        return None
    if raw.get("quantization_config"):
        raise config_error(root, "quantization_config", "quantised draft heads are not supported; use the original")
    return (form_of or _eagle_form)(root, raw)


def _is_eagle(raw: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a folder has an EAGLE-1 head. The original layout's config is that of a Llama of one layer."""
    if raw.get("speculators_model_type") == "eagle":
        return True
    return raw.get("num_hidden_layers") == 1 and "fc.weight" in tensor_names(folder)


def _eagle_form(folder: Path, raw: Mapping[str, Any]) -> HeadForm:
    if raw.get("layernorms"):  # written by speculators for HASS
        raise config_error(folder, "layernorms", "EAGLE heads with norms of their inputs are not supported")
    return HeadForm(folder, None, False, *layers_of(folder, raw, 1), False, False, "eagle")


def _eagle3_form(folder: Path, raw: Mapping[str, Any]) -> HeadForm:
    layers, nested = raw.get("eagle_aux_hidden_state_layer_ids"), raw.get("eagle_config")
    by_output = layers is None and isinstance(nested, dict)
    if isinstance(nested, dict):
        layers = nested.get("eagle_aux_hidden_state_layer_ids") if layers is None else layers
        raw = {**raw, **nested}
    if layers is not None and not (isinstance(layers, list) and layers and all(type(layer) is int for layer in layers)):
        raise config_error(folder, "eagle_aux_hidden_state_layer_ids", f"{layers!r}; expected a list of layer numbers")
    # Some published configs of other layouts give the target's number of layers.
    num_layers = None if "transformer_layer_config" in raw else 1
    block, mask = 0, raw.get("mask_token_id")
    if raw.get("speculators_model_type") == "peagle":
        block = _proposed_tokens(raw)
        if type(mask) is not int or mask < 0:
            raise config_error(folder, "mask_token_id", f"{mask!r}; expected a token of the target")
    return HeadForm(
        folder,
        None if layers is None else tuple(layers),
        by_output,
        *layers_of(folder, raw, num_layers),
        bool(raw.get("norm_before_residual")),
        bool(raw.get("norm_output")),
        block=block,
        mask_token=mask if block and isinstance(mask, int) else 0,
    )


def _proposed_tokens(raw: Mapping[str, Any]) -> int:
    """Return the number of tokens that a config of speculators proposes in a round; by default that of its training."""
    described = raw.get("speculators_config")
    methods = described.get("proposal_methods") if isinstance(described, dict) else None
    counts = [method.get("speculative_tokens") for method in methods or () if isinstance(method, dict)]
    return next((count for count in counts if type(count) is int and count > 0), PARALLEL_BLOCK)


def load_head(
    form: HeadForm, shape: ModelShape, num_states: int, options: DraftOptions
) -> tuple[HeadWeights, np.ndarray | None]:
    """Load a head.

    `shape` is the shape of its layers, with the target's vocabulary size; `num_states` the number of target layers that
    it reads. Returns the weights, and the target's tokens of the head's rows, int64 ascending; None for the full
    vocabulary. Raises CheckpointError with all missing and misshaped tensors, and for a head of another target.
    """
    target_hidden, dtype, device, kept = options
    hidden, tensors = shape.hidden_size, DraftTensors(form.folder, dtype, device)
    if form.kind == "eagle":
        return _load_eagle(form, shape, target_hidden, tensors), kept
    tensors.check_states(num_states, target_hidden)
    head = tensors.raw("lm_head.weight")
    rows = shape.vocab_size if head is None else len(head)
    tokens = tensors.head_tokens(rows, shape.vocab_size, kept)
    decoder = tensors.take_layers(shape, form.rules, (*_PROJECTIONS, "layers.0.attn_norm"))
    decoder["lm_head"] = tensors.take("lm_head.weight", rows if tokens is None else len(tokens), hidden)
    decoder["layers.0.attn_norm"] = tensors.take(f"{FIRST_LAYER}hidden_norm.weight", hidden)
    weights = HeadWeights(
        decoder,
        (tensors.take("fc.weight", hidden, num_states * target_hidden), tensors.take_if_stored("fc.bias", hidden)),
        _qkv(tensors, shape, 2 * hidden),
        tensors.take(f"{FIRST_LAYER}input_layernorm.weight", hidden),
        decoder["layers.0.attn_norm"],
        _state_norms(tensors, num_states, target_hidden),
        tensors.own_embedding(shape),
        tensors.take("mask_hidden", 1, 1, num_states * target_hidden).view(-1, target_hidden) if form.block else None,
    )
    tensors.check()
    if form.mask_token >= shape.vocab_size:
        reason = f"{form.mask_token}, and the target has {shape.vocab_size} tokens"
        raise config_error(form.folder, "mask_token_id", reason)
    return weights, tokens


def _load_eagle(form: HeadForm, shape: ModelShape, target_hidden: int, tensors: DraftTensors) -> HeadWeights:
    """Load an EAGLE-1 head, which has the target's hidden size and vocabulary. Arguments as in `load_head`."""
    hidden = shape.hidden_size
    for key, size in (("hidden_size", target_hidden), ("vocab_size", shape.vocab_size)):
        if (value := form.config.get(key, size)) != size:
            reason = f"{value}, the target has {size}; use a head that was trained for this target"
            raise config_error(form.folder, key, reason)
    norms = ("layers.0.attn_norm", "final_norm")
    decoder = tensors.take_layers(shape, form.rules, (*_PROJECTIONS, *norms))
    decoder |= {name: torch.ones(hidden, dtype=tensors.dtype, device=tensors.device) for name in norms}
    fc = tensors.take("fc.weight", hidden, 2 * hidden), tensors.take_if_stored("fc.bias", hidden)
    weights = HeadWeights(decoder, fc, _qkv(tensors, shape, hidden), None, None, None, tensors.own_embedding(shape))
    tensors.check()
    return weights


def _qkv(tensors: DraftTensors, shape: ModelShape, width: int) -> tuple[Tensor, Tensor | None]:
    kv_rows = shape.num_kv_heads * shape.head_dim
    rows = {"q_proj": shape.num_heads * shape.head_dim, "k_proj": kv_rows, "v_proj": kv_rows}
    stem, bias = f"{FIRST_LAYER}self_attn.", None
    weights = [tensors.take(f"{stem}{name}.weight", size, width) for name, size in rows.items()]
    if shape.attention_bias or f"{stem}q_proj.bias" in tensors:
        bias = torch.cat([tensors.take(f"{stem}{name}.bias", size) for name, size in rows.items()])
    return torch.cat([weight for weight in weights if weight.dim() == 2] or weights), bias


def _state_norms(tensors: DraftTensors, num_states: int, target_hidden: int) -> Tensor | None:
    if "input_norm.weight" in tensors:
        return tensors.take("input_norm.weight", num_states * target_hidden)[None]
    if "fc_norm.0.weight" in tensors:
        return torch.stack([tensors.take(f"fc_norm.{i}.weight", target_hidden) for i in range(num_states)])
    return None


def is_reduced(form: DraftForm, vocab_size: int) -> bool:
    """Return whether a draft scores only part of a target's `vocab_size` tokens, or groups of them.

    Raises CheckpointError for unreadable weights.
    """
    if isinstance(form, MtpForm):
        return False
    if isinstance(form, StateSsmForm):
        return True
    if isinstance(form, AssistantForm):
        return form.centroids > 0
    tensors = DraftTensors(form.folder, None, "cpu")
    tokens = tensors.raw("d2t")
    return "token_map" in tensors or (tokens is not None and len(tokens) < vocab_size)


def compare_head(target: dict[str, Any], form: DraftForm) -> dict[str, Any]:
    """Compare a head with a target, a result of `inspect_checkpoint`: a row of `compare_draft`."""
    reason = connection = same_hidden = parameters = None
    if target["shape"] is None:
        reason = "not compared with a target of another than the native families; LLM checks the fit at its start"
    else:
        size, hidden = target["shape"]["vocab_size"], target["shape"]["hidden_size"]
        try:
            layers = form.read_layers(target["shape"]["num_layers"])
            parameters, tokens, same_hidden = _check_stored(form, len(layers), size, hidden)
        except CheckpointError as error:
            reason = "; ".join(map(str, error.problems))
        else:
            num_tokens = size if tokens is None else len(tokens)
            connection = f"{form.name}, {form.describe(layers)}; proposes {num_tokens:,} of {size:,} tokens"
    return {
        "folder": str(form.folder),
        "family": form.name,
        "parameters": parameters,
        "cost_ratio": parameters / target["parameters"] if parameters and target["parameters"] else None,
        "same_vocab_size": True if reason is None else None,
        "same_vocabulary": True if reason is None else None,
        "same_hidden_size": same_hidden,
        "usable": reason is None,
        "connection": connection,
        "reason": reason,
    }


def _check_stored(
    form: DraftForm, num_states: int, vocab_size: int, hidden: int
) -> tuple[int, np.ndarray | None, bool]:
    """Return a head's number of parameters, its tokens, and whether it has the target's hidden size."""
    if isinstance(form, MtpForm):
        return check_predictor(form), None, True
    if isinstance(form, StateSsmForm):
        return _check_state_ssm(form, vocab_size, hidden)
    weights: HeadWeights | BlockWeights | AssistantWeights
    options = DraftOptions(hidden)
    if isinstance(form, StateForm):
        steps, tokens = load_state_head(form, vocab_size, options)
        return sum(step.num_parameters for step in steps), tokens, True
    shape = replace(ModelShape.from_hf(form.config, form.rules, form.folder), vocab_size=vocab_size)
    tokens = None
    if isinstance(form, AssistantForm):
        shape = replace(shape, sizes=tuple(layer._replace(kv_of=-1) for layer in shape.sizes))
        weights = load_assistant(form, shape, options)
    elif isinstance(form, BlockForm):
        weights, tokens = load_block(form, shape, options)
    else:
        weights, tokens = load_head(form, shape, num_states, options)
    return weights.num_parameters, tokens, shape.hidden_size == hidden


def _check_state_ssm(form: StateSsmForm, vocab_size: int, hidden: int) -> tuple[int, np.ndarray | None, bool]:
    shape, _ = read_model(form.folder)
    projection = load_state_projection(form, shape.hidden_size, hidden, None, "cpu")
    ids = read_draft_vocabulary(form.folder, shape.vocab_size, vocab_size)
    parameters = shape.num_parameters() + sum(tensor.numel() for tensor in projection)
    return parameters, None if ids is None else ids[ids >= 0], shape.hidden_size == hidden
