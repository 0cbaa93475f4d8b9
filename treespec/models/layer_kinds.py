"""Per-layer differences: rotary embedding, with its tables, and attention window."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from treespec.errors import ModelError, VariantError
from treespec_weights.rules import BESIDE_SLIDING, FULL_ATTENTION, FamilyRules, ModelShape

FULL = FULL_ATTENTION
_ORIGINAL = "original_max_position_embeddings"
SLIDING = "sliding_attention"


class Rope(NamedTuple):
    """Rotary embedding (RoFormer, arXiv 2104.09864) in the rotate-half layout.

    With partial rotary embedding (`rotary_dim` < head_dim) the remaining dimensions have frequency 0 and scale 1. Then,
    and if the checkpoint has pairs of adjacent dimensions (`interleaved`), the dimensions of q and k are permuted to
    `head_order`, which leaves the scores unchanged. Layers without positions have a rope of frequency 0.
    """

    inv_freq: Tensor  # fp32 [head_dim / 2]
    scale: Tensor  # fp32 [head_dim / 2], factor on cos and sin (YaRN)
    rotary_dim: int
    short: "Rope | None" = None  # longrope (arXiv 2402.13753): rope of requests of at most `short_context` positions
    short_context: int = 0  # 0 if all requests have the same rope
    interleaved: bool = False
    growth: tuple[float, int] | None = None  # beta and length of `FamilyRules.scaled_queries`, for queries

    @property
    def key(self) -> tuple[object, ...]:
        key = tuple(self.inv_freq.tolist()), tuple(self.scale.tolist()), self.rotary_dim, self.growth
        return key if self.short is None else (*key, self.short.key, self.short_context)

    @property
    def head_order(self) -> Tensor | None:
        """Checkpoint dimension at each dimension of the permuted head, int64 [head_dim]; None for the identity."""
        head_dim, half = 2 * len(self.inv_freq), self.rotary_dim // 2
        if self.rotary_dim == head_dim and not self.interleaved:
            return None
        pairs = torch.arange(2 * half, device="cpu")
        turned = (pairs[::2], pairs[1::2]) if self.interleaved else pairs.chunk(2)
        still = torch.arange(self.rotary_dim, head_dim, device="cpu").chunk(2)
        return torch.cat((turned[0], still[0], turned[1], still[1]))


class RotaryEmbedding:
    """Table of cos and sin by position (RoFormer, arXiv 2104.09864), extended on demand.

    Each row is computed once, so its bits do not depend on the positions requested with it. Rows are padded to the
    `width` of the model's widest head. With longrope, the rows of the short factors come first:
    `ModelConfig.first_rotation` is the row of a request's position 0.
    """

    def __init__(self, rope: Rope, device: torch.device, width: int | None = None):
        self._rope, self._device = rope, device
        self._missing = 0 if width is None else width - 2 * len(rope.inv_freq)  # columns of zeros to append
        self._table = self._rows(rope.short or rope, 0, rope.short_context)

    def lookup(self, rows: np.ndarray) -> Tensor:
        """Return cos and signed sin in rows of the table, fp32 [num_rows, 2, head_dim]."""
        table = self.table(int(rows.max()) + 1)
        return table[torch.from_numpy(rows).to(table.device)]

    def table(self, num_positions: int) -> Tensor:
        """Return the table of at least positions 0 to `num_positions` - 1, fp32 [>= num_positions, 2, head_dim]."""
        covered = len(self._table) - self._rope.short_context
        if num_positions > covered:
            more = self._rows(self._rope, covered, max(num_positions, 2 * covered, 1024))
            self._table = torch.cat((self._table, more))
        return self._table

    def _rows(self, rope: Rope, first: int, last: int) -> Tensor:
        """Return the rows of the positions `first` to `last` - 1, fp32 [num_positions, 2, head_dim]."""
        scale, positions = rope.scale.to(self._device), torch.arange(first, last, device=self._device)
        angle = positions.float()[:, None] * rope.inv_freq.to(self._device)
        if rope.growth is not None:
            beta, length = rope.growth
            scale = scale * (1 + beta * torch.log1p(positions.div(length, rounding_mode="floor").float()))[:, None]
        cos, sin = angle.cos() * scale, angle.sin() * scale
        return F.pad(torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1), (0, self._missing))


class LayerKind(NamedTuple):
    """Rotary embedding, attention window and MLP of a layer."""

    rope: int  # index into the model's ropes
    window: int | None  # visible positions, including the row's own; None = all
    recurrent: bool = False  # whether it has a state of fixed size in place of attention
    query_rope: int | None = None  # rope of the queries; None = that of the keys
    sparse: bool = False  # whether its MLP is a mixture of experts
    without_mlp: bool = False
    mlp_only: bool = False  # neither attention nor a state
    sizes: tuple[int, ...] = ()  # its sizes, and whether it has its own K/V; empty if all layers have the same

    @property
    def ropes(self) -> tuple[int, int]:
        """Indices of the ropes of queries and of keys."""
        return self.rope if self.query_rope is None else self.query_rope, self.rope


def read_layers(
    folder: Path, raw: dict[str, Any], rules: FamilyRules, shape: ModelShape, length: int
) -> tuple[tuple[Rope, ...], tuple[LayerKind, ...]]:
    """Read ropes and layer kinds from a parsed config.json. `length` is the maximum context length in use."""
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}  # in transformers' order
    if not isinstance(parameters, dict):
        raise ModelError(f"{folder}: rope_parameters or rope_scaling is {parameters!r}; expected an object")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if rules.rotary and not isinstance(kind, str):
        raise ModelError(f"{folder}: rope_type={kind!r}; expected a name such as 'default'")
    plain = kind == "default" and not any("partial" in key or key == "rotary_pct" for key in {*raw, *parameters})
    windows_off = (  # as in Qwen2Config and Qwen3Config
        rules.model_type in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
        and not raw.get("use_sliding_window")
        and raw.get("layer_types") in (None, [FULL] * shape.num_layers)
    )
    simple = rules.parallel is None and rules.unrotated is None and not rules.scaled_queries
    if (not rules.windows or windows_off) and (plain or not rules.rotary) and simple:
        alike = (LayerKind(0, None),) * shape.num_layers
        if not rules.rotary:
            return (), alike  # avoid importing transformers, which takes two seconds
        theta = parameters.get("rope_theta", raw.get("rope_theta", 10000.0))
        return (_default_rope(folder, theta, 1.0, shape.head_dim)._replace(interleaved=rules.interleaved),), alike
    config = _resolved(folder, raw)
    kinds = _kinds(folder, config, shape) if rules.windows else [FULL] * shape.num_layers
    window = getattr(config, "sliding_window", None) if rules.windows else None
    if window is not None and positive(folder, "sliding_window", window, int) >= length:
        window = None  # no context exceeds it
    windows = {FULL: None, SLIDING: window}
    rotated = _rotated(folder, config, rules, kinds)
    if not rules.rotary or not any(rotated):
        return (), tuple(LayerKind(0, windows[layer_kind]) for layer_kind in kinds)
    rope_parameters = config.rope_parameters
    nested = FULL in rope_parameters or SLIDING in rope_parameters
    ropes: list[Rope] = []
    index: dict[str, int] = {}
    for layer_kind in dict.fromkeys(kinds):
        section = rope_parameters.get(layer_kind) if nested else rope_parameters
        if not isinstance(section, dict):
            raise ModelError(f"{folder}: rope_parameters={rope_parameters!r} have no entry for {layer_kind!r}")
        if nested or not ropes:
            head_dim = shape.layer(kinds.index(layer_kind)).head_dim
            ropes.append(_rope(folder, config, section, layer_kind if nested else None, head_dim, length))
        index[layer_kind] = len(ropes) - 1
    ropes = [rope._replace(interleaved=rules.interleaved) for rope in ropes]
    of_layers = [index[layer_kind] for layer_kind in kinds]
    if not all(rotated):
        still = torch.zeros(shape.head_dim // 2, dtype=torch.float32, device="cpu")
        ropes.append(Rope(still, still + 1, shape.head_dim))
        of_layers = [rope if turns else len(ropes) - 1 for rope, turns in zip(of_layers, rotated, strict=True)]
    short = max(rope.short_context for rope in ropes)  # tables have the same rows
    ropes = [rope if rope.short_context == short else rope._replace(short=rope, short_context=short) for rope in ropes]
    layers = [LayerKind(rope, windows[layer_kind]) for rope, layer_kind in zip(of_layers, kinds, strict=True)]
    beta = rope_parameters.get("llama_4_scaling_beta") if rules.scaled_queries else None
    if beta is not None:
        length = positive(folder, _ORIGINAL, rope_parameters.get(_ORIGINAL), int)
        growth = positive(folder, "llama_4_scaling_beta", beta, float), length
        layers = [layer._replace(query_rope=len(ropes) + layer.rope) for layer in layers]
        ropes += [rope._replace(growth=growth) for rope in ropes]
    return tuple(ropes), tuple(layers)


def _resolved(folder: Path, raw: dict[str, Any]) -> Any:
    """Parse the config with transformers, which resolves defaults and legacy keys."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(**{name: value for name, value in raw.items() if name != "architectures"})
        if getattr(config, "rope_parameters", None) is not None:
            config.standardize_rope_params()
    except Exception as error:  # config classes may raise anything
        raise ModelError(f"{folder}: transformers rejects config.json: {error}") from error
    return config


