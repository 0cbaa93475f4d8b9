"""Declarative rules of a model family: its tensors, its config keys, and the components of its layers.

Each family in `families/` is one declaration. No code depends on a family's name.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

from treespec_weights.errors import CheckpointConfigError, Problem
from treespec_weights.experts import ExpertRules, Experts, mlp_parameters
from treespec_weights.factors import Factors

MAX_DIMENSION = 2**31 - 1
MAX_LAYERS = 10_000

TensorShape = tuple[int, ...]

FULL_ATTENTION = "full_attention"
MLP_ONLY = ("mlp", "moe")  # types of layers that are only an MLP, if each layer is one block (`RecurrentRules.single`)
BESIDE_SLIDING = "full_attention beside sliding_attention"
LAYER = "model.layers.{i}."  # name prefix of a layer's tensors in families with `PredictorRules`
TILED = "tiled_value_heads"  # config key of `RecurrentShape.tiled` for GGUF files


@dataclass(frozen=True, kw_only=True)
class RecurrentShape:
    """Sizes of the layers that have a state of fixed size instead of K/V.

    All of them have a causal convolution over the last `kernel` tokens in each channel. "delta" is a Gated DeltaNet
    (arXiv 2412.06464): the convolution produces queries, keys and values, and each head has a state [key_dim,
    value_dim]. "mamba2" (arXiv 2405.21060) has the same parts: C, B and x, in groups, with a state size and a head
    size. "conv" is LFM2's gated convolution, whose channels are the hidden dimensions.
    """

    kind: Literal["delta", "mamba2", "conv"]
    layers: tuple[int, ...]  # indices of these layers in the model
    kernel: int
    key_heads: int = 0  # this and the following do not apply to "conv"; each serves heads / key_heads value heads
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    tiled: bool = False  # value head i reads key head i % key_heads (GGUF files), not i // (heads / key_heads)
    conv_bias: bool = False  # "mamba2": the convolution has a bias
    bias: bool = False  # projections have biases
    doubled: bool = False  # "delta": beta is up to 2, so that a state may change its sign
    eps: float | None = None  # epsilon of the output norm; None for that of the other norms
    normed: bool = True  # "mamba2": outputs have this norm
    beside: bool = False  # its layers also have attention; both read the same input, and their outputs are added

    @property
    def rates(self) -> int:
        """Number of a head's inputs besides those of the convolution: beta and decay, or Mamba 2's time step."""
        return {"conv": 0, "mamba2": 1, "delta": 2}[self.kind]

    def width(self, hidden_size: int) -> int:
        """Return the number of values per token that a layer stores as inputs."""
        return self.channels(hidden_size) + self.rates * self.heads

    def channels(self, hidden_size: int) -> int:
        return hidden_size if self.kind == "conv" else 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    def parameters(self, hidden: int) -> dict[str, TensorShape]:
        """Return the parameters that replace q, k and v in such a layer, and those of its output."""
        heads = self.heads
        if self.kind == "conv":
            return {"mix": (3 * hidden, hidden), "conv": (hidden, 1, self.kernel), "mix_out": (hidden, hidden)}
        keys, inner = self.key_heads * self.key_dim, self.heads * self.value_dim
        parameters: dict[str, TensorShape] = {"mix_q": (keys, hidden), "mix_k": (keys, hidden)}
        parameters |= {"mix_v": (inner, hidden), "mix_gate": (inner, hidden)}
        if self.kind == "delta":
            parameters["beta"] = (heads, hidden)
        parameters |= {"decay": (heads, hidden), "mix_out": (hidden, inner)}
        biases = {f"{name}_bias": shape[:1] for name, shape in parameters.items()} if self.bias else {}
        parameters |= biases | {"dt_bias": (heads,), "decay_log": (heads,)}
        for part, size in (("q", keys), ("k", keys), ("v", inner)):
            parameters[f"conv_{part}"] = (size, 1, self.kernel)
            parameters |= {f"conv_{part}_bias": (size,)} if self.conv_bias else {}
        if self.kind == "delta":
            return parameters | {"mix_gain": (self.value_dim,)}
        return parameters | {"skip": (heads,)} | ({"mix_gain": (inner,)} if self.normed else {})


class LayerSizes(NamedTuple):
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    kv_of: int  # layer whose K/V it attends to: itself, or an earlier one; negative for a layer of another model
    has_v: bool = True  # False: values are the keys before norm and rotation


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes and switches that determine the shape of every parameter of a decoder.

    The K/V of layers of unequal `sizes` lie in a cache of equal *planes*, each of `num_kv_heads` heads of `head_dim`: a
    layer has as many consecutive planes as it needs, and each of its heads as many heads of the planes.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False  # the output head is the embedding
    attention_bias: bool = False  # on q, k, v
    o_bias: bool = False
    mlp_bias: bool = False  # on gate, up, down
    norm_bias: bool = False  # on every norm of the residual stream
    qk_norm: bool = False  # q and k are normalised per head
    wide_qk_norm: bool = False  # q and k are normalised over all of their heads together
    pre_norms: bool = True  # inputs of attention and MLP are normalised
    recurrent_pre_norms: bool = False  # in recurrent layers, inputs are normalised and outputs are not
    shared_norm: bool = False  # one norm serves both (parallel blocks)
    sinks: bool = False  # each head has an attention sink: a learned score without a position
    post_norms: bool = False  # outputs of attention and MLP are normalised before the residual add
    gated: bool = True  # the MLP has a gate
    learned_positions: int = 0  # rows of the position embedding; 0 for none
    experts: Experts | None = None
    output_gate: bool = False  # attention outputs are multiplied by sigmoid(attn_gate x)
    recurrent: RecurrentShape | None = None  # layers without K/V
    without_mlp: tuple[int, ...] = ()  # indices of layers without an MLP
    mlp_only: tuple[int, ...] = ()  # indices of layers with neither attention nor a state
    sizes: tuple[LayerSizes, ...] = ()  # by layer, if layers are unequal
    value_norm: bool = False  # v is normalised per head, without a parameter
    layer_scalar: bool = False  # the residual stream is multiplied by a parameter after each layer
    # width of each layer's additional input per token, from an embedding of its own; 0 for none
    per_layer_size: int = 0
    per_layer_vocab: int = 0  # rows of this embedding
    pairs: bool = False  # an MTP layer: reads pairs of an embedding and a state, and has neither embedding nor head

    def is_recurrent(self, layer: int) -> bool:
        return self.recurrent is not None and layer in self.recurrent.layers

    def attends(self, layer: int) -> bool:
        is_mixer_only = self.is_recurrent(layer) and not (self.recurrent and self.recurrent.beside)
        return not (is_mixer_only or layer in self.mlp_only)

    def layer(self, i: int) -> LayerSizes:
        return self.sizes[i] if self.sizes else LayerSizes(self.num_kv_heads, self.head_dim, self.intermediate_size, i)

    def num_planes(self, layer: int) -> int:
        """Return the number of cache planes for a layer's own K/V."""
        sizes, plane = self.layer(layer), self.num_kv_heads * self.head_dim
        has_own = self.attends(layer) and sizes.kv_of == layer
        return sizes.num_kv_heads * sizes.head_dim // plane if has_own else 0

    def planes(self, layers: Sequence[int]) -> list[int]:
        """Return the first plane of each layer's K/V in a cache of only these layers."""
        first_plane = dict(zip(layers, accumulate((self.num_planes(i) for i in layers), initial=0), strict=False))
        return [first_plane.get(self.layer(i).kv_of, 0) for i in layers]

    def cache_places(self, layers: Sequence[int]) -> list[slice]:
        """Return each layer's planes in a cache of only these layers."""
        counts = [self.num_planes(self.layer(i).kv_of) for i in layers]
        return [slice(first, first + count) for first, count in zip(self.planes(layers), counts, strict=True)]

    @property
    def kv_layers(self) -> int:
        """Number of layers with K/V, or of planes if layers are unequal."""
        return sum(self.num_planes(i) for i in range(self.num_layers))

    @property
    def widest_head(self) -> int:
        return max((sizes.head_dim for sizes in self.sizes), default=self.head_dim)

    def parameters(self) -> dict[str, TensorShape]:
        """Return decoder parameter names and shapes, in order. A tied head is not a separate parameter."""
        hidden = self.hidden_size

        def norm(name: str, present: bool = True) -> dict[str, TensorShape]:
            if not present:
                return {}
            return dict.fromkeys([name, f"{name}_bias"] if self.norm_bias else [name], (hidden,))

        recurrent = {} if self.recurrent is None else self.recurrent.parameters(hidden)
        per_layer: dict[str, TensorShape] = {"scalar": (1,)} if self.layer_scalar else {}
        if size := self.per_layer_size:
            per_layer |= {"input_gate": (size, hidden), "input_out": (hidden, size), "input_norm": (hidden,)}
        sparse = {} if self.experts is None else dict.fromkeys(self.experts.layers, self.experts.parameters(hidden))
        result: dict[str, TensorShape] = {"embed": (self.vocab_size, hidden)}
        if self.pairs:
            result = {"fc": (hidden, 2 * hidden), "embed_norm": (hidden,), "feature_norm": (hidden,)}
        if self.learned_positions:
            result |= {"positions": (self.learned_positions, hidden)}
        if inputs := self.num_layers * size:
            result |= {"input_embed": (self.per_layer_vocab, inputs), "input_project": (inputs, hidden)}
            result |= {"input_norm": (size,)}
        for i in range(self.num_layers):
            layer: dict[str, TensorShape] = {}
            pre, post = self.pre_norms, self.post_norms
            if self.recurrent_pre_norms and self.is_recurrent(i):
                pre, post = True, False
            if i not in self.mlp_only:
                layer |= norm("attn_norm", pre) | (recurrent if self.is_recurrent(i) else {})
                layer |= self._attention(i) if self.attends(i) else {}
                layer |= norm("attn_post_norm", post)
            if i not in self.without_mlp:
                dense = self.layer(i).intermediate_size, hidden, self.mlp_bias, self.gated
                layer |= norm("mlp_norm", pre and not self.shared_norm) | (sparse.get(i) or mlp_parameters(*dense))
                layer |= norm("mlp_post_norm", post)
            layer |= per_layer
            result |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        result |= norm("final_norm")
        if not (self.tied or self.pairs):
            result["lm_head"] = (self.vocab_size, hidden)
        return result

    def _attention(self, i: int) -> dict[str, TensorShape]:
        """Return the parameters of the attention of layer i, without norms of the residual stream."""
        hidden, sizes = self.hidden_size, self.layer(i)
        q, kv = self.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        rows = {"q": q}
        if sizes.kv_of == i:
            rows |= {"k": kv, "v": kv} if sizes.has_v else {"k": kv}
        result: dict[str, TensorShape] = {name: (size, hidden) for name, size in rows.items()}
        if self.output_gate:
            result |= {"attn_gate": (q, hidden)}
        if self.attention_bias:
            result |= {f"{name}_bias": (size,) for name, size in rows.items()}
        normed = {"q": q, "k": kv} if "k" in rows else {"q": q}
        if self.qk_norm or self.wide_qk_norm:
            result |= {
                f"{name}_norm": (size if self.wide_qk_norm else sizes.head_dim,) for name, size in normed.items()
            }
        if self.sinks:
            result |= {"sinks": (self.num_heads,)}
        result |= {"o": (hidden, q)}
        return result | ({"o_bias": (hidden,)} if self.o_bias else {})

    @property
    def mlp_sizes(self) -> tuple[int, ...]:
        """Numbers of hidden units of MLPs and experts, and the width of the experts' inputs."""
        sparse = 0 if self.experts is None else len(self.experts.layers)
        dense = (self.intermediate_size,) if self.num_layers > sparse + len(self.without_mlp) else ()
        if self.experts is None:
            return dense
        return (*dense, self.experts.size, *filter(None, (self.experts.shared_size, self.experts.latent_size)))

    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.parameters().values())

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], rules: "FamilyRules", folder: Path | str = ".") -> "ModelShape":
        """Read a parsed config.json (`documents.read_config`) by its family's keys. `folder` is for messages.

        Raises CheckpointConfigError with all missing, mistyped and contradictory keys.
        """
        values: dict[str, Any] = dict(rules.constants)
        problems = []
        for name, key in rules.config_keys.items():
            value = config.get(key)
            if value is None:
                value = rules.defaults.get(name, False if name in _FLAGS else None)
            if value is None and name == "intermediate_size" and rules.widening:
                continue
            if value is None and name not in _DERIVED:
                problems.append(Problem("config", repr(key), "missing from config.json"))
            elif value is not None:
                message = _wrong_value(name, value)
                problems += [Problem("config", repr(key), message)] if message else []
            values[name] = value
        if not problems:
            if values.get("num_kv_heads") is None:
                values["num_kv_heads"] = values["num_heads"]
            if values.setdefault("head_dim", None) is None and values["hidden_size"] % values["num_heads"] == 0:
                values["head_dim"] = values["hidden_size"] // values["num_heads"]
            values.setdefault("intermediate_size", (rules.widening or 0) * values["hidden_size"])
            if "learned_positions" in values:
                values["learned_positions"] += rules.extra_positions
            problems = _contradictions(values, rules.config_keys)
            if rules.experts is not None:
                values["experts"] = rules.experts.read({**rules.assumed, **config}, values["num_layers"], problems)
        if rules.layer_sizes is not None and not problems:
            values |= rules.layer_sizes({**rules.assumed, **config}, values, problems)
        if rules.recurrent is not None and not problems:
            values["recurrent"], problems = rules.recurrent.read(config, values["num_layers"])
            if rules.recurrent.single and not problems:
                types = [*enumerate(rules.recurrent.types(config, values["num_layers"]))]
                values["mlp_only"] = tuple(i for i, kind in types if kind in MLP_ONLY)
                values["without_mlp"] = tuple(i for i, kind in types if kind not in MLP_ONLY)
        if problems:
            raise CheckpointConfigError(folder, list(dict.fromkeys(problems)))  # one key may feed two fields
        return cls(**values)


