"""Benchmark modes: treespec, transformers, and verification rules on a fixed topology."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

from treespec.config.configs import RANDOM_DRAWS, VERIFICATIONS, SpecConfig
from treespec.errors import ConfigError

PLAIN = "plain"
_WIDEST, _DEEPEST = 4, 6
_COMPARED_RULES = {"traversal": ("rejection", "coupled"), "rejection": ("naive",), "coupled": ("naive",)}


@dataclass(frozen=True)
class Mode:
    """A treespec mode."""

    name: str  # name in `--only` and the JSON document, without spaces and commas
    label: str  # name in tables
    options: dict[str, Any] | None  # arguments of `SpecConfig`; None = plain decoding
    keeps_tokens: bool = True  # whether tokens must equal plain decoding with the same seed
    compared_with: tuple[str, ...] = ()  # names of the modes to subtract from its acceptance length

    @property
    def spec(self) -> SpecConfig | str:
        return "off" if self.options is None else SpecConfig(**self.options)

    @property
    def figures(self) -> dict[str, Any]:
        spec = SpecConfig.resolve(self.spec, SpecConfig())
        branching = spec.branching
        return {
            "engine": "treespec",
            "label": self.label,
            "nodes": spec.static_nodes if branching else spec.nodes,
            "k": len(branching) if branching and set(branching) == {1} else None,
            "branching": list(branching) if branching else None,
            "verification": None if spec.is_plain else spec.verification,
            "sources": [] if spec.is_plain else list(spec.sources or ()) or "all",
        }


@dataclass(frozen=True)
class Peer:
    """A transformers mode."""

    name: str
    label: str
    kind: Literal["plain", "assisted", "lookup"]  # kind of generation
    draft: str | None = None  # name of the assistant model, for "assisted"
    k: int | None = None  # drafted tokens per round, for "assisted" and "lookup"; None = transformers' own schedule

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "engine": "transformers",
            "label": self.label,
            "nodes": None if self.k is None else 1 + self.k,
            "k": self.k,
            "branching": None,
            "verification": None,
            "sources": [] if self.kind == "plain" else [self.draft or "lookup"],
        }

    @property
    def batch_one_only(self) -> bool:
        """Whether the mode supports batch 1 only, as transformers' assisted decoding and prompt lookup do."""
        return self.kind != "plain"


def our_modes(
    ssms: Sequence[str], k_values: Sequence[int], nodes: Sequence[int], combine: Sequence[str] = ()
) -> list[Mode]:
    """Return plain decoding, chains, trees (of each source, of all, and of the sets `combine`), and the default."""
    modes = [Mode(PLAIN, "plain decoding", None)]
    if ssms:
        for k in k_values:
            deepest = max(SpecConfig().max_depth, k)
            chain = {"policy": "static", "branching": (1,) * k, "max_depth": deepest, "sources": ("ssm",)}
            modes.append(Mode(f"chain-k{k}", f"chain, K={k}", chain))
    # name, label, sources, and names of the trees to compare with
    Tree = tuple[str, str, tuple[str, ...], tuple[str, ...]]
    singles: list[Tree] = [(name, name, (name,), ()) for name in ssms] if len(ssms) > 1 else []
    single_names = tuple(name for name, *_ in singles)
    merged: list[Tree] = [("ssms", "all SSMs" if len(ssms) > 1 else ssms[0], ("ssm",), single_names)] if ssms else []
    if len(ssms) > 1:  # only the SSM with the largest mixture weight drafts, in the time of one SSM
        merged.append(("trusted", "one SSM per round", ("ssm",), single_names))
    lookup: list[Tree] = [("lookup", "lookup", ("lookup",), ())]
    ssm_and_lookup = ("ssm", "lookup")
    everything: list[Tree] = [("everything", "SSMs + lookup", ssm_and_lookup, ("ssms", "lookup"))] if ssms else []
    if len(ssms) > 1:
        everything.append(("trusted-lookup", "one SSM per round + lookup", ssm_and_lookup, ("trusted", "lookup")))
    for count in nodes:
        for name, label, sources, baselines in (*singles, *merged, *lookup, *everything):
            options: dict[str, Any] = {"nodes": count, "sources": sources}
            options |= {"max_ssms": 1} if name.startswith("trusted") else {}
            compared_with = tuple(f"tree-{baseline}-n{count}" for baseline in baselines)
            modes.append(Mode(f"tree-{name}-n{count}", f"{label}, {count} nodes", options, compared_with=compared_with))
    valid = (*ssms, "ssm", "lookup", "suffix", "table")
    for name in combine:
        sources = tuple(name.split("+"))
        if unknown := [source for source in sources if source not in valid]:
            raise ConfigError(f"--combine {name}: unknown {', '.join(unknown)}; valid: {', '.join(valid)}, joined by +")
        for count in nodes:
            modes.append(Mode(f"tree-{name}-n{count}", f"{name}, {count} nodes", {"nodes": count, "sources": sources}))
        modes.append(Mode(f"auto-{name}", f'{name}, nodes="auto"', {"nodes": "auto", "sources": sources}))
    modes.append(Mode("auto", 'everything, nodes="auto"', {"nodes": "auto"}))
    return modes


