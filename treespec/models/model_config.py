"""`ModelConfig`: the architecture of a checkpoint, read from its config.json."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from treespec.errors import ModelError, VariantError
from treespec.models.layer_kinds import LayerKind, Rope, positive, read_layers
from treespec_weights.documents import read_config, read_generation_config
from treespec_weights.dtypes import DTYPES
from treespec_weights.errors import CheckpointConfigError, Problem
from treespec_weights.factors import Factors
from treespec_weights.families import family_of
from treespec_weights.files import resolve_folder
from treespec_weights.quant_config import scheme_of
from treespec_weights.quant_schemes import QuantScheme
from treespec_weights.rules import ACTIVATIONS, Activation, FamilyRules, ModelShape


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a checkpoint, as the native decoder needs it."""

    folder: Path
    rules: FamilyRules
    shape: ModelShape
    norm_eps: float  # epsilon of all norms, for a residual stream divided by `stream_scale`
    activation: Activation  # activation of the MLP
    parallel: bool  # attention and MLP read the same residual stream (parallel block)
    query_scale: float  # factor on attention scores
    score_cap: float | None  # soft cap c of scores, x -> c tanh(x / c); None = none
    logit_cap: float | None  # soft cap of logits
    logit_scale: float  # factor on logits, applied with the weight of the final norm
    embed_scale: float  # factor on embeddings
    # Factor on what layers add to the residual stream. The decoder divides the whole stream by it instead: norms undo
    # that, if their epsilon is divided by its square
    stream_scale: float
    ropes: tuple[Rope, ...]  # rotary embeddings; () for learned positions
    layers: tuple[LayerKind, ...]  # by layer, its rope and window
    max_positions: int
    dtype: torch.dtype  # dtype of the stored weights
    eos_token_ids: tuple[int, ...]  # tokens that end a text
    quantization: QuantScheme | None = None  # the checkpoint's own
    head_rows: int | None = None  # rows of a draft's reduced head; None = one per token
    value_scale: float = 1.0  # factor on the values of attention
    step_scale: float = 1.0  # factor on Mamba 2's time steps, before their bias
    factors: tuple[tuple[str, float], ...] = ()  # parameter names in a layer and factors on them, see `prepare`

    @property
    def num_parameters(self) -> int:
        """Number of parameters, without the missing rows of a reduced head."""
        rows, shape = self.head_rows, self.shape
        whole = shape.vocab_size if "lm_head" in shape.parameters() else 0
        return shape.num_parameters() + (0 if rows is None else (rows - whole) * shape.hidden_size)

    @property
    def without_kernel(self) -> str | None:
        """The part of this model without a Triton kernel, or None if there is a kernel for everything."""
        if self.shape.recurrent is not None and self.shape.recurrent.beside:
            return "recurrent states beside attention in a layer"
        latent = self.shape.experts is not None and self.shape.experts.latent_size
        return "experts that read a projection" if latent else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        attending = (layer.window for i, layer in enumerate(self.layers) if self.shape.attends(i))
        return tuple(dict.fromkeys(attending)) or (None,)

    @property
    def attentions(self) -> tuple[tuple[int, int, int | None], ...]:
        """KV heads, head size and window of the layers with attention, each combination once."""
        of_layers = [self.attention_of(i) for i in range(len(self.layers)) if self.shape.attends(i)]
        return tuple(dict.fromkeys(of_layers)) or ((self.shape.num_kv_heads, self.shape.head_dim, None),)

    def attention_of(self, i: int) -> tuple[int, int, int | None]:
        sizes = self.shape.layer(i)
        return sizes.num_kv_heads, sizes.head_dim, self.layers[i].window

    @cached_property
    def short_context(self) -> int:
        """Maximum positions of a request with longrope's short factors; 0 if all requests have the same factors."""
        return max((rope.short_context for rope in self.ropes), default=0)

    def first_rotation(self, max_len: int) -> int:
        """Return the row of the RoPE tables for position 0 of a request of at most `max_len` positions."""
        return self.short_context if max_len > self.short_context else 0

    @property
    def compute_key(self) -> tuple[object, ...]:
        """Key shared by models that differ only in their weights."""
        rules, ropes = self.rules, tuple(rope.key for rope in self.ropes)
        components = rules.norm, rules.norm_after_rope, rules.extra_positions, self.norm_eps, self.activation
        scales = self.parallel, self.query_scale, self.score_cap, self.logit_cap, self.embed_scale, self.stream_scale
        factors = self.value_scale, self.step_scale, self.factors
        return self.shape, *components, *scales, *factors, ropes, self.layers, self.quantization, self.head_rows

    def embed_scale_in(self, dtype: torch.dtype) -> float:
        """Return the factor on embeddings, which Gemma rounds to the `dtype` that it computes in."""
        if not self.rules.scaled_embedding:
            return self.embed_scale
        return float(torch.tensor(self.embed_scale, dtype=dtype, device="cpu"))

    @classmethod
    def from_hf(cls, folder: str | Path, max_model_len: int | None = None) -> "ModelConfig":
        """Read config.json and generation_config.json of a Hugging Face folder.

        Args:
            max_model_len: the context in use. Length-dependent frequencies are fixed for it (dynamic), or for each
                request (longrope), so that a key does not depend on when it was computed.

        Raises:
            CheckpointError: missing, contradictory or unsupported config values. OSError: no such folder.
            ModelError: an unsupported activation, RoPE type or layer type.
        """
        folder = resolve_folder(folder)
        raw = read_config(folder)
        return cls.from_raw(folder, raw, family_of(raw, folder), max_model_len)

    @classmethod
    def from_raw(
        cls, folder: Path, raw: dict[str, Any], rules: FamilyRules, max_model_len: int | None = None
    ) -> "ModelConfig":
        """Read a parsed config.json; arguments and errors as in `from_hf`."""
        shape = ModelShape.from_hf(raw, rules, folder)
        raw = {**rules.assumed, **raw}
        named = raw.get(rules.activation)
        if not isinstance(named, str) or named not in ACTIVATIONS:
            raise VariantError(f"{folder}: {rules.activation}={named!r}; supported: {', '.join(ACTIVATIONS)}")
        max_positions = positive(folder, rules.max_positions, raw.get(rules.max_positions, 2048), int)
        eps = rules.norm_eps
        if isinstance(eps, str):
            eps = positive(folder, eps, raw.get(eps, 1e-5 if rules.norm == "layer" else 1e-6), float)
        ropes, layers = read_layers(folder, raw, rules, shape, min(max_model_len or max_positions, max_positions))
        sizes: list[tuple[int, ...]] = [(*layer[:3], layer.kv_of == i) for i, layer in enumerate(shape.sizes)]
        layers = tuple(
            kind._replace(
                recurrent=shape.is_recurrent(i),
                sparse=shape.experts is not None and i in shape.experts.layers,
                without_mlp=i in shape.without_mlp,
                mlp_only=i in shape.mlp_only,
                sizes=sizes[i] if sizes else (),
            )
            for i, kind in enumerate(layers)
        )
        parallel = rules.parallel is not None and raw.get(rules.parallel, True)
        if not isinstance(parallel, bool):
            raise ModelError(f"{folder}: {rules.parallel}={parallel!r}; expected true or false")

        def scale(key: str | None, default: float = 1.0) -> float:
            return default if key is None or raw.get(key) is None else positive(folder, key, raw[key], float)

        problems: list[Problem] = []
        factors = Factors() if rules.factors is None else rules.factors(raw, problems)
        if problems:
            raise CheckpointConfigError(folder, problems)
        stream_scale = scale(rules.residual_scale) * factors.stream
        stored = raw.get("dtype") or raw.get("torch_dtype") or "float32"
        dtype = DTYPES.get(stored) if isinstance(stored, str) else None
        if dtype is None:
            raise ModelError(f"{folder}: dtype={stored!r}; supported: {', '.join(DTYPES)}")
        ends = read_generation_config(folder).get("eos_token_id", raw.get("eos_token_id"))
        return cls(
            folder=folder,
            rules=rules,
            shape=shape,
            norm_eps=float(eps) / stream_scale**2,
            activation="clamped_swiglu" if rules.clamped else ACTIVATIONS[named],
            parallel=parallel,
            query_scale=scale(rules.score_scale, scale(rules.query_scalar, shape.head_dim) ** -0.5) * factors.scores,
            score_cap=_soft_cap(folder, raw, rules.score_cap),
            logit_cap=_soft_cap(folder, raw, rules.logit_cap),
            logit_scale=scale(rules.logit_scale) / scale(rules.logit_divisor),
            embed_scale=scale(rules.embed_scale, shape.hidden_size**0.5 if rules.scaled_embedding else 1.0),
            stream_scale=stream_scale,
            ropes=ropes,
            layers=layers,
            max_positions=max_positions,
            dtype=dtype,
            eos_token_ids=end_tokens(folder, ends),
            quantization=scheme_of(raw, folder),
            value_scale=factors.values,
            step_scale=factors.steps,
            factors=tuple(factors.parameters.items()),
        )


def _soft_cap(folder: Path, raw: dict[str, Any], key: str | None) -> float | None:
    """Read a soft cap; None if the family or the model has none."""
    return None if key is None or raw.get(key) is None else positive(folder, key, raw[key], float)


def end_tokens(folder: Path, value: object) -> tuple[int, ...]:
    """Normalise eos_token_id (an id, a list or None) to a tuple. Raises ModelError for anything else."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
        raise ModelError(f"{folder}: eos_token_id={value!r}; expected a token id or a list of them")
    return tuple(ids)