_DERIVED = ("num_kv_heads", "head_dim")
_FLAGS = tuple(f.name for f in (*fields(ModelShape), *fields(RecurrentShape)) if f.type is bool)


def _wrong_value(name: str, value: object) -> str | None:
    if name in _FLAGS:
        return None if isinstance(value, bool) else f"{value!r} is not true or false"
    limit = MAX_LAYERS if name == "num_layers" else MAX_DIMENSION
    if type(value) is not int or not 1 <= value <= limit:
        return f"{value!r} is not a whole number from 1 to {limit}"
    return None


def _contradictions(values: Mapping[str, Any], keys: Mapping[str, str]) -> list[Problem]:
    problems = []
    heads, kv_heads, hidden = values["num_heads"], values["num_kv_heads"], values["hidden_size"]
    if values["head_dim"] is None:
        message = f"{hidden} is not a multiple of {keys['num_heads']} {heads}, and there is no head_dim"
        problems.append(Problem("config", repr(keys["hidden_size"]), message))
    if heads % kv_heads:
        message = f"{heads} is not a multiple of {keys['num_kv_heads']} {kv_heads}"
        problems.append(Problem("config", repr(keys["num_heads"]), message))
    return problems


@dataclass(frozen=True)
class TensorRule:
    """A checkpoint tensor and the decoder parameters stored in it. `{i}` is the layer and `{e}` the expert.

    A rule applies if the model has its parameters, so biases need no separate switch. If only the parameters contain
    `{e}`, the tensor holds those of all experts, `[experts, ...]`. Layouts (of each expert in this case):

    - "stacked": the parameters concatenated (`[q + k + v, hidden]`), also for a single parameter;
    - "per_head": stacked within each head (`[heads, (q, k, v), head_dim, hidden]`);
    - "interleaved": row by row (`[out, (gate, up), hidden]`);
    - "transposed", "interleaved_transposed": the same, then transposed (`[in, out]`).
    """

    name: str
    params: tuple[str, ...]
    layout: Literal["stacked", "per_head", "interleaved", "transposed", "interleaved_transposed"] = "stacked"
    # field with the number of heads of a "per_head" tensor; "key_heads" is a field of `RecurrentShape`
    heads: Literal["num_heads", "num_kv_heads", "key_heads"] = "num_kv_heads"
    single: bool = False  # the parameters stay in float32


