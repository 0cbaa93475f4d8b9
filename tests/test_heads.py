"""Draft heads that read hidden states of the target: their distributions, and the tokens of plain decoding."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.drafting import (
    EXECUTORS,
    assert_probabilities,
    assert_samples_of_plain_decoding,
    drafted_rounds,
    make_target,
    target_states,
)
from tests.exactness import assert_exact, run
from tests.heads_made import (
    Layout,
    TargetShape,
    draft_ids,
    reference_eagle1,
    reference_eagle3,
    write_eagle1,
    write_eagle3,
)
from tests.models import edit_config, exact_in, greedy, make_draft, new_folder, open_llm, quick, random_prompts
from tests.quantized_checkpoints import needs_compiler
from treespec import RoundRecord, SamplingParams, SpecConfig
from treespec.cli import app
from treespec.errors import KernelError
from treespec_weights import CheckpointError, UnsupportedModelError

SHAPE = TargetShape(num_hidden_layers=8)

# By name: the layout, the size of the draft's vocabulary, and what else `write_eagle3` is told.
HEADS: dict[str, tuple[Layout, int | None, dict[str, Any]]] = {
    "eagle": ("eagle", 96, {"own_embedding": False}),
    "specforge": ("specforge", 96, {"own_embedding": True}),
    "specforge, other layers, whole vocabulary": ("specforge", None, {"own_embedding": False, "boundaries": (1, 3, 6)}),
    "speculators": ("speculators", 64, {"own_embedding": False, "norm_before_residual": True}),
    "speculators, one norm before fc": ("speculators", 64, {"own_embedding": True, "norm_before_fc": True}),
    "speculators, norms before fc and after the output": (
        "speculators",
        None,
        {"own_embedding": True, "fc_norm": True, "norm_output": True, "hidden_size": 32},
    ),
}
FAST = ("eagle", "eagle-1", "speculators, norms before fc and after the output")  # the others are slow tests
TREE = SpecConfig(nodes=16, max_depth=5, sources=("ssm",))


def target_of(dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    return make_target(SHAPE, dtype, **config)


def make_head(name: str, seed: int = 1) -> Path:
    layout, draft_vocab, options = HEADS[name]
    folder = new_folder("head")
    write_eagle3(folder, SHAPE, layout=layout, draft_vocab=draft_vocab, seed=seed, **options)
    return folder


def layers_of(name: str) -> tuple[int, ...]:
    return HEADS[name][2].get("boundaries") or (2, SHAPE.num_hidden_layers // 2, SHAPE.num_hidden_layers - 3)


# By name: what `write_eagle1` is told.
EAGLE_HEADS: dict[str, dict[str, Any]] = {
    "eagle-1": {"bias": True, "own_embedding": True},
    "eagle-1, biases of attention": {"bias": False, "own_embedding": False, "qkv_bias": True},
    "eagle-1 of speculators": {"layout": "speculators", "bias": True, "own_embedding": False},
}


def make_eagle1(name: str, seed: int = 1) -> Path:
    write_eagle1(folder := new_folder("head"), SHAPE, seed=seed, **EAGLE_HEADS[name])
    return folder


@EXECUTORS
@pytest.mark.parametrize("name", quick((*HEADS, *EAGLE_HEADS), FAST))
def test_probabilities_are_those_of_the_reference(name: str, executor: dict[str, Any]) -> None:
    """At every drafted node, over several rounds."""
    target, head = target_of(), make_eagle1(name) if name in EAGLE_HEADS else make_head(name)
    records = drafted_rounds(target, head, SHAPE.vocab_size, executor)
    model = AutoModelForCausalLM.from_pretrained(target)
    states, embed = target_states(model, records), model.get_input_embeddings().weight

    def expected(record: RoundRecord, drafted: list[int]) -> torch.Tensor:
        found, known = states[record.number], [*record.context, int(record.tree.tokens[0])]
        if name in EAGLE_HEADS:  # transformers' last state is that after the final norm
            return model.get_output_embeddings()(reference_eagle1(head, embed, known, found[-1], drafted)[-1])
        features = torch.stack([found[layer] for layer in layers_of(name)], 1)
        return reference_eagle3(head, embed, known, features, drafted).logits[-1]

    ids = range(SHAPE.vocab_size) if name in EAGLE_HEADS else draft_ids(head).tolist()
    assert_probabilities(records, head.name, ids, expected)


# --- the tokens of plain decoding


def engine_with_heads(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Heads of two kinds that read different layers, and an SSM whose proposals are accepted."""
    target = target_of(dtype)
    draft = make_draft(new_folder("ssm"), target, 1, 0.05)
    heads = [make_head("eagle"), make_head("specforge, other layers, whole vocabulary", seed=2)]
    heads.append(make_eagle1("eagle-1", seed=3))
    return open_llm(target, [heads[0], draft, *heads[1:]], **({"max_num_seqs": 3, "prefill_chunk": 40} | options))


