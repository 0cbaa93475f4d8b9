"""Draft heads that read hidden states of the target: their distributions, and the tokens of plain decoding."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.drafters.test_blocks import make_block
from tests.drafters.test_state_heads import make_head as make_state_head
from tests.helpers import commands
from tests.helpers.drafting import (
    EXECUTORS,
    assert_probabilities,
    assert_samples_of_plain_decoding,
    drafted_rounds,
    make_target,
    target_states,
)
from tests.helpers.exactness import assert_exact, run
from tests.helpers.heads_made import (
    Layout,
    TargetShape,
    draft_ids,
    reference_eagle1,
    reference_eagle3,
    write_eagle1,
    write_eagle3,
)
from tests.helpers.models import (
    edit_config,
    exact_in,
    greedy,
    make_draft,
    new_folder,
    open_llm,
    quick,
    random_prompts,
    tokens_of,
)
from treespec import LLM, RoundRecord, SpecConfig
from treespec.errors import KernelError
from treespec_weights import CheckpointError

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


@functools.cache
def engine_with_heads(dtype: torch.dtype = torch.float32, **options: Any) -> LLM:
    """Every kind of head and of block draft in one engine, and an SSM whose proposals are accepted."""
    target = target_of(dtype)
    heads = [make_head("eagle"), make_head("specforge, other layers, whole vocabulary", 2), make_eagle1("eagle-1", 3)]
    heads += [make_block(kind, target) for kind in ("z-lab", "dspark", "pard", "peagle")]
    heads += [make_state_head(name) for name in ("medusa, vllm", "speculator")]
    ssm = make_draft(new_folder("ssm"), target, 1, 0.05)
    return open_llm(target, [heads[0], ssm, *heads[1:]], **({"max_num_seqs": 4, "prefill_chunk": 40} | options))


SPECS = (
    SpecConfig(nodes=16, max_depth=8, sources=("ssm",)),
    SpecConfig(nodes=24, max_depth=6),
    SpecConfig(branching=(3, 2, 1, 1, 1), max_ssms=2),
    SpecConfig(),
)
PROMPTS = random_prompts((30, 64), vocab=SHAPE.vocab_size)


@EXECUTORS
@exact_in
def test_trees_give_the_bits_of_plain_decoding(dtype: torch.dtype, executor: dict[str, Any]) -> None:
    """Deeper than some heads predict; prompts of one token too, after which there is no hidden state to read yet."""
    llm = engine_with_heads(dtype, **({"prove": True} | executor))
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
    spec = SpecConfig(nodes=16, max_depth=5, verification=verification)
    assert_samples_of_plain_decoding(engine_with_heads(), PROMPTS, spec)


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["rejection", "traversal"])
def test_draws_of_heads_are_verified(verification: Any) -> None:
    llm = engine_with_heads()
    params = greedy(12, temperature=0.9, seed=5, n=2)
    spec = SpecConfig(nodes=12, max_depth=5, sources=("ssm",), verification=verification)
    outputs = llm.generate(PROMPTS, params, spec=spec)
    assert all(len(tokens) == 12 for tokens in tokens_of(outputs))
    assert sum(output.metrics.nodes_verified - output.metrics.target_passes for output in outputs) > 0
    llm.engine.check_integrity()


@pytest.mark.slow
def test_restricted_requests_beside_others() -> None:
    """A request with allowed tokens, a sampled and a greedy one in one batch."""
    restricted = greedy(12, allowed_token_ids=list(range(20, 60)))
    sampled = greedy(12, temperature=0.7, seed=3, allowed_token_ids=list(range(90)))
    plain, tree = (
        engine_with_heads().generate([*PROMPTS, [9] * 20], [restricted, sampled, greedy(12)], spec=spec)
        for spec in ("off", SpecConfig(nodes=16, max_depth=5))
    )
    assert tokens_of(tree) == tokens_of(plain)


@pytest.mark.slow
def test_a_head_is_a_source_like_any_other() -> None:
    llm, records = engine_with_heads(), list[RoundRecord]()
    first, second, third, *_ = (name for name in llm.draft_names if name.startswith("head"))
    with llm.add_round_observer(records.append):
        llm.generate(PROMPTS[:1], greedy(8), spec=SpecConfig(nodes=8, sources=(second,)))
    trees = [record.tree for record in records]
    assert {name for tree in trees for node in range(len(tree)) for name in tree.sources_of(node)} == {second}
    connections = llm.stats()["draft_vocabularies"]
    assert "EAGLE-3" in connections[first] and "reads the target's output states" in connections[third]


@pytest.mark.slow
def test_a_target_without_a_list_of_layers() -> None:
    """Run by transformers' code, one layer is no list that could be told from other modules."""
    options: dict[str, Any] = {"layout": "specforge", "draft_vocab": 64, "own_embedding": False, "boundaries": (0, 1)}
    write_eagle3(head := new_folder("head"), TargetShape(num_hidden_layers=1), seed=1, **options)
    with pytest.raises(KernelError, match=r"hidden states of layers \[0, 1\]: not available"):
        open_llm(target_of(num_hidden_layers=1), [head], backend="transformers")