@dataclass(frozen=True, kw_only=True)
class RecurrentRules:
    """How config.json describes recurrent layers."""

    kind: Literal["delta", "mamba2", "conv"]
    layer_type: str  # name in `layer_types`, "hybrid" with attention in addition; others are `FULL_ATTENTION`
    key: str = "layer_types"
    single: bool = False  # each layer is one block with one norm; its type may also be in `MLP_ONLY`
    # alternatives if `key` is missing:
    interval: str | None = None  # key of n, if every n-th layer has attention
    attention: str | None = None  # key of the indices of the layers with attention
    config_keys: Mapping[str, str]  # RecurrentShape field -> key of config.json
    defaults: Mapping[str, int] = field(default_factory=dict)  # RecurrentShape field or interval -> value
    eps: float | None = None  # `RecurrentShape.eps`

    def read(self, config: Mapping[str, Any], num_layers: int) -> tuple[RecurrentShape | None, list[Problem]]:
        """Return the shape, or None if no layer is recurrent, and the problems."""
        keys = dict(self.config_keys) | ({} if self.interval is None else {"interval": self.interval})
        values = {name: config.get(key, self.defaults.get(name)) for name, key in keys.items()}
        messages = {keys[name]: _wrong_value(name, value) for name, value in values.items()}
        problems = [Problem("config", repr(key), message) for key, message in messages.items() if message]
        if problems:
            return None, problems
        values.pop("interval", None)
        types = self.types(config, num_layers)
        valid = [self.layer_type, FULL_ATTENTION, *(MLP_ONLY if self.single else ())]
        if not isinstance(types, list) or len(types) != num_layers or not {*map(str, types)} <= {*valid}:
            message = f"{types!r}; expected {' or '.join(map(repr, valid))} for each of {num_layers} layers"
            return None, [Problem("config", repr(self.attention or self.key), message)]
        layers = tuple(i for i, kind in enumerate(types) if kind == self.layer_type)
        if values.get("heads", 0) % values.get("key_heads", 1):
            message = f"{values['heads']} is not a multiple of {keys['key_heads']} {values['key_heads']}"
            return None, [Problem("config", repr(keys["heads"]), message)]
        tiled = config.get(TILED) is True and values["heads"] != values["key_heads"]
        fixed: dict[str, Any] = {"kind": self.kind, "layers": layers, "tiled": tiled, "eps": self.eps}
        return (RecurrentShape(**fixed, **values, beside=self.layer_type == "hybrid") if layers else None), []

    def types(self, config: Mapping[str, Any], num_layers: int) -> Any:
        """Return the type of each layer, or config.json's invalid value."""
        if (types := config.get(self.key)) is not None:
            return types
        interval = num_layers + 1 if self.interval is None else config.get(self.interval, self.defaults["interval"])
        attention = range(interval - 1, num_layers, interval) if self.attention is None else config.get(self.attention)
        if not isinstance(attention, range | list | None):
            return attention
        return [FULL_ATTENTION if i in (attention or ()) else self.layer_type for i in range(num_layers)]


