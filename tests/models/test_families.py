"""Every family against transformers' own classes, and its trees against its plain decoding."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.helpers.exactness import assert_exact, differences, run
from tests.helpers.families import CASES, HYBRIDS, SLOW, TYPICAL, VOCAB, WINDOW, fitting, make_model
from tests.helpers.models import (
    FLOATS,
    OracleDrafter,
    greedy,
    make_draft,
    new_folder,
    open_llm,
    quick,
    random_prompts,
    replace_drafters,
    tree_of,
)
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec import LLM, SamplingParams, SpecConfig
from treespec.cli.kernels import settings_of
from treespec.engine.runner import tree_rows
from treespec.errors import ConfigError, KernelError, VariantError
from treespec.models.hidden_states import HiddenStates
from treespec.models.model_config import ModelConfig
from treespec.request import Request
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.comparison import assert_close
from treespec_weights.families import FAMILIES

PREFILL, LENGTH = 118, 126  # tokens prefilled in two chunks, and tokens before the tree
TREE = SpecConfig(nodes=20, max_depth=6)
SPECS = (TREE, SpecConfig(nodes=40, max_depth=4, sources=("ssm",)), SpecConfig())


class Outputs(NamedTuple):
    """`logits`: [n, vocab]; `states`: [n, num_layers + 1, hidden_size], what enters each layer, and the final one."""

    logits: Tensor
    states: Tensor


def a_tree(root: int, nodes: int, seed: int) -> TokenTree:
    """A random tree that has both depth and width."""
    rng = np.random.default_rng(seed)
    paths: list[tuple[int, ...]] = [()]
    while len(paths) < nodes:
        path = (*paths[int(rng.integers(max(0, len(paths) - 4), len(paths)))], int(rng.integers(1, VOCAB)))
        paths += [path] * (path not in paths)
    return tree_of(root, dict.fromkeys(paths[1:], 1.0))


def ours(folder: Path, tokens: list[int], tree: TokenTree, compiled: bool = False) -> Outputs:
    """The prompt in two chunks, then decoding token by token, then the tree behind all but its root."""
    llm = open_llm(folder, exact=False, max_model_len=None, compile=compiled)
    target, cache = llm.engine.runner.target, llm.engine.cache
    runner, layers = llm.engine.runner, [*range(len(target.config.layers)), len(target.config.layers) + 1]

    def run_pass(rows: list[RequestRows], ids: Sequence[int]) -> HiddenStates:
        plan = target.plan(rows, cache.pools[0])
        return target.forward_with_states(torch.tensor(ids), plan, cache.pools[0], layers)

    request = Request(tokens, SamplingParams(), SpecConfig.off(), max_tokens=1)
    request.pages = cache.reserve(request.request_id, len(tokens) + len(tree))
    request.state = cache.reserve_state(request.request_id)
    logits, states = [], []
    with torch.inference_mode():
        for start, stop in ((0, 70), (70, PREFILL)):
            rows = [RequestRows.chain(start, stop - start, request.pages, state=request.state_rows(stop - start))]
            hidden, chosen = run_pass(rows, tokens[start:stop])
            logits.append(target.logits(hidden[: stop - start]))
            states.append(chosen[: stop - start])
        for step in [TokenTree.root(token) for token in tokens[PREFILL:LENGTH]] + [tree]:
            request.context_len = LENGTH if step is tree else PREFILL + len(logits) - 2
            (choices,) = runner.forward([request], [step])
            _, chosen = run_pass([tree_rows(request, step)], step.tokens.tolist())
            logits.append(choices.logits)
            states.append(chosen[: len(step)])
    return Outputs(torch.cat(logits), torch.cat(states))


def theirs(folder: Path, tokens: list[int], tree: TokenTree) -> Outputs:
    """The same rows, each node of the tree at the end of its own path."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    parents = tree.parents.tolist()
    paths: list[list[int]] = [[0]]
    for node in range(1, len(tree)):
        paths.append([*paths[parents[node]], node])
    leaves = [path for node, path in enumerate(paths) if node not in parents]
    length = LENGTH + max(map(len, leaves))  # what stands behind a path changes nothing before
    batch = [(tokens[:LENGTH] + tree.tokens[path].tolist() + [1] * length)[:length] for path in leaves]
    with torch.inference_mode():
        found = model(torch.tensor(batch), output_hidden_states=True)
        *inputs, final = found.hidden_states
        if model.config.model_type == "mamba2":  # its states are the layers' outputs
            inputs = [model.get_input_embeddings()(torch.tensor(batch)), *inputs[:-1]]
    states = torch.stack([*inputs, final], 2)  # [leaves, length, num_layers + 1, hidden]
    of_node = {node: (i, LENGTH + at) for i, path in enumerate(leaves) for at, node in enumerate(path)}
    leaf, place = (list(each) for each in zip(*(of_node[node] for node in range(len(tree))), strict=True))
    return Outputs(
        torch.cat((found.logits[0, :LENGTH], found.logits[leaf, place])),
        torch.cat((states[0, :LENGTH], states[leaf, place])),
    )


COMPILED = pytest.param(True, marks=[needs_compiler, pytest.mark.slow], id="compiled")


