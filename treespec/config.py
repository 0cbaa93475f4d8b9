"""Configurations of speculation, models and the engine, validated before anything is built."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Never, Self

import torch

from treespec.errors import ConfigError, ModelError, VariantError, reject_unknown
from treespec.models.layer_kinds import LayerKind, Rope, read_layers
from treespec.utils.scalars import to_python
from treespec_weights.families import family_of
from treespec_weights.files import resolve_folder
from treespec_weights.quant_schemes import QuantScheme, scheme_of
from treespec_weights.rules import ACTIVATIONS, Activation, FamilyRules, ModelShape, read_config, read_generation_config

POLICIES = ("auto", "static", "dynamic")
VERIFICATIONS = ("coupled", "naive", "rejection", "traversal")
RANDOM_DRAWS = ("rejection", "traversal")  # rules for children sampled from a draft's distribution
DRAWS = ("cross-source", "without-replacement", "with-replacement")
MAX_NODES = 1024
QUANTIZATIONS = ("int8", "int4")
AUTO_NODES = 32  # the largest automatic tree


def _plain(value: Any) -> Any:
    """Convert lists and arrays to tuples and numpy integers to Python's; leave the rest to validation."""
    value = to_python(value)
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value


@dataclass(frozen=True, init=False)
class SpecConfig:
    """Speculative decoding options of a request.

    Args:
        nodes: tree size, i.e. rows of the target pass per request, root included (16 = 15 drafted tokens). "auto" sizes
            trees by measured pass costs and draft probabilities, down to plain decoding. An int is a fixed size,
            reached as far as the drafts propose enough within `max_depth`; 0 and 1 mean plain decoding.
        max_depth: maximum tree depth.
        policy: "dynamic" expands the nodes of largest probability; "static" gives every node of depth d its
            `branching[d]` most likely children; "auto" is "static" if `branching` is given, otherwise "dynamic", or,
            for rules that need every drawn token, a number of draws per node that follows its probability.
        branching: children per node, by depth, for "static".
        verification: acceptance rule of sampled tokens (greedy decoding follows the target's argmax). "coupled" drafts
            with the target's sampling noise, "naive" without it; both emit exactly the tokens of plain decoding with
            the same seed. "rejection" (SpecInfer, arXiv 2305.09781) and "traversal" (arXiv 2505.12398) sample children
            and preserve the distribution, not the tokens (`treespec.verification.verify`).
        draws: for "rejection" and "traversal". "cross-source": siblings are distinct across SSMs;
            "without-replacement": distinct per SSM; "with-replacement": independent draws.
        sources: draft sources. "ssm": all SSMs; an SSM's name: that one; "lookup": n-gram lookup in the request's own
            text; "suffix": lookup in the engine's other outputs (needs `LLM(suffix_tokens=...)`); "grammar": forced
            tokens of a structured output; a `Drafter`'s name: that one. None = all, () = none. Outputs of requests
            without "suffix" are not stored for others.
        max_ssms: maximum number of SSMs per round, chosen by their acceptance on the request; None = all, or, with
            nodes="auto", those that pay off. Drafts with another tokenizer are not counted.

    Raises:
        ConfigError: an unknown keyword, a value out of range, or contradictory values.
    """

    nodes: int | Literal["auto"]
    max_depth: int
    policy: str
    branching: tuple[int, ...] | None
    verification: str
    draws: str
    sources: tuple[str, ...] | None
    max_ssms: int | None

    def __init__(
        self,
        *,
        nodes: int | Literal["auto"] = "auto",
        max_depth: int = 16,
        policy: str = "auto",
        branching: Sequence[int] | None = None,
        verification: str = "coupled",
        draws: str = "cross-source",
        sources: Sequence[str] | None = None,
        max_ssms: int | None = None,
        **unknown: Never,
    ) -> None:
        names = [field.name for field in fields(SpecConfig)]
        reject_unknown("SpecConfig", unknown, names)
        values = (nodes, max_depth, policy, branching, verification, draws, sources, max_ssms)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(self, name, _plain(value))
        self._check()

    def _check(self) -> None:
        nodes = self.nodes
        if nodes != "auto" and (isinstance(nodes, bool) or not isinstance(nodes, int) or not 0 <= nodes <= MAX_NODES):
            raise ConfigError(f'nodes={nodes!r}; valid: "auto" or an int from 0 to {MAX_NODES} (0 and 1 mean plain)')
        if not isinstance(self.max_depth, int) or isinstance(self.max_depth, bool) or not 1 <= self.max_depth <= 64:
            raise ConfigError(f"max_depth={self.max_depth!r}; valid: an int from 1 to 64")
        reject_unknown("SpecConfig policy", [self.policy], POLICIES)
        reject_unknown("SpecConfig verification", [self.verification], VERIFICATIONS)
        reject_unknown("SpecConfig draws", [self.draws], DRAWS)
        if self.verification in RANDOM_DRAWS and self.policy == "dynamic":
            raise ConfigError(
                f'policy="dynamic" drops drawn tokens, and verification={self.verification!r} needs all of '
                'them; use policy="auto" or "static", or verification="coupled" or "naive"'
            )
        if self.verification not in RANDOM_DRAWS and self.draws != DRAWS[0]:
            raise ConfigError(
                f'draws={self.draws!r} goes with verification="rejection" or "traversal"; {self.verification!r} draws '
                "nothing at random"
            )
        self._check_branching()
        if self.sources is not None:
            if not isinstance(self.sources, tuple) or not all(isinstance(source, str) for source in self.sources):
                raise ConfigError(f"sources={self.sources!r}; valid: None or a tuple such as ('ssm', 'lookup')")
        ssms = self.max_ssms
        if ssms is not None and (isinstance(ssms, bool) or not isinstance(ssms, int) or ssms < 1):
            raise ConfigError(f"max_ssms={ssms!r}; valid: None or an int of at least 1")

    def _check_branching(self) -> None:
        if self.branching is None:
            if self.policy == "static":
                raise ConfigError('policy="static" needs branching, children per node by depth, such as (4, 2, 1)')
            return
        if self.policy == "dynamic":
            raise ConfigError(f'branching={self.branching!r} goes with policy="static", not with "dynamic"')
        if not isinstance(self.branching, tuple) or not self.branching or len(self.branching) > self.max_depth:
            raise ConfigError(
                f"branching={self.branching!r}; valid: a tuple of 1 to max_depth={self.max_depth} ints, as (4, 2, 1)"
            )
        if any(isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= 64 for k in self.branching):
            raise ConfigError(f"branching={self.branching!r}; valid: ints from 1 to 64")
        size = self.static_nodes
        if size > MAX_NODES:
            raise ConfigError(f"branching={self.branching!r} makes {size} nodes; valid: at most {MAX_NODES}")
        if self.nodes not in ("auto", 0, 1, size):
            raise ConfigError(
                f'nodes={self.nodes} but branching={self.branching!r} makes {size}; drop one, or nodes="auto"'
            )

    @property
    def static_nodes(self) -> int:
        """Number of nodes of the static topology, root included."""
        total, level = 1, 1
        for k in self.branching or ():
            level *= k
            total += level
        return total

    @property
    def max_nodes(self) -> int:
        """Maximum tree size, root included."""
        if self.is_plain:
            return 1
        if self.branching:
            return self.static_nodes
        return AUTO_NODES if self.nodes == "auto" else int(self.nodes)

    def allows(self, kind: str, name: str) -> bool:
        """Whether a source of this kind and name is enabled."""
        return self.sources is None or kind in self.sources or name in self.sources

    def check_sources(self, names: Sequence[str], remembers: bool, drafters: Sequence[str] = ()) -> None:
        """Check that an engine has all `sources`.

        Args:
            names: of its SSMs.
            remembers: whether it stores its outputs, as "suffix" requires.
            drafters: names of its `Drafter` objects.

        Raises:
            ConfigError: a source is missing.
        """
        kinds = ("lookup", *(("suffix",) if remembers else ()), "grammar")
        available = (*(("ssm", *names) if names else ()), *drafters, *kinds)
        for source in self.sources or ():
            if source == "suffix" and source not in available:
                raise ConfigError(
                    f"sources={self.sources!r}: this engine does not store its outputs; use "
                    "LLM(suffix_tokens=262144), or another number of tokens to store"
                )
            if source not in available:
                close = difflib.get_close_matches(source, available, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise ConfigError(f"sources={self.sources!r}: {hint}this engine has {', '.join(map(repr, available))}")

    @property
    def is_plain(self) -> bool:
        return self.nodes in (0, 1) or self.sources == ()

    @property
    def is_adaptive(self) -> bool:
        """Whether the planner chooses tree sizes."""
        return self.nodes == "auto" and self.branching is None

    @classmethod
    def off(cls) -> Self:
        """Plain decoding: one-node trees."""
        return cls(nodes=1)

    @classmethod
    def resolve(cls, spec: "SpecConfig | str | dict[str, Any] | None", default: "SpecConfig") -> "SpecConfig":
        """Resolve a call's `spec=`: None is the engine's default, "off" plain decoding."""
        if spec is None:
            return default
        if spec == "off":
            return cls.off()
        if isinstance(spec, dict):  # as from dataclasses.asdict
            return cls(**spec)
        if not isinstance(spec, SpecConfig):
            raise ConfigError(f'spec={spec!r}; valid: a SpecConfig, "off" or None')
        return spec


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a checkpoint, as the native decoder needs it.

    Attributes:
        folder, rules, shape: path, family rules and sizes.
        norm_eps: of all norms.
        activation: of the MLP.
        parallel: attention and MLP read the same residual stream (parallel block).
        query_scale: factor on attention scores.
        score_cap, logit_cap: soft caps c of scores and logits, x -> c tanh(x / c); None = none.
        embed_scale: factor on embeddings, rounded to the model's dtype.
        ropes: rotary embeddings; () for learned positions.
        layers: by layer, its rope and window.
        max_positions: maximum context length.
        dtype: of the stored weights.
        eos_token_ids: tokens that end a text.
    """

    folder: Path
    rules: FamilyRules
    shape: ModelShape
    norm_eps: float
    activation: Activation
    parallel: bool
    query_scale: float
    score_cap: float | None
    logit_cap: float | None
    embed_scale: float
    ropes: tuple[Rope, ...]
    layers: tuple[LayerKind, ...]
    max_positions: int
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    quantization: QuantScheme | None = None  # the checkpoint's own
    head_rows: int | None = None  # of a draft's reduced head; None = the vocabulary

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Distinct windows of the layers."""
        return tuple(dict.fromkeys(layer.window for layer in self.layers))

    @cached_property
    def short_context(self) -> int:
        """Most positions of a request that longrope's short factors serve; 0 if all requests have the same factors."""
        return max((rope.short_context for rope in self.ropes), default=0)

    def first_rotation(self, max_len: int) -> int:
        """Return the row of the RoPE tables for position 0 of a request of at most `max_len` positions."""
        return self.short_context if max_len > self.short_context else 0

    @property
    def compute_key(self) -> tuple[object, ...]:
        """Key shared by models that differ only in their weights."""
        rules, ropes = self.rules, tuple(rope.key for rope in self.ropes)
        return (
            self.shape,
            rules.norm,
            rules.extra_positions,
            self.norm_eps,
            self.activation,
            self.parallel,
            self.query_scale,
            self.score_cap,
            self.logit_cap,
            self.embed_scale,
            ropes,
            self.layers,
            self.quantization,
            self.head_rows,
        )

    @classmethod
    def from_hf(cls, folder: str | Path, max_model_len: int | None = None) -> "ModelConfig":
        """Read config.json and generation_config.json of a Hugging Face folder.

        Args:
            folder: the checkpoint's folder.
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
        max_positions = _number(folder, raw, rules.max_positions, 2048, int)
        eps = rules.norm_eps
        if isinstance(eps, str):
            eps = _number(folder, raw, eps, 1e-5 if rules.norm == "layer" else 1e-6, float)
        ropes, layers = read_layers(folder, raw, rules, shape, min(max_model_len or max_positions, max_positions))
        parallel = rules.parallel is not None and raw.get(rules.parallel, True)
        if not isinstance(parallel, bool):
            raise ModelError(f"{folder}: {rules.parallel}={parallel!r}; expected true or false")
        scalar = shape.head_dim
        if rules.query_scalar is not None:
            scalar = _number(folder, raw, rules.query_scalar, shape.head_dim, float)
        stored = raw.get("dtype") or raw.get("torch_dtype") or "float32"
        dtype = _DTYPES.get(stored) if isinstance(stored, str) else None
        if dtype is None:
            raise ModelError(f"{folder}: dtype={stored!r}; supported: {', '.join(_DTYPES)}")
        return cls(
            folder=folder,
            rules=rules,
            shape=shape,
            norm_eps=float(eps),
            activation=ACTIVATIONS[named],
            parallel=parallel,
            query_scale=float(scalar) ** -0.5,
            score_cap=_soft_cap(folder, raw, rules.score_cap),
            logit_cap=_soft_cap(folder, raw, rules.logit_cap),
            embed_scale=shape.hidden_size**0.5 if rules.scaled_embedding else 1.0,
            ropes=ropes,
            layers=layers,
            max_positions=max_positions,
            dtype=dtype,
            eos_token_ids=end_tokens(
                folder, read_generation_config(folder).get("eos_token_id", raw.get("eos_token_id"))
            ),
            quantization=scheme_of(raw, folder),
        )


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _number(folder: Path, raw: dict[str, Any], key: str, default: float, kind: type) -> Any:
    """Read a positive number from config.json."""
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float) or not value > 0:
        raise ModelError(f"{folder}: {key}={value!r} in config.json; expected a positive {kind.__name__}")
    return kind(value)


def _soft_cap(folder: Path, raw: dict[str, Any], key: str | None) -> float | None:
    """Read a soft cap; None if the family or the model has none."""
    if key is None or raw.get(key) is None:
        return None
    return float(_number(folder, raw, key, 1.0, float))


def end_tokens(folder: Path, value: object) -> tuple[int, ...]:
    """Normalise eos_token_id (an id, a list or None) to a tuple. Raises ModelError for anything else."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
        raise ModelError(f"{folder}: eos_token_id={value!r}; expected a token id or a list of them")
    return tuple(ids)


@dataclass(frozen=True)
class EngineConfig:
    """Resolved engine settings, fixed for its lifetime as bit equality depends on them.

    `prefill_chunk` is the maximum number of prompt rows per pass. `max_tree_slots` limits a request's scratch slots.
    `num_threads` is torch's; changing it may change bits.
    """

    device: torch.device
    dtype: torch.dtype
    exact: bool
    max_num_seqs: int
    max_model_len: int
    prefill_chunk: int
    max_tree_slots: int
    num_threads: int
    linear: str
    attention: str
    compile: bool
    quantization: str | None  # of the target's layers
