"""Draft heads of all kinds, and parallel drafts: their distributions, and the tokens of plain decoding."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tests.helpers.blocks_made import reference_dflash, write_dflash
from tests.helpers.drafting import (
    EXECUTORS,
    assert_probabilities,
    drafted_rounds,
    every_executor,
    make_target,
    target_states,
)
from tests.helpers.exactness import assert_exact, run
from tests.helpers.heads_made import (
    MASK,
    TargetShape,
    draft_ids,
    reference_eagle1,
    reference_eagle3,
    reference_peagle,
    reference_state_ssm,
    write_eagle1,
    write_eagle3,
    write_state_ssm,
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
from tests.helpers.quantized_checkpoints import needs_compiler
from tests.helpers.speech import rank_half
from tests.helpers.state_heads_made import reference_medusa, reference_speculator, write_medusa, write_speculator
from treespec import LLM, RoundRecord, SpecConfig
from treespec.models.feature_head import TorchPairs
from treespec_kernels.linear.linear import Linear

SHAPE = TargetShape(num_hidden_layers=8)
EAGLE3 = {"layout": "eagle", "draft_vocab": 96, "own_embedding": False}
SPECFORGE = {"layout": "specforge", "draft_vocab": 96, "own_embedding": True}
SPECULATORS = {"layout": "speculators", "draft_vocab": 64, "own_embedding": False}
# By name: who writes it, and what it is told.
HEADS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "eagle": (write_eagle3, EAGLE3),
    "specforge": (write_eagle3, SPECFORGE),
    "specforge, other layers, whole vocabulary": (
        write_eagle3,
        SPECFORGE | {"draft_vocab": None, "boundaries": (1, 3, 6)},
    ),
    "speculators": (write_eagle3, SPECULATORS | {"norm_before_residual": True}),
    "speculators, one norm before fc": (write_eagle3, SPECULATORS | {"own_embedding": True, "norm_before_fc": True}),
    "speculators, norms before fc and after the output": (
        write_eagle3,
        {"layout": "speculators", "draft_vocab": None, "own_embedding": True}
        | {"fc_norm": True, "norm_output": True, "hidden_size": 32},
    ),
    "state ssm": (write_state_ssm, {"draft_vocab": 96, "layers": (2, 4, 9), "tied": True}),
    "state ssm, untied": (write_state_ssm, {"draft_vocab": 64, "layers": (0, 7), "tied": False}),
    "peagle": (write_eagle3, SPECULATORS | {"own_embedding": True, "boundaries": (1, 4, 6), "parallel": 5}),
    "eagle-1": (write_eagle1, {"bias": True, "own_embedding": True}),
    "eagle-1, biases of attention": (write_eagle1, {"bias": False, "own_embedding": False, "qkv_bias": True}),
    "eagle-1 of speculators": (write_eagle1, {"layout": "speculators", "bias": True, "own_embedding": False}),
    "z-lab": (write_dflash, {"layout": "z-lab"}),
    "transformers": (write_dflash, {"layout": "transformers", "read": (2, 8)}),
    "dflash of speculators": (write_dflash, {"layout": "speculators", "draft_vocab": 96}),
    "dflash, anchor": (write_dflash, {"layout": "speculators", "from_anchor": True, "read": (5, 3), "block_size": 4}),
    "dspark": (write_dflash, {"layout": "speculators", "draft_vocab": 96, "from_anchor": True, "markov": "vanilla"}),
    "dspark, gated": (write_dflash, {"layout": "speculators", "markov": "gated"}),
    "pard": (lambda folder, shape, seed: make_pard(folder), {}),
    "medusa, authors": (write_medusa, {"layout": "authors"}),
    "medusa, tgi": (write_medusa, {"layout": "tgi", "layers": 2}),
    "medusa, vllm": (write_medusa, {"layout": "vllm", "mapped": 96, "bias": False}),
    "medusa, one vocabulary head": (write_medusa, {"layout": "vllm", "shared": True}),
    "speculator": (write_speculator, {"tied": False, "scaled": False, "inner": 64}),
    "speculator, tied and scaled": (write_speculator, {"tied": True, "scaled": True}),
}
FAST = ("eagle", "state ssm", "speculators, norms before fc and after the output", "dspark", "pard", "peagle")
ONE_OF_EACH = ("eagle", "eagle-1", "state ssm", "z-lab", "dspark", "pard", "peagle", "medusa, vllm", "speculator")


@functools.cache
def target_of(dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    return make_target(SHAPE, dtype, **config)


def make_pard(folder: Path, **config: Any) -> None:
    make_draft(folder, target_of(**config), 2, 0.05)
    edit_config(folder, pard_token=MASK)


def make_head(name: str, seed: int = 1) -> Path:
    write, options = HEADS[name]
    write(folder := new_folder("head"), SHAPE, seed=seed, **options)
    return folder


CASES = [(name, "compiled") for name in HEADS]
CASES += [(name, "eager") for name in ONE_OF_EACH]
CASES += [(name, "transformers") for name in ("eagle", "eagle-1", "z-lab")]  # what else reads states reads these
WHOLE = ("specforge, other layers, whole vocabulary", "eagle-1", "z-lab", "dspark, gated", "pard", "medusa, authors")
CUT = [(name, executor, "cut") for name in (*WHOLE, "speculator") for executor in ("compiled", "eager")]


@needs_compiler
@pytest.mark.parametrize("case", quick([*CASES, *CUT], [*((name, "compiled") for name in FAST), CUT[2]]))
def test_probabilities_are_those_of_the_reference(case: tuple[str, ...]) -> None:
    """At every drafted node, over several rounds; of the tokens that the head keeps."""
    name, executor, *cut = case
    target, head = make_target(SHAPE) if cut else target_of(), make_head(name)
    options_of_cut = {"draft_vocabulary": len(kept := rank_half(target))} if cut else {}
    write, options = HEADS[name]
    stateful = write in (write_medusa, write_speculator)
    tree = {"tokens": 40, "nodes": 40, "max_depth": 5} if stateful else {}
    records = drafted_rounds(target, head, SHAPE.vocab_size, EXECUTORS[executor] | options_of_cut, **tree)
    model = AutoModelForCausalLM.from_pretrained(head if name == "pard" else target)
    embed, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    states = target_states(model, records)
    layers = options.get("boundaries") or options.get("read") or options.get("layers") or (1, 4, 6)
    if write is write_eagle3 and "boundaries" not in options:
        layers = 2, SHAPE.num_hidden_layers // 2, SHAPE.num_hidden_layers - 3

    def expected(record: RoundRecord, path: list[int]) -> torch.Tensor:
        found, root = states[record.number], int(record.tree.tokens[0])
        known = [*record.context, root]
        if name == "pard":
            return model(torch.tensor([[*known, *[MASK] * len(path)]])).logits[0, -1]
        if write is write_medusa:
            return reference_medusa(head, found[-1][-1], len(path) + 1)
        if write is write_speculator:
            return reference_speculator(head, found[-1][-1], [root, *path])
        if write is write_eagle1:
            return reference_eagle1(head, embed, known, found[-1], path)[-1] @ lm_head.T
        # transformers' last state is that after the final norm
        read = torch.stack([found[min(layer, SHAPE.num_hidden_layers)] for layer in layers], 1)
        if name == "peagle":
            return reference_peagle(head, embed, known, read)[len(path)]
        if write is write_state_ssm:
            return reference_state_ssm(head, known, read, path)
        if write is write_eagle3:
            return reference_eagle3(head, embed, known, read, path)[-1]
        return reference_dflash(head, embed, lm_head, root, read, path)[len(path)]

    reduced = write is write_eagle3 or "draft_vocab" in options
    ids = draft_ids(head).tolist() if reduced else [*range(SHAPE.vocab_size)]
    if cut:
        assert_probabilities(records, head.name, kept, lambda *node: expected(*node)[kept])
    else:
        assert_probabilities(records, head.name, ids, expected)


@pytest.mark.slow
def test_the_reference_of_dflash_is_the_module_of_transformers() -> None:
    draft = make_head("transformers")
    module = AutoModel.from_config(AutoConfig.from_pretrained(draft)).float().eval()
    module.load_state_dict(load_file(draft / "model.safetensors"))
    generator = torch.Generator().manual_seed(2)
    embed, head = (torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=generator) for _ in range(2))
    states = torch.randn(9, 2, SHAPE.hidden_size, generator=generator)
    noise = embed[torch.tensor([5, *[MASK] * 5])]
    with torch.inference_mode():
        found = module(noise_embeds=noise[None], context_hidden_states=states.flatten(1)[None]).last_hidden_state[0]
        expected = reference_dflash(draft, embed, head, 5, states)
    torch.testing.assert_close((found @ head.T)[1:], expected, atol=1e-4, rtol=1e-4)


# --- the tokens of plain decoding


@functools.cache
def engine_with_heads(dtype: torch.dtype = torch.float32, **options: Any) -> LLM:
    """Every kind of head in one engine, and an SSM whose proposals are accepted."""
    target = target_of(dtype)
    names = *ONE_OF_EACH[:1], "specforge, other layers, whole vocabulary", *ONE_OF_EACH[1:]
    first, *heads = (make_head(name, seed) for seed, name in enumerate(names, start=1))
    ssm = make_draft(new_folder("ssm"), target, 1, 0.05)
    return open_llm(target, [first, ssm, *heads], **({"max_num_seqs": 4, "max_num_batched_tokens": 40} | options))


SPECS = (
    SpecConfig(nodes=16, max_depth=8, sources=("ssm",)),
    SpecConfig(nodes=24, max_depth=6),
    SpecConfig(branching=(3, 2, 1, 1, 1), max_ssms=2),
    SpecConfig(),
)
PROMPTS = random_prompts((30, 64), vocab=SHAPE.vocab_size)


@every_executor
@exact_in
def test_trees_give_the_bits_of_plain_decoding(dtype: torch.dtype, executor: dict[str, Any]) -> None:
    """Deeper than some heads predict; prompts of one token too, after which there is no hidden state to read yet."""
    llm = engine_with_heads(dtype, **({"prove": True} | executor))
    plain = run(llm, random_prompts((1, 2, 61, 90), vocab=SHAPE.vocab_size), greedy(20))
    for spec in SPECS if executor.get("compile") else SPECS[1::2]:  # compiled takes a quarter of the time
        tree = assert_exact(llm, plain, spec)
        assert tree.acceptance_length > 1.2
    [ssm] = [name for name in llm.draft_names if name.startswith("ssm")]
    assert sum(output.metrics.accepted_by_source.get(ssm, 0) for output in tree.outputs) > 0


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["coupled", "naive", "rejection", "traversal"])
def test_sampled_and_restricted_requests(verification: Any) -> None:
    """Samples of one prompt share its pages, and with them the hidden states. Others may say some tokens only."""
    llm, drawn = engine_with_heads(torch.float32, prove=True, compile=False), verification in ("rejection", "traversal")
    spec = SpecConfig(nodes=12, max_depth=5, sources=("ssm",) if drawn else None, verification=verification)
    some = {"allowed_token_ids": list(range(20, 60))}
    each = [{"temperature": 0.8, "seed": 5, "n": 2}, {"temperature": 0.7, "seed": 3, **some}, some, {}]
    params = [greedy(16, **options) for options in each]
    plain, trees = (llm.generate([*PROMPTS, *PROMPTS], params, spec=how) for how in ("off", spec))
    assert sum(output.metrics.accepted_tokens for output in trees) > 0
    for output, expected, own in zip(trees, plain, params, strict=True):
        assert tokens_of([output]) == tokens_of([expected]) or (drawn and own.temperature)
        within = set(own.allowed_token_ids or range(SHAPE.vocab_size))
        assert all(within.issuperset(tokens) for tokens in tokens_of([output]))
    llm.engine.check_integrity()


class CountedConversions(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._to_copy.default
        return function(*args, **(kwargs or {}))


def test_norms_of_pairs_are_converted_once() -> None:
    generator = torch.Generator().manual_seed(0)
    product, embed, *norms = (torch.randn(*size, generator=generator) for size in ((8, 16), (5, 8), (8,), (8,)))
    pairs = TorchPairs(Linear(product, None, "torch"), embed, [norm.bfloat16() for norm in norms], 1e-5, "product")
    with CountedConversions() as conversions:
        pairs(torch.tensor([1, 4]), torch.randn(2, 8, generator=generator))
    assert conversions.count == 0