def _kinds(folder: Path, config: Any, shape: ModelShape) -> list[str]:
    """Return the attention type of each layer: full or sliding window."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [SLIDING] * shape.num_layers
    if len(kinds) != shape.num_layers or not {*kinds} <= {FULL, SLIDING}:
        raise VariantError(
            f"{folder}: layer_types={kinds!r}; supported: {FULL!r} or {SLIDING!r} for each of {shape.num_layers} layers"
        )
    return list(kinds)


def _rotated(folder: Path, config: Any, rules: FamilyRules, kinds: list[str]) -> list[bool]:
    """Return whether each layer has a rotary embedding (`FamilyRules.unrotated`)."""
    if rules.unrotated is None:
        return [True] * len(kinds)
    slides = getattr(config, "sliding_window", None) is not None
    if rules.unrotated in (FULL, BESIDE_SLIDING):
        return [(slides and kind == SLIDING) or (not slides and rules.unrotated == BESIDE_SLIDING) for kind in kinds]
    flags = getattr(config, rules.unrotated)
    if not isinstance(flags, list) or len(flags) != len(kinds) or not {*flags} <= {0, 1}:
        raise ModelError(f"{folder}: {rules.unrotated}={flags!r}; expected 0 or 1 for each of {len(kinds)} layers")
    return [bool(flag) for flag in flags]


def _rope(
    folder: Path, config: Any, parameters: dict[str, Any], layer_type: str | None, head_dim: int, length: int
) -> Rope:
    """Build one rope. transformers computes scaled types."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, partial = parameters.get("rope_type", "default"), parameters.get("partial_rotary_factor", 1.0)
    if kind == "default":
        return _default_rope(folder, parameters.get("rope_theta", 10000.0), partial, head_dim)
    if kind not in ROPE_INIT_FUNCTIONS:
        raise ModelError(f"{folder}: rope_type={kind!r}; supported: default, {', '.join(ROPE_INIT_FUNCTIONS)}")
    config.head_dim = head_dim  # some configs leave it null

    def rope_of(length: int) -> Rope:
        try:
            with torch.device("cpu"):  # some functions ignore the device argument
                inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](
                    config, device=torch.device("cpu"), seq_len=length, layer_type=layer_type
                )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{folder}: rope_parameters={parameters!r} are invalid: {error}") from error
        return _padded(folder, inv_freq.float(), float(scale), head_dim)

    rope = rope_of(length)
    if kind != "longrope" or length <= (original := parameters["original_max_position_embeddings"]):
        return rope
    short = rope_of(original)
    return rope if short.key == rope.key else rope._replace(short=short, short_context=original)


