"""The probe of models that run through the adapter: it accepts noisy models that are right, and refuses planted faults.

The models amplify rounding as real ones do: transformers' own attentions differ by more than 0.2 of the logits' RMS
between them, or from float32, in bfloat16.
"""

import functools
import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.helpers.architectures import VOCAB, logits_by, make_model, open_adapter_llm
from tests.helpers.faults import FAULTS, WINDOW_FAULTS, Fault, decoder_with, open_with
from tests.helpers.models import random_prompts
from treespec.adapter.decoder import PackedLinear
from treespec.adapter.probe import BOUNDS
from treespec.adapter.row_attention import attend_rows
from treespec.adapter.upcast import UpcastMode
from treespec.errors import ModelError

pytestmark = pytest.mark.slow

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NOISY: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4, "num_key_value_heads": 2},
    "gpt2": {"n_layer": 4},  # learned positions
    "gemma2": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attn_logit_softcapping": 30.0,
    },
    "gpt_oss": {"num_hidden_layers": 2},  # sinks, and experts whose choice may flip
}
REFUSED = "logits differ from transformers'"


@functools.cache
def noisy(kind: str, dtype: torch.dtype) -> Any:
    """A model whose attention is so sharp that rounding decides much of it."""
    model = make_model(kind, torch.float32, **NOISY[kind])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj.weight", "k_proj.weight", "c_attn.weight")):
                parameter.mul_(5.0 if kind == "gpt2" else 2.5)
    return model.to(dtype)


def distance(model: Any, own: str, other: Any, others: str) -> float:
    """The largest distance between the rows of two models' logits, each with an attention by name."""
    [prompt] = random_prompts([76], vocab=VOCAB)
    found = logits_by(model, prompt, own), logits_by(other, prompt, others)
    spread = (found[1] - found[1].mean(1, keepdim=True)).square().mean(1)
    return float(((found[0] - found[1]).square().mean(1) / spread).max().sqrt())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", NOISY)
def test_noisy_models_are_accepted(kind: str, dtype: torch.dtype) -> None:
    """Also where transformers' own attentions differ by several times the distance that is always accepted."""
    model = noisy(kind, dtype)
    if dtype == torch.bfloat16:
        rounding = distance(model, "eager", noisy(kind, torch.float32), "eager")
        if kind in ("llama", "gpt2"):
            rounding = max(rounding, distance(model, "sdpa", model, "eager"))
        assert rounding > 0.2 > BOUNDS[dtype]
    open_with(model, Fault(), layer=0)


CASES = [("gpt2", "positions off by one", torch.bfloat16)]  # learned ones
CASES += [(kind, fault, torch.bfloat16) for kind in ("llama", "gemma2") for fault in FAULTS]
CASES += [("gemma2", fault, torch.bfloat16) for fault in WINDOW_FAULTS]
CASES += [
    ("llama", fault, dtype)
    for fault in ("scale off by 3 %", "positions off by one")
    for dtype in (torch.float16, torch.float32)
]


@pytest.mark.parametrize(("kind", "fault", "dtype"), CASES)
def test_faults_in_noisy_models_are_refused(kind: str, fault: str, dtype: torch.dtype) -> None:
    """Planted in one layer of four, which has a window where the model has any."""
    with pytest.raises(ModelError, match=REFUSED):
        open_with(noisy(kind, dtype), (FAULTS | WINDOW_FAULTS)[fault], layer=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fault", ["sinks", "scale", "mask"])
def test_faults_of_rows_that_attend_alone(fault: str, dtype: torch.dtype) -> None:
    def unmasked(*args: Any) -> torch.Tensor:
        with mock.patch("treespec.adapter.row_attention.visible_keys", lambda _, rows, keys: keys <= rows[:, None]):
            return attend_rows(*args)

    planted = {
        "sinks": lambda *args: attend_rows(*args[:7]),
        "scale": lambda *args: attend_rows(*args[:5], 1.03 * args[5], *args[6:]),
        "mask": unmasked,
    }
    with decoder_with(attend_rows=planted[fault]), pytest.raises(ModelError, match=REFUSED):
        open_adapter_llm(noisy("gpt_oss", dtype), dtype=dtype, exact=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_layers_that_compute_something_else(
    dtype: torch.dtype, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What only the decoder as it will run does is compared in the model's own dtype: torch's own layers are taken."""
    noisy("llama", dtype).save_pretrained(tmp_path)
    right = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: right(self, x.roll(1, -1)))
    with caplog.at_level(logging.INFO, "treespec"):
        llm = open_adapter_llm(tmp_path, backend="transformers", exact=False)
    assert llm.config.linear == "torch"
    assert "with row-invariant linear layers" in caplog.text


def test_a_model_that_does_not_compute_in_float32(caplog: pytest.LogCaptureFixture) -> None:
    """It is compared in its own dtype, by the bound of that dtype, and the log says so."""

    def refuse_float32(_: Any, inputs: Any) -> None:
        assert inputs[0].dtype == torch.bfloat16, "bfloat16 only"

    model = make_model("gpt2", torch.bfloat16)  # it rounds little enough for that bound
    model.get_output_embeddings().register_forward_pre_hook(refuse_float32)
    with caplog.at_level(logging.INFO, "treespec"):
        open_with(model, Fault(), layer=0)
    assert "does not compute in float32" in caplog.text
    with pytest.raises(ModelError, match=REFUSED):
        open_with(model, FAULTS["tree mask ignored"], layer=0)


# --- computing in a wider dtype


@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "gpt_oss", "deepseek_v3"])
def test_widened_models_have_the_bits_of_wide_ones(kind: str) -> None:
    """A bfloat16 model in the mode computes what its float32 copy computes, and stays what it is."""
    model = make_model(kind, torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    [tokens] = random_prompts([76], vocab=VOCAB)
    wide = make_model(kind, torch.bfloat16).float()
    with UpcastMode(torch.float32):
        found = logits_by(model, tokens, "eager")
    assert torch.equal(found, logits_by(wide, tokens, "eager"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_large_weights_are_widened_in_parts() -> None:
    layer, x = nn.Linear(32, 50, dtype=torch.bfloat16), torch.randn(2, 7, 32, dtype=torch.bfloat16)
    with torch.inference_mode(), UpcastMode(torch.float64, chunk=100):
        found = layer(x)
    wanted = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    torch.testing.assert_close(found, wanted)


def test_writes_to_narrow_tensors_are_refused() -> None:
    kept = torch.zeros(4, dtype=torch.bfloat16)
    with UpcastMode(torch.float32), pytest.raises(NotImplementedError, match="in place"):
        kept.add_(torch.ones(4))
    with UpcastMode(torch.float32), pytest.raises(NotImplementedError, match="reinterprets"):
        kept.view(torch.int16)
