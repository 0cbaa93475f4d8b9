"""Draft heads that do not fit their target, and what `treespec weights inspect` says of heads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.drafters.test_heads import HEADS, make_head, make_pard, target_of
from tests.helpers.commands import run
from tests.helpers.heads_made import TargetShape
from tests.helpers.models import edit_config, new_folder, open_llm, quick
from tests.helpers.tokenizers_made import TEXT, byte_level, save_tokenizer
from treespec.errors import KernelError, ModelError
from treespec_weights import CheckpointError


def edited(name: str, **config: Any) -> Path:
    return edit_config(make_head(name), **config)


def spoiled(name: str = "specforge", **changes: Any) -> Path:
    """A head whose tensors are replaced, or dropped if None."""
    folder = make_head(name)
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    return folder


def cut() -> Path:
    folder = make_head("eagle")
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:2000])
    return folder


def of_shape(name: str, **shape: int) -> Path:
    """A head for another target."""
    write, options = HEADS[name]
    write(folder := new_folder("head"), TargetShape(**shape), **options)
    return folder


def pard(vocab_size: int = 128, **changes: Any) -> Path:
    make_pard(folder := new_folder("head"), vocab_size=vocab_size)
    return edit_config(folder, **changes)


def reading(layers: tuple[int, ...], mask: int = 3) -> Path:
    return edited("z-lab", dflash_config={"mask_token_id": mask, "target_layer_ids": layers})


def without_layers() -> Path:
    """An SSM whose file of projections does not say which layers it reads."""
    folder = make_head("state ssm")
    save_file(load_file(folder / "state_projection.safetensors"), folder / "state_projection.safetensors")
    return folder


TOKEN_MAP = {"token_map": torch.arange(200, 296)}
TWO = {"layers.1.self_attn.q_norm.weight": None, "norm.weight": torch.ones(32)}
DEEP = "specforge, other layers, whole vocabulary"
# By name: makes the head, and what is said.
WRONG: dict[str, tuple[Callable[[], Path], str]] = {
    "no map": (lambda: spoiled(d2t=None), "d2t.*missing: the head has 96 rows, the target 256 tokens"),
    "a bad map": (lambda: spoiled(d2t=5 - torch.arange(96)), "d2t.*96 tokens from 5 to 5 for 96 rows"),
    "a cut pickle": (cut, "pytorch_model.bin.*not a file of tensors"),
    "tensors, all at once": (
        lambda: spoiled("z-lab", **TWO),
        r"(?s)(?=.*q_norm.*expected a tensor of shape).*'norm.weight': \[32\], expected \[64\]",
    ),
    "quantised": (
        lambda: edited("specforge", quantization_config={"quant_method": "awq"}),
        "quantised draft heads are not supported",
    ),
    "another width": (lambda: make_head("specforge"), "192 values per token, 3 .* have 128 each"),
    "other tokens": (lambda: make_head("specforge"), "of 256 tokens, the target has 272"),
    "fewer layers": (lambda: make_head(DEEP), r"layers \(1, 3, 6\), and .* has 4 layers"),
    "eagle-1, another width": (lambda: make_head("eagle-1"), "64, the target has 128; use a"),
    "states of fewer layers": (lambda: make_head("state ssm"), r"layers \(2, 4, 9\), and the target has 4 layers"),
    "states of another width": (
        lambda: make_head("state ssm"),
        r"'fc': \[64, 192\], expected \[64, 384\]; use a draft",
    ),
    "states of no layers": (without_layers, "state_projection.*expected safetensors with metadata `layers`"),
    "eagle-1, norms": (lambda: edited("eagle-1 of speculators", layernorms=True), "layernorms.*not supported"),
    "blocks of one": (lambda: edited("z-lab", block_size=1), "'block_size': 1; expected an int, at least 2"),
    "mask": (lambda: reading((0, 3, 5), mask=900), "900, and the vocabulary has 256"),
    "two layers": (lambda: reading((0, 3)), "2 layers of the target have 64 each"),
    "windows": (
        lambda: edited("z-lab", layer_types=["full_attention", "sliding_attention"]),
        "sliding windows are not supported",
    ),
    "DFlash 2": (
        lambda: edited("z-lab", architectures=["DFlash2DraftModel"]),
        "DFlash 2 draft, which is not supported; supported: EAGLE-1, EAGLE-2 and EAGLE-3 heads",
    ),
    "dspark, markov": (lambda: edited("dspark", markov_head_type="rnn"), "'rnn' of rank 16; supported: vanilla"),
    "pard, other tokens": (pard, "128, and the target has 256 tokens"),
    "medusa, another width": (lambda: of_shape("medusa, tgi", hidden_size=32), r"\[32, 32\], expected \[64, 64\]"),
    "medusa, map": (lambda: spoiled("medusa, vllm", **TOKEN_MAP), "96 tokens; expected distinct ones of .* 256"),
}
OTHER_TARGETS = {"other tokens": {"vocab_size": 272}}
OTHER_TARGETS |= {name: {"num_hidden_layers": 4} for name in ("fewer layers", "states of fewer layers")}
WIDTHS = "another width", "eagle-1, another width", "states of another width"
OTHER_TARGETS |= {name: {"hidden_size": 128} for name in WIDTHS}


@pytest.mark.parametrize("name", quick(WRONG, ("tensors, all at once", "a bad map", "a cut pickle")))
def test_heads_that_do_not_fit(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(CheckpointError, match=message):
        open_llm(target_of(**OTHER_TARGETS.get(name, {})), [make()])


@pytest.mark.slow
def test_a_target_without_a_list_of_layers() -> None:
    """Run by transformers' code, one layer is no list that could be told from other modules."""
    write, options = HEADS["specforge"]
    write(head := new_folder("head"), TargetShape(num_hidden_layers=1), seed=1, **options, boundaries=(0, 1))
    with pytest.raises(KernelError, match=r"hidden states of layers \[0, 1\]: not available"):
        open_llm(target_of(num_hidden_layers=1), [head], backend="transformers")