@dataclass(frozen=True, kw_only=True)
class PredictorRules:
    """Names of a checkpoint's layer for multi-token prediction (MTP); "{n}" is the number of the model's layers."""

    module: str  # name prefix of all its tensors
    layer: str  # replacement of `LAYER` in the names of the layer's own tensors
    tensors: Mapping[str, str]  # name -> parameter, for tensors that other layers do not have
    copies: tuple[str, ...] = ()  # names of copies of the model's embedding and head, which are not read

    def after(self, num_layers: int) -> "PredictorRules":
        """Return the rules for a model with `num_layers` layers."""

        def named(name: str) -> str:
            return name.replace("{n}", str(num_layers))

        tensors = {named(name): param for name, param in self.tensors.items()}
        return PredictorRules(
            module=named(self.module), layer=named(self.layer), tensors=tensors, copies=tuple(map(named, self.copies))
        )

    def layer_at(self, number: int) -> str:
        """Return `layer` for an additional MTP layer, `number` 1 or more."""
        return re.sub(r"\d+", lambda first: str(int(first[0]) + number), self.layer)


NormKind = Literal["rms", "rms_plus_one", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Activations by their names in config.json. gelu uses the error function, gelu_tanh the tanh approximation; relu2 is
the square of relu."""


@dataclass(frozen=True, kw_only=True)
class FamilyRules:
    """A model family: the tensor names and config keys of its checkpoints, and the components of its layers."""

    model_type: str  # `model_type` in config.json
    tensors: tuple[TensorRule, ...]  # the tensors of a checkpoint, and the parameters in them
    # alternative tensors for the same parameters, used if the checkpoint has a tensor of this name
    alternatives: tuple[TensorRule, ...] = ()
    tied_copy: str  # name of the output head; a file with a tied head may contain it, equal to the embedding
    # names of derived buffers in old files, and of unread modules, which end in "."
    ignored: tuple[str, ...] = ()
    prefix: str = ""  # prefix of all names, omitted by checkpoints of only the base model
    # translates a parsed config.json with other keys to `config_keys`
    normalize: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    config_keys: Mapping[str, str]  # ModelShape field -> key of config.json
    # ModelShape field -> value if config.json lacks its key; flags are False unless given here
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # ModelShape field -> value that the family fixes without a key
    constants: Mapping[str, Any] = field(default_factory=dict)
    # key -> value if config.json lacks it, for keys without a ModelShape field
    assumed: Mapping[str, Any] = field(default_factory=dict)
    widening: int | None = None  # MLP units per hidden dimension if config.json does not give their number
    max_positions: str = "max_position_embeddings"  # key of the maximum context length
    extra_positions: int = 0  # rows of the position embedding before the row of position 0
    norm: NormKind = "rms"  # "rms"; "rms_plus_one", scaled by 1 + w; or "layer", LayerNorm
    norm_eps: str | float = "rms_norm_eps"  # key of the norm's epsilon, or a fixed value
    activation: str = "hidden_act"  # key of the MLP's activation, one of `ACTIVATIONS`
    # whether a checkpoint may have unread layers after the last one, for multi-token prediction
    further_layers: bool = False
    predictor: PredictorRules | None = None  # None: a layer for multi-token prediction is unsupported
    clamped: bool = False  # the activation is clamped_swiglu instead
    experts: ExpertRules | None = None  # None for a family without experts
    # reads the ModelShape fields of unequal layers from a config and the fields already read; adds to the problems
    layer_sizes: Callable[[Mapping[str, Any], Mapping[str, Any], list[Problem]], dict[str, Any]] | None = None
    rotary: bool = True  # whether q and k have rotary embeddings, as given by `rope_parameters` and its older spellings
    recurrent: RecurrentRules | None = None  # how config.json describes layers without attention
    interleaved: bool = False  # whether pairs of adjacent dimensions are rotated, instead of d and d + head_dim / 2
    # layers without rotation (NoPE): those without a window (`FULL_ATTENTION`), unless no layer has a window
    # (`BESIDE_SLIDING`); or those with a 0 in the list at this key; None for no layers
    unrotated: str | None = None
    # whether queries are multiplied by 1 + beta log(1 + floor(position / original length)), with the rope's
    # llama_4_scaling_beta and original_max_position_embeddings
    scaled_queries: bool = False
    norm_after_rope: bool = False  # whether the norm of the heads of q and k follows the rotation
    windows: bool = False  # whether config.json may limit layers to a sliding window (sliding_window, layer_types)
    # key of the switch that gives attention and MLP the same input; None if they never have
    parallel: str | None = None
    query_scalar: str | None = None  # key of the value that replaces head_dim in the attention scale 1 / sqrt(head_dim)
    # keys of factors on attention scores (instead of 1 / sqrt(head_dim)), embeddings, a layer's additions to the
    # residual stream, and logits; `logit_divisor` is the key of a divisor of the logits
    score_scale: str | None = None
    embed_scale: str | None = None
    residual_scale: str | None = None
    logit_scale: str | None = None
    logit_divisor: str | None = None
    factors: Callable[[Mapping[str, Any], list[Problem]], Factors] | None = None  # reads others; adds to the problems
    # score_cap, logit_cap: keys of the soft caps c of attention scores and logits, c tanh(x / c); null disables
    score_cap: str | None = None
    logit_cap: str | None = None
    # whether embeddings are multiplied by sqrt(hidden_size), rounded to the model's dtype
    scaled_embedding: bool = False
    # key -> supported values; any other value is an unsupported variant
    requires: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # key -> key that must have the same value; a difference is an unsupported variant
    equal_sizes: Mapping[str, str] = field(default_factory=dict)

    def for_names(self, names: Collection[str]) -> "FamilyRules":
        """Return the rules for a checkpoint with these tensor names, without the prefix if no name has it."""
        if self.alternatives:
            stems = {*names, *(re.sub(r"\.\d+\.", ".{i}.", name, count=1) for name in names)}
            alternatives = tuple(rule for rule in self.alternatives if rule.name in stems)
            replaced = {param for rule in alternatives for param in rule.params}
            remaining = tuple(rule for rule in self.tensors if not replaced.intersection(rule.params))
            return replace(self, tensors=remaining + alternatives, alternatives=()).for_names(names)
        if not self.prefix or any(name.startswith(self.prefix) for name in names):
            return self

        def bare(name: str) -> str:
            return name.removeprefix(self.prefix)

        tensors = tuple(replace(rule, name=bare(rule.name)) for rule in self.tensors)
        return replace(self, tensors=tensors, ignored=tuple(map(bare, self.ignored)), prefix="")


def named(name: str, param: str, fillings: Iterable[str]) -> dict[str, str]:
    """Return tensor names and parameters, with each of `fillings` in place of "{}" in both."""
    return {name.replace("{}", filling): param.replace("{}", filling) for filling in fillings}


def one_to_one(pairs: Mapping[str, str]) -> tuple[TensorRule, ...]:
    """Return the rules of tensors that hold one parameter each, given as tensor name -> parameter."""
    return tuple(TensorRule(name, (param,)) for name, param in pairs.items())


def with_biases(pairs: Mapping[str, str]) -> tuple[TensorRule, ...]:
    """Return the rules of modules with a weight and a bias, given as module name -> parameter."""
    ends = {".weight": "", ".bias": "_bias"}
    return one_to_one({name + end: param + suffix for name, param in pairs.items() for end, suffix in ends.items()})
