"""What `perf/gpu_suite.py` compares passes with: a compiled static-cache Llama."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.gpu_suite import module
from treespec_weights.rules import ModelShape

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def perf_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "perf"))


@pytest.fixture
def setting(tmp_path: Path) -> Any:
    return module("setting").Setting(tmp_path, dry=True)


def transformers_llama(shape: ModelShape, weights: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    """transformers' Llama with these weights."""
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=False,
    )
    names = {"embed": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}
    for i in range(shape.num_layers):
        before = f"model.layers.{i}"
        names |= {f"layers.{i}.{each}": f"{before}.self_attn.{each}_proj" for each in "qkvo"}
        names |= {f"layers.{i}.{each}": f"{before}.mlp.{each}_proj" for each in ("gate", "up", "down")}
        names[f"layers.{i}.attn_norm"] = f"{before}.input_layernorm"
        names[f"layers.{i}.mlp_norm"] = f"{before}.post_attention_layernorm"
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict({f"{names[name]}.weight": weight for name, weight in weights.items()}, strict=True)
    return model


@torch.no_grad()
def test_the_compiled_llama_computes_what_transformers_does(setting: Any) -> None:
    """Step by step, with grouped heads, for two requests."""
    models, baseline = module("models"), module("baseline")
    shape = replace(module("setting").TINY, num_layers=2, num_heads=4, num_kv_heads=2)
    torch.manual_seed(0)
    weights = models.random_weights(setting, shape)
    tokens = torch.randint(shape.vocab_size, (2, 5), generator=torch.Generator().manual_seed(1))
    expected = transformers_llama(shape, weights)(tokens).logits
    model = baseline.StaticLlama(models.config_of(setting, shape), dict(weights), batch=2, length=8)
    steps = [model(tokens[:, i], torch.tensor([i])) for i in range(tokens.shape[1])]
    torch.testing.assert_close(torch.stack(steps, dim=1), expected, rtol=1e-4, atol=1e-4)


def test_the_second_mode_stands_in_for_the_first(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    baselines, stage = module("baselines"), module("stage")
    by_name = {each.name: each for each in baselines.measurements(setting)}
    first, second = (baselines.compiled_key(2, mode) for mode in (baselines.MODE, baselines.FALLBACK))
    monkeypatch.setattr(baselines, "_compiled", lambda batch, mode, context: {"us": 7.0, "mode": mode})
    found = {first: {"us": 5.0}}
    found[second] = by_name[second].run(stage.Context(setting, found))
    assert "skipped" in found[second] and baselines.compiled_us(found, 2) == 5.0
    found = {first: {"error": "MeasurementTimeout: it took more than 300 s"}}
    found[second] = by_name[second].run(stage.Context(setting, found))
    assert found[second]["instead_of"] == found[first]["error"] and baselines.compiled_us(found, 2) == 7.0


def test_a_compiled_step_that_computes_something_else_is_an_error(
    setting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    baselines, stage = module("baselines"), module("stage")
    monkeypatch.setattr(torch, "compile", lambda model, **options: lambda *given: 2 * model(*given))
    [compiled] = [each for each in baselines.measurements(setting) if each.name == baselines.compiled_key(2)]
    with pytest.raises(ValueError, match="the compiled step differs from the eager one by 100"):
        compiled.run(stage.Context(setting, {}))