@pytest.mark.parametrize("compiled", [pytest.param(False, id="eager"), COMPILED])
@pytest.mark.parametrize("name", quick(CASES, {*TYPICAL} - {*SLOW} | {"granite", "olmo2"}))
def test_logits_and_states_are_those_of_transformers(name: str, compiled: bool, tmp_path: Path) -> None:
    """fp32, in prefill, in decoding, and at every node of a tree."""
    folder = make_model(tmp_path / "model", CASES[name], 3, **(fitting(CASES[name]) if compiled else {}))
    (tokens,) = random_prompts((LENGTH + 1,), vocab=VOCAB)
    tree = a_tree(tokens[LENGTH], 24, 5)
    found, expected = ours(folder, tokens, tree, compiled), theirs(folder, tokens, tree)
    assert_close(found.logits, expected.logits, max_error=2e-3, rms_error=1e-4)
    for layer in range(found.states.shape[1]):
        assert_close(found.states[:, layer], expected.states[:, layer], max_error=2e-3, rms_error=1e-4)


def test_layers_that_read_the_keys_of_others_keep_none(tmp_path: Path) -> None:
    """Two of four, of which a global one is as wide as three planes, and a local one as wide as two."""
    folder = make_model(tmp_path, TYPICAL["gemma4"], 3)
    shape = ModelConfig.from_hf(folder).shape
    assert (shape.num_kv_heads, shape.head_dim, shape.kv_layers) == (2, 8, 2 + 3)
    assert shape.planes([0, 1, 2, 3]) == [0, 2, 0, 2]
    assert open_llm(folder, exact=False).engine.cache.pools[0].shape[0] == 5


def test_the_selftest_computes_one_of_many_equal_layers(tmp_path: Path) -> None:
    """In a model without attention too, which needs no cache for them."""
    for name, planes in (("llama", 1), ("mamba2", 0)):
        model = open_llm(make_model(tmp_path / name, TYPICAL[name], 3), exact=False).engine.runner.target
        subset, num_planes = model.layer_subset(90)
        assert num_planes == planes and (name == "llama" or len(subset.layers) == 1)


def test_every_family_has_a_case() -> None:
    assert {case.model_type for case in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    "name, part",
    [("nemotron_h", "experts that read a projection"), ("falcon_h1", "recurrent states beside attention in a layer")],
)
def test_models_without_triton_kernels_are_refused(name: str, part: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, TYPICAL[name], 3)
    reason = f"there is no Triton kernel for its {part}"
    for backend in ("native", "auto"):
        with pytest.raises(VariantError, match=reason):
            open_llm(folder, attention="triton", backend=backend)
    with pytest.raises(ConfigError, match=reason):
        settings_of(str(folder), [], None)


def test_triton_attention_alone_takes_no_layers_of_unequal_sizes(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"attention='triton' needs linear='triton', not 'torch'"):
        open_llm(make_model(tmp_path, TYPICAL["gemma4"], 3), attention="triton", linear="torch", compile=False)


# --- trees against plain decoding


@functools.cache
def model_of(name: str, dtype: torch.dtype, compiled: bool) -> tuple[Path, Path]:
    """A model, and a noisy copy of it."""
    root = new_folder("family")
    folder = make_model(root / "target", CASES[name], 3, dtype, **(fitting(CASES[name]) if compiled else {}))
    return folder, make_draft(root / "ssm", folder, 1, 0.05)


@functools.cache
def family(name: str, dtype: torch.dtype, compiled: bool = False) -> LLM:
    """A proven engine with the model's copy and with an oracle."""
    folder, draft = model_of(name, dtype, compiled)
    return open_llm(
        folder, [draft, OracleDrafter([], 6, vocab=VOCAB)], max_num_seqs=3, compile=compiled, prove=compiled
    )


ODD = ("mistral, a window of one position", "qwen3, biases, windows by layer", "gpt_neox, one after the other")
EXACT = [(name, dtype, False) for name in TYPICAL for dtype in FLOATS]
EXACT += [pytest.param(name, torch.bfloat16, True, marks=needs_compiler) for name in (*TYPICAL, *ODD)]


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype, compiled", EXACT)
def test_trees_have_the_bits_of_plain_decoding(name: str, dtype: torch.dtype, compiled: bool) -> None:
    """Tokens and logits of a batch, over the borders of windows and of tiles; sampled ones too."""
    llm = family(name, dtype, compiled)
    prompts = random_prompts((WINDOW - 2, 62, 63 + WINDOW), vocab=VOCAB)
    plain = run(llm, prompts, greedy(18), "off")
    replace_drafters(llm, OracleDrafter(plain.sequences, 6, vocab=VOCAB))
    for spec in SPECS[:: 2 if name in HYBRIDS else 1] if compiled else SPECS[:1]:
        assert assert_exact(llm, plain, spec).acceptance_length > (2 if spec is TREE else 1.1)
    sampled = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=10, ignore_eos=True)
    plain, tree = run(llm, prompts, sampled, "off"), run(llm, prompts, sampled, TREE)
    assert not differences(plain, tree)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    "name, options",
    [
        ("gemma3", {"quantization": "int8"}),
        ("gpt_neox", {"quantization": "int8"}),
        ("qwen2_moe", {"quantization": "int8", "draft_quantization": "int8"}),
        ("gpt_oss", {"quantization": "int8", "activations": "int8"}),
        ("gemma4", {"quantization": "int8", "draft_quantization": "int8"}),
        ("falcon_h1", {"quantization": "int8", "draft_quantization": "int8"}),
    ],
)
def test_compiled_passes_with_quantised_weights(name: str, options: dict[str, Any]) -> None:
    folder, draft = model_of(name, torch.bfloat16, True)
    llm = open_llm(folder, [draft], compile=True, prove=True, **options)
    prompts = random_prompts((9, 62), vocab=VOCAB)
    assert_exact(llm, run(llm, prompts, greedy(12), "off"), SPECS[1])
