"""The families' guards' guards: each planted fault turns the comparison with transformers red."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.families import TYPICAL, VOCAB, make_model
from tests.models import new_folder, random_prompts
from tests.test_families import LENGTH, Outputs, a_tree, ours, theirs
from treespec.models import attention, decoder, norms
from treespec.models.attention import CpuAttention
from treespec.models.layer_kinds import LayerKind, Rope
from treespec.models.model_config import ModelConfig
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_attention_cpu import plan_tree_attention_cpu, tree_attention_cpu
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.tuning.testing import assert_close

Patch = pytest.MonkeyPatch


@functools.cache
def right(name: str) -> tuple[Path, list[int], TokenTree, Outputs]:
    """A typical model, tokens, a tree behind them, and what transformers computes."""
    folder = make_model(new_folder("right") / "model", TYPICAL[name], 3)
    (tokens,) = random_prompts((LENGTH + 1,), vocab=VOCAB)
    tree = a_tree(tokens[LENGTH], 24, 5)
    return folder, tokens, tree, theirs(folder, tokens, tree)


def check(name: str, plant: Callable[[Patch], None]) -> None:
    folder, tokens, tree, expected = right(name)
    with Patch.context() as patch:
        plant(patch)
        found = ours(folder, tokens, tree)
    assert_close(found.logits, expected.logits, max_error=2e-3, rms_error=1e-4)


def window_of(change: int) -> Callable[[Patch], None]:
    """A window that is longer or shorter."""
    original = CpuAttention.plan

    def plan(self: CpuAttention, requests: Any, num_rows: int, window: int | None = None) -> Any:
        return original(self, requests, num_rows, None if window is None else window + change)

    return lambda patch: patch.setattr(CpuAttention, "plan", plan)


def window_by_slot(patch: Patch) -> None:
    """Rows of a tree look back by the place of their slot instead of by their position."""

    def plan(requests: list[RequestRows], *rest: Any) -> Any:
        moved = [
            rows if rows.is_chain else dataclasses.replace(rows, depths=rows.nodes, slot_depths=rows.nodes)
            for rows in requests
        ]
        return plan_tree_attention_cpu(moved, *rest)

    patch.setattr(attention, "plan_tree_attention_cpu", plan)


def configured(change: Callable[[ModelConfig], dict[str, Any]]) -> Callable[[Patch], None]:
    """Another configuration than the checkpoint's."""
    original = ModelConfig.from_hf.__func__  # type: ignore[attr-defined]

    def from_hf(cls: type[ModelConfig], *arguments: Any) -> ModelConfig:
        config = original(cls, *arguments)
        return dataclasses.replace(config, **change(config))

    return lambda patch: patch.setattr(ModelConfig, "from_hf", classmethod(from_hf))


def without_score_cap(patch: Patch) -> None:
    patch.setattr(attention, "tree_attention_cpu", lambda *given: tree_attention_cpu(*given[:5]))


def one_position_late(patch: Patch) -> None:
    """The table of positions is read one row further on."""
    original = decoder.Decoder._take

    def take(self: decoder.Decoder, weights: Any) -> None:
        assert self.positions is not None
        self.positions = self.positions.roll(-1, 0)
        original(self, weights)

    patch.setattr(decoder.Decoder, "_take", take)


FAULTS: dict[str, tuple[str, Callable[[Patch], None]]] = {
    "a window too long": ("mistral", window_of(1)),
    "a window too short": ("mistral", window_of(-1)),
    "a window by slots": ("mistral", window_by_slot),
    "windows of the other layers": (
        "gemma2",
        configured(lambda config: {"layers": (*config.layers[1:], config.layers[0])}),
    ),
    "a window that is forgotten": ("phi3", configured(lambda config: {"layers": (LayerKind(0, None),) * 3})),
    "no cap of scores": ("gemma2", without_score_cap),
    "no cap of logits": ("gemma2", lambda patch: patch.setattr(decoder, "soft_cap", lambda logits, cap: logits)),
    "the wrong scale of scores": ("gemma3", configured(lambda config: {"query_scale": 16**-0.5})),
    "one rope for all layers": (
        "gemma3",
        configured(lambda config: {"layers": tuple(kind._replace(rope=0) for kind in config.layers)}),
    ),
    "no scale of embeddings": ("gemma3", configured(lambda config: {"embed_scale": 1.0})),
    "norms without their one": ("gemma3", lambda patch: patch.setattr(decoder, "prepare", lambda *given: None)),
    "no norms of heads": ("qwen3", lambda patch: patch.setattr(decoder, "norm_heads", lambda *given: None)),
    "the order of heads of Llama, 3/4": ("phi3", lambda patch: patch.setattr(Rope, "head_order", None)),
    "the order of heads of Llama, 1/4": ("gpt_neox", lambda patch: patch.setattr(Rope, "head_order", None)),
    "one after the other": ("gpt_neox", configured(lambda config: {"parallel": False})),
    "GELU by tanh": ("gpt_neox", configured(lambda config: {"activation": "gelu_tanh"})),
    "positions off by one, GPT-2": ("gpt2", one_position_late),
    "positions off by one, OPT": ("opt", one_position_late),
    "an epsilon": ("opt", configured(lambda config: {"norm_eps": 1e-3})),
    "no bias of norms": (
        "gpt2",
        lambda patch: patch.setattr(norms.LayerStream, "take", staticmethod(lambda w, bias: norms.Norm(w, None))),
    ),
}


@pytest.mark.parametrize("name", sorted({name for name, _ in FAULTS.values()}))
def test_without_a_fault_the_check_is_green(name: str) -> None:
    check(name, lambda patch: None)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str) -> None:
    with pytest.raises(AssertionError):
        check(*FAULTS[fault])