@pytest.mark.slow
def test_a_parallel_draft_with_another_tokenizer() -> None:
    target, draft = target_of(vocab_size=384), pard(384)
    save_tokenizer(target, byte_level(384, TEXT.splitlines()))
    save_tokenizer(draft, byte_level(384, ["zyx wvu tsr"] * 40))
    with pytest.raises(ModelError, match="PARD draft with other token ids than the target"):
        open_llm(target, [draft])


KINDS = {"eagle-1": "EAGLE head", "dflash of speculators": "DFlash draft", "pard": "PARD draft"}
KINDS |= {
    "state ssm": "state SSM",
    "peagle": "parallel EAGLE head",
    "medusa, vllm": "Medusa head",
    "speculator": "MLPSpeculator head",
}


@pytest.mark.slow
def test_inspection() -> None:
    heads = [*map(make_head, ["speculators", *KINDS]), of_shape("z-lab", hidden_size=32)]
    options = [option for head in heads for option in ("--draft", str(head))]
    *drafts, wrong = run("weights", "inspect", target_of(), *options, "--json").document["drafts"]
    said = [draft["connection"] for draft in drafts]
    assert said[0] == "EAGLE-3 head, reads the inputs of the target's layers 2, 4, 5; proposes 64 of 256 tokens"
    assert [each.split(",")[0] for each in said[1:]] == [*KINDS.values()]
    assert all(draft["usable"] and draft["parameters"] > 0 for draft in drafts)
    assert drafts[-2]["parameters"] == 3 * (64 * 64 + 96 * 64)
    assert not wrong["usable"] and "use a draft of this target" in wrong["reason"]
    shown = " ".join(run("weights", "inspect", target_of(), "--draft", heads[0]).stdout.split())
    assert f"usable: {said[0]}" in shown
    assert wrong["parameters"] is wrong["cost_ratio"] is None
    unknown = run("weights", "inspect", target_of(), "--draft", heads[-1]).stdout.split("hidden size")[1].split()
    assert unknown[1:3] == ["?", "?"]
