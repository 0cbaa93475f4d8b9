"""Assistants of Gemma 4: their distributions, and the tokens of plain decoding."""

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.drafting import assert_probabilities, drafted_rounds
from tests.helpers.exactness import assert_exact, run
from tests.helpers.families import CASES, TYPICAL, VOCAB, WINDOW, fitting, make_model
from tests.helpers.models import greedy, new_folder, open_llm, quick, random_prompts, randomize
from tests.helpers.quantized_checkpoints import needs_compiler
from tests.helpers.speech import rank_half
from treespec import RoundRecord, SpecConfig
from treespec.errors import CheckpointError, ModelError
from treespec_weights import inspect_checkpoint
from treespec_weights.heads import compare_head, read_head

LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
KINDS: dict[str, dict[str, Any]] = {"all tokens": {}, "groups": {"use_ordered_embeddings": True, "num_centroids": 8}}
EXECUTORS = [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=needs_compiler)]
QUICK = [("groups", False)]
EVEN = {"vocab_size": VOCAB + 3, "vocab_size_per_layer_input": VOCAB + 3}  # a multiple of the groups


@functools.cache
def target_of(dtype: torch.dtype = torch.float32) -> Path:
    return make_model(new_folder("target"), TYPICAL["gemma4"], 3, dtype, **fitting(TYPICAL["gemma4"]), **EVEN)


@functools.cache
def assistant_of(kind: str = "all tokens", dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """A random assistant of a target with these keys."""
    torch.manual_seed(5)
    own = AutoConfig.from_pretrained(target_of()).to_dict()
    text = {key: own[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters")}
    text |= {"global_head_dim": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
    text |= {"layer_types": LAYERS, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    text |= {"vocab_size": VOCAB + 3, "max_position_embeddings": 256, "sliding_window": WINDOW}
    sizes = {"backbone_hidden_size": own["hidden_size"], "centroid_intermediate_top_k": 3} | KINDS[kind] | config
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_assistant", text_config=text, **sizes))
    with torch.no_grad():
        randomize(model, gain=1.5, head_gain=1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2)
            if name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(VOCAB + 3))
    folder = new_folder("assistant")
    model.to(dtype).save_pretrained(folder)
    return folder


@needs_compiler
@pytest.mark.parametrize(
    "case", quick([*((kind, on) for kind in KINDS for on in (False, True)), ("all tokens", True, "cut")], QUICK)
)
@torch.inference_mode()
def test_probabilities_are_those_of_transformers(case: tuple[Any, ...]) -> None:
    """At every drafted node. From the root on, the loop of transformers stays at the root's position."""
    (kind, compiled, *cut), target = case, target_of()
    assistant, kept, executor = assistant_of(kind), [*range(VOCAB + 3)], {"compile": compiled}
    if cut:
        kept = rank_half(target := Path(shutil.copytree(target, new_folder("cut") / "target")))
        executor |= {"draft_vocabulary": len(kept)}
    records = drafted_rounds(target, assistant, VOCAB, executor, nodes=10)
    model, draft = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (target, assistant))
    options = {"output_hidden_states": True, "return_shared_kv_states": True}

    def expected(record: RoundRecord, path: list[int]) -> torch.Tensor:
        found = model(torch.tensor([record.context]), **options)
        state, position = found.hidden_states[-1][:, -1:], torch.tensor([[len(record.context)]])
        for token in (int(record.tree.tokens[0]), *path):
            inputs = torch.cat((model.get_input_embeddings()(torch.tensor([[token]])), state), -1)
            out = draft(inputs_embeds=inputs, position_ids=position, shared_kv_states=dict(found.shared_kv_states))
            state, logits = out.last_hidden_state, out.logits[0, 0]
        return logits.masked_fill(logits == logits.min(), -torch.inf) if kind == "groups" else logits[kept]

    assert_probabilities(records, assistant.name, kept, expected)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", EXECUTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trees_give_the_bits_of_plain_decoding(dtype: torch.dtype, compiled: bool) -> None:
    """Alone, and beside an SSM and lookup."""
    target, sizes = target_of(dtype), fitting(CASES["llama"]) | EVEN
    drafts = [assistant_of("groups", dtype), make_model(new_folder("ssm"), CASES["llama"], 1, dtype, **sizes)]
    llm = open_llm(target, drafts, compile=compiled, prove=True, max_num_seqs=3, max_num_batched_tokens=40)
    plain = run(llm, random_prompts((1, 61, 90), vocab=VOCAB), greedy(20))
    for spec in (SpecConfig(nodes=12, max_depth=4, sources=(llm.draft_names[0],)), SpecConfig(nodes=16, max_depth=5)):
        tree = assert_exact(llm, plain, spec)
        assert sum(output.metrics.nodes_verified for output in tree.outputs) > 20


def test_assistants_of_other_targets_are_refused() -> None:
    gemma = make_model(new_folder("other"), CASES["gemma3"], 1, **EVEN)
    with pytest.raises(ModelError, match=r"layer 2 reads keys of 2 heads of 48, and no layer of"):
        open_llm(gemma, [assistant_of()])
    with pytest.raises(ModelError, match="vocab_size is 512, that of the target 509"):
        open_llm(make_model(new_folder("other"), TYPICAL["gemma4"], 1), [assistant_of()])
    with pytest.raises(ModelError, match="transformers' code runs this target"):
        open_llm(target_of(), [assistant_of()], backend="transformers")
    with pytest.raises(CheckpointError, match=r"backbone_hidden_size.*the target has 64"):
        open_llm(target_of(), [assistant_of(backbone_hidden_size=48)], exact=False)


def test_inspect_compares_an_assistant_with_its_target() -> None:
    form = read_head(assistant_of())
    assert form is not None
    row = compare_head(inspect_checkpoint(target_of()), form)
    assert row["usable"] and row["connection"].startswith("Gemma 4 assistant, reads the target's output states")