# --- bad input


def spoiled(**changes: Any) -> Path:
    """A head whose tensors are replaced, or dropped if None."""
    folder = make_head("specforge")
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    return folder


def damaged(name: str, count: int | None = None) -> Path:
    """A head in a pickle that is cut off, or that lacks some tensors."""
    folder = make_head(name) if name in HEADS else make_eagle1(name)
    path = folder / "pytorch_model.bin"
    if count is not None:
        path.write_bytes(path.read_bytes()[:count])
    else:
        torch.save({key: each for key, each in torch.load(path).items() if "q_proj" not in key}, path)
    return folder


def indexed() -> Path:
    """A head with an optional tensor in the index alone."""
    folder = make_head("specforge")
    index = dict.fromkeys([*load_file(folder / "model.safetensors"), "fc.bias"], "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def unknown(**config: Any) -> Path:
    (new := new_folder("head")).joinpath("config.json").write_text(json.dumps(config))
    return new


DEEP = "specforge, other layers, whole vocabulary"
# By name: makes the head, what the target has otherwise, and what is said.
WRONG: dict[str, tuple[Callable[[], Path], dict[str, Any], str]] = {
    "no norm": (
        lambda: spoiled(**{"midlayer.hidden_norm.weight": None}),
        {},
        "'layers.0.hidden_norm.weight': expected a tensor of shape",
    ),
    "no map": (lambda: spoiled(d2t=None), {}, "d2t.*missing: the head has 96 rows, the target 256 tokens"),
    "a bad map": (lambda: spoiled(d2t=5 - torch.arange(96)), {}, "d2t.*96 tokens from 5 to 5 for 96 rows"),
    "an index": (indexed, {}, "'fc.bias': missing; the index places it in 'model.safetensors'"),
    "a cut pickle": (lambda: damaged("eagle", 2000), {}, "pytorch_model.bin.*not a file of tensors"),
    "quantised": (
        lambda: edit_config(make_head("specforge"), quantization_config={"quant_method": "awq"}),
        {},
        "quantised draft heads are not supported",
    ),
    "another width": (lambda: make_head("specforge"), {"hidden_size": 128}, "192 values per token, 3 .* have 128 each"),
    "other tokens": (lambda: make_head("specforge"), {"vocab_size": 272}, "of 256 tokens, the target has 272"),
    "fewer layers": (lambda: make_head(DEEP), {"num_hidden_layers": 4}, r"layers \(1, 3, 6\), and .* has 4 layers"),
    "eagle-1, another width": (lambda: make_eagle1("eagle-1"), {"hidden_size": 128}, "64, the target has 128; use a"),
    "eagle-1, other tokens": (lambda: make_eagle1("eagle-1"), {"vocab_size": 272}, "256, the target has 272"),
    "eagle-1, norms": (
        lambda: edit_config(make_eagle1("eagle-1 of speculators"), layernorms=True),
        {},
        "layernorms.*not supported",
    ),
    "eagle-1, no queries": (lambda: damaged("eagle-1"), {}, "'layers.0.self_attn.q_proj.weight': expected a tensor"),
    "Arctic": (
        lambda: unknown(architectures=["ArcticMLPSpeculatorPreTrainedModel"]),
        {},
        "an Arctic speculator, which is not supported; supported: EAGLE-1, EAGLE-2 and EAGLE-3 heads",
    ),
    "Xpress": (lambda: unknown(speculators_model_type="xpress"), {}, "an Xpress draft, which is not supported"),
}


@pytest.mark.parametrize("name", quick(WRONG, ("no norm", "a bad map", "a cut pickle", "an index")))
def test_heads_that_do_not_fit(name: str) -> None:
    make, config, message = WRONG[name]
    with pytest.raises(CheckpointError, match=message):
        open_llm(target_of(**config), [make()])


@pytest.mark.slow
def test_inspection() -> None:
    def shown(target: Path, head: Path) -> str:
        return " ".join(commands.run("weights", "inspect", target, "--draft", head).stdout.split())

    head, eagle = make_head("speculators"), make_eagle1("eagle-1")
    expected = "usable: EAGLE-3 head, reads the inputs of the target's layers 2, 4, 5; proposes 64 of 256 tokens"
    assert expected in shown(target_of(), head)
    assert "usable: EAGLE head, reads the target's output states; proposes 256 of 256" in shown(target_of(), eagle)
    assert "use a draft of this target" in shown(target_of(hidden_size=128), head)