SPECS = (
    TREE,
    SpecConfig(nodes=24, max_depth=6),
    SpecConfig(branching=(3, 2, 1), max_ssms=2),
    SpecConfig(),
)


@pytest.mark.parametrize(
    "compiled",
    [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=needs_compiler)],
    ids=["eager", "compiled"],
)
@exact_in
def test_trees_give_the_bits_of_plain_decoding(dtype: torch.dtype, compiled: bool) -> None:
    """Prompts of one token too, after which there is no hidden state to read yet."""
    llm = engine_with_heads(dtype, compile=compiled, prove=True)
    plain = run(llm, random_prompts((1, 2, 61, 90), vocab=SHAPE.vocab_size), greedy(20))
    for spec in SPECS:
        tree = assert_exact(llm, plain, spec)
        assert tree.acceptance_length > 1.2
    [ssm] = [name for name in llm.draft_names if name.startswith("ssm")]
    assert sum(output.metrics.accepted_by_source.get(ssm, 0) for output in tree.outputs) > 0


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["coupled", "naive"])
def test_sampled_tokens_are_those_of_plain_decoding(verification: Any) -> None:
    """Samples of one prompt share its pages, and with them the hidden states."""
    spec = SpecConfig(nodes=16, max_depth=4, verification=verification)
    assert_samples_of_plain_decoding(engine_with_heads(), random_prompts((30, 64), vocab=SHAPE.vocab_size), spec)


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["rejection", "traversal"])
def test_draws_of_heads_are_verified(verification: Any) -> None:
    llm = engine_with_heads()
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True)
    spec = SpecConfig(nodes=12, max_depth=3, sources=("ssm",), verification=verification)
    outputs = llm.generate(random_prompts((30, 64), vocab=SHAPE.vocab_size), params, spec=spec)
    assert all(len(output.outputs[0].token_ids) == 12 for output in outputs)
    assert sum(output.metrics.nodes_verified - output.metrics.target_passes for output in outputs) > 0


@pytest.mark.slow
def test_a_head_is_a_source_like_any_other() -> None:
    llm = engine_with_heads()
    first, second, third = (name for name in llm.draft_names if name.startswith("head"))
    records: list[RoundRecord] = []
    with llm.add_round_observer(records.append):
        llm.generate(
            random_prompts((40,), vocab=SHAPE.vocab_size), greedy(8), spec=SpecConfig(nodes=8, sources=(second,))
        )
    proposed = {
        source for record in records for node in range(len(record.tree)) for source in record.tree.sources_of(node)
    }
    assert proposed == {second} and len({first, second, third}) == 3
    found = llm.stats()["draft_vocabularies"]
    assert "EAGLE-3" in found[first] and "reads the target's output states" in found[third]


# --- bad input