def positive(folder: Path, name: str, value: Any, kind: type) -> Any:
    """Return a positive number of config.json as an int or float. Raises ModelError for any other value."""
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float) or not value > 0:
        raise ModelError(f"{folder}: {name}={value!r} in config.json; expected a positive {kind.__name__}")
    return kind(value)


def _default_rope(folder: Path, theta: object, partial: object, head_dim: int) -> Rope:
    factor = positive(folder, "partial_rotary_factor", partial, float)
    if factor > 1:
        raise ModelError(f"{folder}: partial_rotary_factor={partial!r} in config.json; expected at most 1")
    dim = int(head_dim * factor)
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    return _padded(folder, 1.0 / (positive(folder, "rope_theta", theta, float) ** exponent), 1.0, head_dim)


def _padded(folder: Path, inv_freq: Tensor, scale: float, head_dim: int) -> Rope:
    """Pad a rope with frequency 0 and scale 1 for dimensions without rotation."""
    turned, half = len(inv_freq), head_dim // 2
    if head_dim % 2 or not 0 < turned <= half:
        raise ModelError(f"{folder}: {2 * turned} rotary dimensions of a head of {head_dim}; both must be even")
    frequencies = torch.zeros(half, dtype=torch.float32, device="cpu")
    frequencies[:turned] = inv_freq
    scales = torch.ones(half, dtype=torch.float32, device="cpu")
    scales[:turned] = scale
    return Rope(frequencies, scales, 2 * turned)