def peer_modes(ssms: Sequence[str], k_values: Sequence[int]) -> list[Peer]:
    """Return transformers' plain decoding, assisted decoding (by SSM and K, or own schedule) and prompt lookup by K."""
    peers = [Peer("hf-plain", "transformers plain", "plain")]
    for name in ssms:
        for k in (*k_values, None):
            end, k_label = ("own", "own schedule") if k is None else (f"k{k}", f"K={k}")
            peers.append(Peer(f"hf-assisted-{name}-{end}", f"transformers, {name}, {k_label}", "assisted", name, k))
    return peers + [Peer(f"hf-lookup-k{k}", f"transformers, lookup, K={k}", "lookup", k=k) for k in k_values]


def default_branching(nodes: int) -> tuple[int, ...]:
    """Return the non-increasing branching, such as (3, 2, 1), of the largest tree with at most `nodes` nodes."""
    shapes: list[tuple[int, ...]] = [()]
    for shape in shapes:  # grows while iterating
        if len(shape) < _DEEPEST:
            longer = [(*shape, k) for k in range(1, (shape or (_WIDEST,))[-1] + 1)]
            shapes += [candidate for candidate in longer if _size(candidate) <= nodes]
    # Among equal sizes, the smallest sum avoids stars and chains.
    return max(shapes[1:], key=lambda shape: (_size(shape), -sum(shape), len(shape), shape))


@cache
def _size(branching: tuple[int, ...]) -> int:
    return SpecConfig(branching=branching).static_nodes


def rule_modes(rules: Sequence[str], branchings: Sequence[tuple[int, ...]], sampled: bool) -> list[Mode]:
    """Return plain decoding, and each rule on each topology. Only SSMs draft, because lookup has no probabilities."""
    modes = [Mode(PLAIN, "plain decoding", None)]
    for branching in branchings:
        topology: dict[str, Any] = {
            "branching": branching,
            "max_depth": max(SpecConfig().max_depth, len(branching)),
            "sources": ("ssm",),
        }
        size = SpecConfig(**topology).static_nodes
        for rule in rules:
            label, spec = f"{rule}, {size} nodes", topology | {"verification": rule}
            baselines = tuple(f"{baseline}-n{size}" for baseline in _COMPARED_RULES.get(rule, ()))
            keeps_tokens = not (sampled and rule in RANDOM_DRAWS)
            modes.append(Mode(f"{rule}-n{size}", label, spec, keeps_tokens, baselines))
    return modes


def parse_rules(values: Sequence[str]) -> tuple[str, ...]:
    """Return the named rules (or "all") without duplicates, in the order of `VERIFICATIONS`. Raises ConfigError."""
    for name in values:
        if name not in ("all", *VERIFICATIONS):
            raise ConfigError(f"--verification {name}: valid are {', '.join(VERIFICATIONS)}, or all")
    return tuple(rule for rule in VERIFICATIONS if rule in values or "all" in values)


def select(ours: Sequence[Mode], peers: Sequence[Peer], only: Sequence[str]) -> tuple[list[Mode], list[Peer]]:
    """Return the modes whose names match a pattern of `only` (empty: all), always with plain decoding, the baseline."""
    names = [mode.name for mode in ours] + [peer.name for peer in peers]
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"--only {pattern}: no such mode; valid: {', '.join(names)}, and patterns such as tree-*")

    def wanted(name: str) -> bool:
        return not only or name == PLAIN or any(fnmatchcase(name, pattern) for pattern in only)

    return [mode for mode in ours if wanted(mode.name)], [peer for peer in peers if wanted(peer.name)]