def spoiled(folder: Path, **changes: Any) -> Path:
    """A head whose tensors are replaced, or dropped if None."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    return folder


@pytest.mark.slow
def test_a_head_of_another_target() -> None:
    head = make_head("specforge")
    wider = target_of(hidden_size=128, num_hidden_layers=8)
    with pytest.raises(CheckpointError, match=r"192 values per token, 3 layers of the target have 128 each"):
        open_llm(wider, [head])
    with pytest.raises(CheckpointError, match="for a vocabulary of 256 tokens, the target has 272"):
        open_llm(target_of(vocab_size=272), [head])
    deep = make_head("specforge, other layers, whole vocabulary")
    with pytest.raises(CheckpointError, match=r"reads layers \(1, 3, 6\), and the target has 4 layers"):
        open_llm(target_of(num_hidden_layers=4), [deep])


def test_a_damaged_head() -> None:
    target = target_of()
    with pytest.raises(CheckpointError, match=r"'layers.0.hidden_norm.weight': expected a tensor of shape"):
        open_llm(target, [spoiled(make_head("specforge"), **{"midlayer.hidden_norm.weight": None})])
    with pytest.raises(CheckpointError, match=r"d2t.*missing: the head has 96 rows, the target 256 tokens"):
        open_llm(target, [spoiled(make_head("specforge"), d2t=None)])
    with pytest.raises(CheckpointError, match=r"d2t.*96 tokens from 5 to 5 for 96 rows"):
        open_llm(target, [spoiled(make_head("specforge"), d2t=5 - torch.arange(96))])
    head = make_head("specforge")  # with an optional tensor in the index alone
    index = dict.fromkeys([*load_file(head / "model.safetensors"), "fc.bias"], "model.safetensors")
    (head / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(CheckpointError, match=r"'fc.bias': missing; the index places it in 'model.safetensors'"):
        open_llm(target, [head])
    head = make_head("eagle")
    (head / "pytorch_model.bin").write_bytes((head / "pytorch_model.bin").read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin.*not a file of tensors"):
        open_llm(target, [head])
    edit_config(head := make_head("specforge"), quantization_config={"quant_method": "awq"})
    with pytest.raises(CheckpointError, match="quantised draft heads are not supported"):
        open_llm(target, [head])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["ArcticMLPSpeculatorPreTrainedModel"]}, "an Arctic speculator"),
        ({"speculators_model_type": "xpress"}, "an Xpress draft"),
    ],
)
def test_kinds_that_are_not_supported(config: dict[str, Any], kind: str) -> None:
    folder = new_folder("head")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedModelError, match=f"{kind}, which is not supported; supported: EAGLE-1, EAGLE-2 and EAGLE-3 heads"
    ):
        open_llm(target_of(), [folder])


@pytest.mark.slow
def test_an_eagle_1_head_of_another_target() -> None:
    head = make_eagle1("eagle-1")
    with pytest.raises(CheckpointError, match=r"hidden_size.*64, the target has 128; use a head that was trained"):
        open_llm(target_of(hidden_size=128), [head])
    with pytest.raises(CheckpointError, match=r"vocab_size.*256, the target has 272"):
        open_llm(target_of(vocab_size=272), [head])
    edit_config(other := make_eagle1("eagle-1 of speculators"), layernorms=True)
    with pytest.raises(CheckpointError, match=r"layernorms.*not supported"):
        open_llm(target_of(), [other])
    kept = torch.load(head / "pytorch_model.bin")
    torch.save({name: each for name, each in kept.items() if "q_proj" not in name}, head / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"'layers.0.self_attn.q_proj.weight': expected a tensor of shape"):
        open_llm(target_of(), [head])


@pytest.mark.slow
def test_a_target_run_by_transformers() -> None:
    llm = engine_with_heads(backend="transformers", prove=True)
    plain = run(llm, random_prompts((1, 40), vocab=SHAPE.vocab_size), greedy(12))
    tree = assert_exact(llm, plain, TREE)
    assert tree.acceptance_length > 1.2


@pytest.mark.slow
def test_a_target_without_a_list_of_layers() -> None:
    """Run by transformers' code, one layer is no list that could be told from other modules."""
    options: dict[str, Any] = {"layout": "specforge", "draft_vocab": 64, "own_embedding": False, "boundaries": (0, 1)}
    write_eagle3(head := new_folder("head"), TargetShape(num_hidden_layers=1), seed=1, **options)
    with pytest.raises(KernelError, match=r"hidden states of layers \[0, 1\]: not available"):
        open_llm(target_of(num_hidden_layers=1), [head], backend="transformers")


@pytest.mark.slow
def test_inspection() -> None:
    head, eagle = make_head("speculators"), make_eagle1("eagle-1")

    def shown(target: Path, head: Path = head) -> str:
        return " ".join(
            CliRunner().invoke(app, ["weights", "inspect", str(target), "--draft", str(head)]).output.split()
        )

    expected = "usable: EAGLE-3 head, reads the inputs of the target's layers 2, 4, 5; proposes 64 of 256 tokens"
    assert expected in shown(target_of())
    assert "usable: EAGLE head, reads the target's output states; proposes 256 of 256" in shown(target_of(), eagle)
    assert "use a head of this target" in shown(target_of(hidden_size=128))
