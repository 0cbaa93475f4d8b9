"""MTP layers of a target's checkpoint: their distributions, the tokens of plain decoding, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from tests.helpers.architectures import ARCHITECTURES, VOCAB, continuations, make_model, open_adapter_llm, saved
from tests.helpers.drafting import EXECUTORS, assert_probabilities, target_states
from tests.helpers.exactness import assert_exact, run
from tests.helpers.gguf_files import write_gguf
from tests.helpers.models import VOCAB as NATIVE_VOCAB
from tests.helpers.models import (
    OracleDrafter,
    edit_config,
    exact_in,
    greedy,
    new_folder,
    open_llm,
    quick,
    random_prompts,
    randomize,
    tiny,
    tokens_of,
)
from tests.helpers.mtp_made import FILE, LAYOUTS, PredictorReference, make_predictor
from tests.helpers.quantized_checkpoints import needs_compiler, quantize_folder
from tests.helpers.speech import rank_half
from treespec import LLM, RequestOutput, RoundRecord, SpecConfig
from treespec.drawing.recording import watch
from treespec.errors import ConfigError, ModelError
from treespec_weights import inspect_checkpoint
from treespec_weights.errors import CheckpointError, UnsupportedModelError
from treespec_weights.heads import compare_head
from treespec_weights.mtp import MtpForm

NUM_LAYERS = ARCHITECTURES["glm4_moe"]["num_hidden_layers"]
KINDS = ["glm4_moe", "deepseek_v3", "mellum"]


@pytest.fixture(autouse=True)
def layer_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers knows the layers' names in the published sizes of these models only."""
    for kind in KINDS[:2]:
        cls = type(make_model(kind))
        monkeypatch.setattr(cls, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{NUM_LAYERS}.*"])


BY_MELLUM = {
    "mtp_block": "layers.0",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "post_norm": "norm",
}


def published(kind: str, name: str) -> str:
    """The name in a checkpoint of a tensor of transformers' module."""
    name = name.removeprefix("layers.0.")
    if kind == "mellum":
        module, _, rest = name.partition(".")
        return f"mtp.{BY_MELLUM[module]}.{rest}"
    return f"model.layers.{NUM_LAYERS}.{name.removeprefix('mtp_block.').replace('post_norm', 'shared_head.norm')}"


def split_experts(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of each expert, as they are published."""
    for fused, parts in (("experts.gate_up_proj", ("gate_proj", "up_proj")), ("experts.down_proj", ("down_proj",))):
        if name.endswith(fused):
            stem = name.removesuffix(fused) + "experts"
            return {
                f"{stem}.{expert}.{part}.weight": piece.contiguous()
                for expert, own in enumerate(weight)
                for part, piece in zip(parts, own.chunk(len(parts)), strict=True)
            }
    return {name: weight.contiguous()}


def make_checkpoint(kind: str, dtype: torch.dtype = torch.float32) -> Path:
    """A random model with one random MTP layer, in the published layout."""
    model, _ = saved(kind, dtype)
    folder = new_folder(kind)
    model.save_pretrained(folder)
    layer = MtpModel(model, 1)
    randomize(layer.layers, gain=1.5, head_gain=1.5)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, weight in layer.state_dict().items():
        if name.startswith("layers."):
            tensors |= split_experts(published(kind, name), weight.detach().to(dtype))
    save_file(tensors, file, {"format": "pt"})
    return folder


def expected_logits(model: Any, layer: Any, states: Any, context: list[int], drafted: list[int]) -> torch.Tensor:
    """Logits after the last of some drafted tokens, by a pass over all pairs for each; the context ends in the root."""
    tokens = context[1:]
    for token in [*drafted, None]:
        positions = torch.arange(1, len(tokens) + 1)[None]
        out = layer.forward_layer(0, states, positions, None, input_ids=torch.tensor([tokens]))
        if token is not None:
            states, tokens = torch.cat((states, out[:, -1:]), 1), [*tokens, token]
    return model.lm_head(out[0, -1])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(MtpModel, "forward_layer"), reason="the reference needs transformers 5.24")
@pytest.mark.parametrize("kind", quick(KINDS, ("glm4_moe",)))
def test_probabilities_are_those_of_transformers(kind: str) -> None:
    """At every drafted node, over rounds with partial accepts, after a prefill in chunks."""
    folder = make_checkpoint(kind)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    layer = MtpModel.from_pretrained(model).eval()
    (prompt,) = random_prompts((61,), vocab=VOCAB)
    (wanted,) = continuations(model, [prompt], 24)
    oracle = OracleDrafter([prompt + wanted[:13]], 2, vocab=VOCAB)  # knows the first half
    llm = open_adapter_llm(folder, ["mtp", oracle], max_num_batched_tokens=24)
    assert "MTP layer" in llm.stats()["draft_vocabularies"]["mtp"]
    with watch(llm.engine) as records:
        [output] = llm.generate(prompt, greedy(24), spec=SpecConfig(nodes=16, max_depth=4))
    assert list(output.outputs[0].token_ids) == wanted

    states = target_states(model, records)

    def expected(record: RoundRecord, drafted: list[int]) -> torch.Tensor:
        context = [*record.context, int(record.tree.tokens[0])]
        return expected_logits(model, layer, states[record.number][-1][None], context, drafted)

    assert_probabilities(records, "mtp", range(VOCAB), expected)


@pytest.mark.slow
@exact_in
def test_trees_give_the_bits_of_plain_decoding(dtype: torch.dtype) -> None:
    """Beside an SSM that transformers' code runs, and prompts of one token."""
    folder = make_checkpoint("glm4_moe", dtype)
    draft = saved("stablelm", dtype)[1]
    llm = open_adapter_llm(folder, ["mtp", draft], dtype=str(dtype).removeprefix("torch."), max_num_seqs=3)
    greedily = run(llm, random_prompts((1, 2, 58, 90), vocab=VOCAB), greedy(12))
    for spec in (SpecConfig(nodes=16, max_depth=5, sources=("mtp",)), SpecConfig(branching=(3, 2, 1)), SpecConfig()):
        assert_exact(llm, greedily, spec)
    prompts, params = random_prompts((30, 64), vocab=VOCAB), greedy(16, temperature=0.8, seed=1, n=2)
    plain, trees = (llm.generate(prompts, params, spec=each) for each in ("off", SpecConfig(nodes=12, max_depth=3)))
    assert tokens_of(trees) == tokens_of(plain)


# --- native families


NATIVE = [(name, executor) for name in LAYOUTS for executor in ("compiled", "eager")]
(PROMPT,) = random_prompts((61,))


@needs_compiler
@pytest.mark.parametrize("is_cut", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", quick(NATIVE, NATIVE[:1]))
def test_probabilities_are_those_of_the_definition(case: tuple[str, str], is_cut: bool) -> None:
    """At every drafted node, over rounds with partial accepts, after a prefill in chunks; of the tokens that it has."""
    name, executor = case
    folder = make_predictor(name, executor == "compiled")
    ids = rank_half(folder) if is_cut else list(range(NATIVE_VOCAB))
    reference = PredictorReference(name, folder)
    (wanted,) = continuations(reference.model, [PROMPT], 24)
    oracle = OracleDrafter([PROMPT + wanted[:13]], 2)  # knows the first half
    options = EXECUTORS[executor] | {"draft_quantization": None, "draft_vocabulary": len(ids) if is_cut else None}
    llm = open_llm(folder, ["mtp", oracle], max_num_batched_tokens=24, **options)
    reads = "an MTP layer that reads the target's output states"
    assert llm.stats()["draft_vocabularies"] == {"mtp": f"{reads}, 256 of 512 tokens" if is_cut else reads}
    with watch(llm.engine) as records:
        [output] = llm.generate([PROMPT], greedy(24), spec=SpecConfig(nodes=16, max_depth=4))
    assert list(output.outputs[0].token_ids) == wanted
    states = target_states(reference.model, records)

    def expected(record: RoundRecord, drafted: list[int]) -> torch.Tensor:
        context = [*record.context, int(record.tree.tokens[0])]
        return reference.logits(states[record.number][-1], context, drafted)[ids]

    assert_probabilities(records, "mtp", ids, expected)


def deepest(output: RequestOutput) -> int:
    """The most drafted tokens that a pass accepted."""
    return len(output.metrics.accepted_lengths) - 1


@needs_compiler
@exact_in
@pytest.mark.parametrize("case", quick([*NATIVE[::2], NATIVE[1], NATIVE[-1]], NATIVE[:1]))
def test_native_trees_give_the_bits_of_plain_decoding(case: tuple[str, str], dtype: torch.dtype) -> None:
    """Deep accepts of what the layer drafts, in batches and from prompts of one token; sampled ones too."""
    name, executor = case
    folder = make_predictor(name, executor == "compiled", dtype, predicts=True)
    llm = open_llm(folder, ["mtp"], max_num_seqs=4, max_num_batched_tokens=40, **EXECUTORS[executor])
    plain = run(llm, random_prompts((1, 2, 61, 90)), greedy(24))
    for spec in (SpecConfig(nodes=16, max_depth=6), SpecConfig(branching=(3, 2, 1, 1)), SpecConfig()):
        tree = assert_exact(llm, plain, spec)
        assert (tree.acceptance_length > 2 and max(map(deepest, tree.outputs)) > 3) or spec.nodes == "auto", spec
    prompts, params = random_prompts((30, 64)), greedy(16, temperature=0.5, seed=1, n=2)
    outputs = [llm.generate(prompts, params, spec=each) for each in ("off", SpecConfig(nodes=12, max_depth=4))]
    assert tokens_of(outputs[1]) == tokens_of(outputs[0])


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("quantized", ["gguf", "int8"])
def test_layers_of_quantised_checkpoints(quantized: str) -> None:
    """In a GGUF file's blocks, embedding included, and in compressed-tensors' int8 but for the projection.

    The layer scores with half of the rows of the target's head, in the form of that.
    """
    folder = make_predictor("qwen3_5", compiled=True, predicts=True)
    kept = rank_half(folder)
    if quantized == "gguf":
        kinds = {"nextn_predict_layers": 1, "block_count": 4}
        path = write_gguf(folder / "m.gguf", folder, lambda name: "F16" if "ffn_down" in name else "Q8_0", **kinds)
    else:
        path = quantize_folder(folder, 8, None, head=True)
        config = json.loads((path / "config.json").read_text())["quantization_config"]
        edit_config(path, quantization_config=config | {"ignore": [*config["ignore"], "mtp.fc"]})
    for compiled in (True, False):
        llm, whole = (
            open_llm(path, ["mtp"], compile=compiled, max_num_seqs=2, draft_vocabulary=tokens, draft_quantization=None)
            for tokens in (len(kept), None)
        )
        tree = assert_exact(llm, run(llm, random_prompts((20, 61)), greedy(20)), SpecConfig(nodes=12, max_depth=5))
        assert tree.acceptance_length > 1.8
        added = llm.stats()["memory"]["draft_weights"] - whole.stats()["memory"]["draft_weights"]
        assert 0 < added < len(kept) * 64 * 2, "at most two bytes for each value"


# --- bad input


def test_targets_without_one_layer() -> None:
    asked: list[dict[str, Any]] = [{"drafts": ["mtp"]}]
    asked += [{"speculative_config": {"method": method}} for method in ("mtp", "qwen3_next_mtp")]  # of vLLM
    asked += [{"speculative_config": {"method": "mtp", "model": str(tiny()[0])}}]
    for options in asked:
        with pytest.raises(UnsupportedModelError, match=r"target: 'mtp': no MTP layer of 'llama' .*qwen3_5_text"):
            LLM(tiny()[0], device="cpu", **options)
    with pytest.raises(ModelError, match=r"stablelm.* has no MTP layer"):
        open_adapter_llm(saved("stablelm")[1], ["mtp"])
    folder = make_checkpoint("glm4_moe")
    with pytest.raises(ConfigError, match="twice"):
        open_adapter_llm(folder, ["mtp", "mtp"])
    edit_config(folder, num_nextn_predict_layers=3)
    with pytest.raises(ModelError, match="has 3 MTP layers; supported: one"):
        open_adapter_llm(folder, ["mtp"])


@pytest.mark.parametrize("name", quick(["qwen3_5", "glm4_moe"], ("qwen3_5",)))
def test_native_checkpoints_without_one_whole_layer(name: str) -> None:
    folder, layout = make_predictor(name), LAYOUTS[name]
    own, module = f"{layout.layer}self_attn.k_proj.weight", layout.layer.removesuffix("layers.0.")
    second = layout.layer.replace("0", "1").replace("3", "4") + "input_layernorm.weight"
    whole = load_file(folder / FILE)
    without = {stored: tensor for stored, tensor in whole.items() if not stored.startswith(module)}
    wrong: list[tuple[dict[str, torch.Tensor], str, str]] = [
        (
            without,
            f": '{module}*'",
            "no tensor of an MTP layer; several conversions drop it: use the original checkpoint",
        ),
        ({stored: whole[stored] for stored in whole if stored != own}, own, "missing; expected [32, 48]"),
        (whole | {second: torch.ones(48)}, second.removesuffix("input_layernorm.weight"), "a second MTP layer"),
        (whole | {own.replace("k_proj", "x"): torch.ones(48)}, own.replace("k_proj", "x"), "unexpected: no tensor of"),
    ]
    for tensors, place, message in wrong:
        save_file(tensors, folder / FILE, {"format": "pt"})
        with pytest.raises(CheckpointError) as found:
            open_llm(folder, ["mtp"])
        assert place in str(found.value) and message in str(found.value)
        row = compare_head(inspect_checkpoint(folder), MtpForm(folder))
        assert not row["usable"] and message in row["reason"]
        assert row["same_vocab_size"] is row["same_vocabulary"] is row["same_hidden_size"] is None, (
            "not known to differ"
        )


def test_a_checkpoint_without_its_layer() -> None:
    """Several conversions drop it, and leave config.json as it was."""
    folder = new_folder("glm4_moe")
    saved("glm4_moe")[0].save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    with pytest.raises(ModelError, match=r"MTP layer of .*weights are missing"):
        open_adapter_llm(folder, ["mtp"])


@pytest.mark.slow
def test_a_model_in_memory() -> None:
    """Its layer is in the folder that it was loaded from."""
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint("glm4_moe")).eval()
    llm = open_adapter_llm(model, ["mtp"])
    prompts = random_prompts((12,), vocab=VOCAB)
    assert_exact(llm, run(llm, prompts, greedy(12)), SpecConfig(nodes=8, max_depth=3))
    with pytest.raises(ModelError, match="load the model from a local folder"):
        open_adapter_llm(make_model("glm4_moe"), ["mtp"])
