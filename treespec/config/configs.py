"""Configurations of speculation and of the engine, validated before anything is built."""

from __future__ import annotations

import difflib
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from treespec.errors import ConfigError
from treespec.utils.options import check_values, option, rejects_unknown
from treespec.utils.scalars import to_python

if TYPE_CHECKING:
    import torch

VERIFICATIONS = ("coupled", "naive", "rejection", "traversal")
RANDOM_DRAWS = ("rejection", "traversal")  # rules for children sampled from a draft's distribution
DRAWS = ("cross-source", "without-replacement", "with-replacement")
MAX_NODES = 1024
QUANTIZATIONS = ("int8", "int4")
AUTO_NODES = 32  # maximum nodes of an automatic tree


def _plain(value: Any) -> Any:
    """Convert lists and arrays to tuples, and numpy integers to Python ones; validation rejects the rest."""
    value = to_python(value)
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value


@rejects_unknown
@dataclass(frozen=True, kw_only=True)
class SpecConfig:
    """Speculative decoding options of a request.

    Args:
        nodes: tree size, i.e. rows of the target pass per request, root included (16 = 15 drafted tokens). "auto" sizes
            trees by measured pass costs and draft probabilities, down to plain decoding. An int is a fixed size (less
            if the drafts propose fewer nodes within `max_depth`); 0 and 1 mean plain decoding.
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
            text; "suffix": lookup in the engine's other outputs (needs `LLM(suffix_tokens=...)`); "table": the n-gram
            table; "grammar": forced tokens of a structured output; a `Drafter`'s name: that one. None = all, () = none.
            Outputs of requests without "suffix" or "table" are not stored for others by this source.
        max_ssms: maximum number of SSMs per round, chosen by their acceptance on the request; None = all, or, with
            nodes="auto", those that pay off. Drafts with another tokenizer are not counted.

    Raises:
        ConfigError: an unknown keyword, a value out of range, or contradictory values.
    """

    nodes: int | Literal["auto"] = "auto"
    max_depth: int = option(16, ge=1, le=64)
    policy: str = option("auto", choices=("auto", "static", "dynamic"))
    branching: Sequence[int] | None = None
    verification: str = option("coupled", choices=VERIFICATIONS)
    draws: str = option("cross-source", choices=DRAWS)
    sources: Sequence[str] | None = None
    max_ssms: int | None = option(None, ge=1)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, _plain(value))
        check_values(self)
        nodes = self.nodes
        if nodes != "auto" and (isinstance(nodes, bool) or not isinstance(nodes, int) or not 0 <= nodes <= MAX_NODES):
            raise ConfigError(f'nodes={nodes!r}; valid: "auto" or an int from 0 to {MAX_NODES} (0 and 1 mean plain)')
        if self.verification in RANDOM_DRAWS and self.policy == "dynamic":
            raise ConfigError(
                f'policy="dynamic" drops drawn tokens, and verification={self.verification!r} needs all of '
                'them; use policy="auto" or "static", or verification="coupled" or "naive"'
            )
        if self.verification not in RANDOM_DRAWS and self.draws != DRAWS[0]:
            raise ConfigError(
                f'draws={self.draws!r} requires verification="rejection" or "traversal"; {self.verification!r} draws '
                "nothing at random"
            )
        self._check_branching()
        sources = () if self.sources is None else self.sources
        if not isinstance(sources, tuple) or not all(isinstance(source, str) for source in sources):
            raise ConfigError(f"sources={sources!r}; valid: None or a tuple such as ('ssm', 'lookup')")

    def _check_branching(self) -> None:
        if self.branching is None:
            if self.policy == "static":
                raise ConfigError('policy="static" needs branching, children per node by depth, such as (4, 2, 1)')
            return
        if self.policy == "dynamic":
            raise ConfigError(f'branching={self.branching!r} requires policy="static", not "dynamic"')
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
        return 1 + sum(itertools.accumulate(self.branching or (), operator.mul))

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
        """Raise ConfigError unless the engine has all requested sources; `remembers`: it stores its outputs."""
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
    def resolve(cls, spec: SpecConfig | str | dict[str, Any] | None, default: SpecConfig) -> SpecConfig:
        """Resolve a call's `spec=`: None is the engine's default, "off" plain decoding."""
        if spec is None:
            return default
        if spec == "off":
            return cls.off()
        if isinstance(spec, dict):  # from dataclasses.asdict
            return cls(**spec)
        if not isinstance(spec, SpecConfig):
            raise ConfigError(f'spec={spec!r}; valid: a SpecConfig, "off" or None')
        return spec


@dataclass(frozen=True)
class EngineConfig:
    """Resolved engine settings, fixed for its lifetime as bit equality depends on them.

    `max_num_batched_tokens` is the maximum number of prompt rows per pass. `max_tree_slots` limits a request's scratch
    slots. `num_threads` is torch's; changing it may change bits.
    """

    device: torch.device
    dtype: torch.dtype
    exact: bool
    max_num_seqs: int
    max_model_len: int
    scheduling_policy: str
    max_num_batched_tokens: int
    max_tree_slots: int
    num_threads: int
    linear: str
    attention: str
    compile: bool
    quantization: str | None  # the target's
