"""Grown models: a larger shape, the same function."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.logits import their_logits
from tests.helpers.models import VOCAB, make_llama, new_folder, random_prompts
from treespec.bench.grow import grown
from treespec.bench.options import Options
from treespec.errors import ConfigError
from treespec_weights import (
    LLAMA,
    ModelShape,
    OptionError,
    default_folder,
    grow_checkpoint,
    grown_shape,
    load_weights,
    parse_size,
    read_config,
    verify_checkpoint,
)

pytestmark = pytest.mark.slow


def shape_of(folder: Path) -> ModelShape:
    return ModelShape.from_hf(read_config(folder), LLAMA, folder)


def larger(folder: Path, vocab: int = VOCAB) -> ModelShape:
    """More of everything."""
    shape = shape_of(folder)
    sizes = {"num_heads": 8, "num_kv_heads": 4, "hidden_size": 4 * shape.hidden_size, "intermediate_size": 320}
    return replace(shape, num_layers=5, vocab_size=vocab, tied=shape.tied and vocab == shape.vocab_size, **sizes)


@pytest.mark.parametrize("size", ["20M", "120M", "0.5B", "7B"])
def test_shapes_are_like_real_models(size: str) -> None:
    old = shape_of(default_folder("target"))
    new = grown_shape(old, parse_size(size))
    assert abs(new.num_parameters() / parse_size(size) - 1) < 0.05
    assert new.num_layers >= old.num_layers and new.intermediate_size >= 2 * new.hidden_size
    assert new.num_heads * new.head_dim == new.hidden_size
    assert new.num_heads // new.num_kv_heads == old.num_heads // old.num_kv_heads


VARIANTS = {"tied": {"tie_word_embeddings": True}, "biases": {"attention_bias": True, "mlp_bias": True}}


@pytest.mark.parametrize("vocab", [VOCAB, 3 * VOCAB])
@pytest.mark.parametrize("variant", VARIANTS)
def test_grown_logits_are_the_small_model_s(variant: str, vocab: int, tmp_path: Path) -> None:
    small = make_llama(tmp_path / "small", 0, rms_norm_eps=1e-3, **VARIANTS[variant])
    shape = larger(small, vocab)
    grow_checkpoint(small, tmp_path / "grown", shape, seed=1, shard_bytes=1 << 20)
    assert verify_checkpoint(tmp_path / "grown").ok and len(list((tmp_path / "grown").glob("*.safetensors"))) > 2
    (tokens,) = random_prompts([40])
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        small_logits, grown_logits = (their_logits(folder, tokens, dtype) for folder in (small, tmp_path / "grown"))
        own, added = grown_logits[..., :VOCAB], grown_logits[..., VOCAB:]
        assert (own - small_logits).abs().max() <= bound * small_logits.abs().max()
        assert not added.numel() or (added.amax(-1) < own.amin(-1) - 10).all(), "an added token could be chosen"
    weights = load_weights(tmp_path / "grown", shape, LLAMA)
    for name in ("q", "k", "v", "gate", "up", "attn_norm") if vocab == VOCAB else ():
        assert (weights[f"layers.0.{name}"] != 0).all(), "zeros would be a model that costs less on some hardware"


def test_the_folder_is_removed_unless_kept(tmp_path: Path) -> None:
    small = make_llama(tmp_path / "small", 0)
    draft = make_llama(new_folder("drafts") / "ssm-x", 1, num_hidden_layers=1)
    options = Options(model=small, drafts=[str(draft)])
    with grown(options, "4M", None, None) as (larger_options, how):
        folder = Path(str(larger_options.model))
        assert shape_of(folder) == how.shape and larger_options.drafts == [str(draft)]
        assert how.figures["parameters"] == how.shape.num_parameters()
    assert not folder.exists()
    with grown(options, "4M", 2 * VOCAB, tmp_path / "kept") as (larger_options, how):
        assert [Path(each).name for each in larger_options.drafts or ()] == ["ssm-x"]
    assert shape_of(tmp_path / "kept" / "target") == how.shape
    assert shape_of(tmp_path / "kept" / "ssm-x").vocab_size == 2 * VOCAB == how.shape.vocab_size


def test_what_bench_refuses_to_grow(tmp_path: Path) -> None:
    """tests/weights/test_weights_commands.py has what `treespec weights grow` refuses."""
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 9, "n_positions": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"} | sizes))
    with (
        pytest.raises(ConfigError, match=r"gpt2 .* cannot be grown"),
        grown(Options(model=tmp_path, drafts=[]), "1B", None, None),
    ):
        pass
    small = make_llama(tmp_path / "small", 0, torch.float16)
    with pytest.raises(OptionError, match="float16"):  # it has no room for logits that no token can have
        grow_checkpoint(small, tmp_path / "grown", larger(small, 2 * VOCAB), seed=1)
