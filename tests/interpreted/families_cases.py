"""Every family on the Triton kernels, in contexts longer than windows.

The engine runs those whose rounds differ: windows by layer, several ropes, learned positions; or the first two of
TREESPEC_FAMILIES.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.families import CASES, HYBRIDS, SLOW, TYPICAL, make_model, small
from tests.helpers.models import greedy, make_draft, new_folder, open_llm, random_prompts, tokens_of
from tests.interpreted.engines import TRITON, captured_rounds
from treespec import SpecConfig
from treespec.cache.kv_cache import KVCache
from treespec.models.attention import make_attention
from treespec.models.model_config import ModelConfig
from treespec.models.triton_decoder import TritonDecoder
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.comparison import assert_close
from treespec_kernels.recurrent.request_state import StateRows
from treespec_kernels.tuning.testing import path_to
from treespec_kernels.tuning.tuned import KernelConfigs
from treespec_weights import load_weights
from treespec_weights.families import FAMILIES

CPU, VOCAB, PREFIX = torch.device("cpu"), 61, 23  # a window of 21 positions ends inside the prompt
PARENTS = [-1, 0, 0, 1, 2, 4]
NAMED = os.environ.get("TREESPEC_FAMILIES", "").split(";")
RULES = {name: FAMILIES[case.model_type] for name, case in TYPICAL.items() if name not in SLOW or name == "olmo2"}
IN_SLOW_TESTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe", "gemma4", "gemma4, experts", *HYBRIDS)
CHOSEN = [name for name in RULES if name not in IN_SLOW_TESTS] if NAMED == [""] else NAMED
IN_ROUNDS = ["gemma3", "gpt2"] if NAMED == [""] else NAMED[:2]


WITHOUT_KERNEL = {"nemotron_h": {"moe_latent_size": None}}


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    root = new_folder("families")
    return {
        name: make_model(root / name, CASES[name], 3, **small(name), **WITHOUT_KERNEL.get(name, {})) for name in CHOSEN
    }


@pytest.mark.parametrize("name", CHOSEN)
def test_passes(name: str, folders: dict[str, Path]) -> None:
    """Logits and hidden states of a prompt against transformers; logits of a tree behind it against its path token by
    token, by their bits."""
    config = ModelConfig.from_hf(folders[name], 128)
    weights = load_weights(folders[name], config.shape, config.rules, torch.float32, CPU)
    attention = make_attention("triton", config.shape, torch.float32, CPU)
    decoder = TritonDecoder(config, weights, attention, KernelConfigs(), True, 160)
    pool, pages = KVCache.allocate(config.shape, 3, torch.float32, CPU), np.array([2, 1])
    ids = torch.randint(VOCAB, (PREFIX,), generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(7, 7 + len(PARENTS))

    shape = decoder.state_shape(len(PARENTS))
    (state,) = [None] if shape is None else shape.allocate(1)

    def own(commits: int = 0) -> StateRows | None:
        return None if state is None else StateRows(state, commits)

    def logits(tokens: torch.Tensor, rows: RequestRows) -> torch.Tensor:
        return decoder.logits(decoder.forward(tokens, decoder.plan([rows], pool), pool))

    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folders[name], attn_implementation="eager").eval()
        expected = model(ids[None], output_hidden_states=True)
        layout = decoder.plan([RequestRows.chain(0, PREFIX, pages, state=own(PREFIX))], pool)
        found = decoder.forward_with_states(ids, layout, pool, (1, 0))
        assert_close(decoder.logits(found.final), expected.logits[0], max_error=1e-4, rms_error=1e-4)
        inputs = expected.hidden_states
        if model.config.model_type == "mamba2":  # its states are the layers' outputs
            inputs = model.get_input_embeddings()(ids[None]), *inputs
        for i, layer in enumerate((1, 0)):
            states = inputs[layer][0]
            assert_close(found.streams[:, i], states, max_error=1e-4, rms_error=1e-4)
        tree = logits(tokens, RequestRows.tree(PREFIX, np.array(PARENTS), pages, state=own()))
        for depth, node in enumerate(path_to(PARENTS, 5)):
            alone = logits(tokens[node : node + 1], RequestRows.chain(PREFIX + depth, 1, pages, state=own()))
            assert torch.equal(alone[0], tree[node])


@pytest.mark.parametrize("name", IN_ROUNDS)
def test_rounds(name: str, folders: dict[str, Path]) -> None:
    """Tokens of captured rounds, trees of two stacked SSMs, against plain decoding of the CPU's decoder."""
    target = folders[name]
    drafts = [make_draft(target.with_name(f"{name}-ssm-{i}"), target, i, 0.05 * i) for i in (1, 2)]
    prompts, options = random_prompts([PREFIX], vocab=VOCAB), {"max_num_seqs": 1, "max_model_len": 128}
    spec = SpecConfig(nodes=5, max_depth=2, sources=("ssm",))
    llm = open_llm(target, drafts, spec=spec, **options, **TRITON)
    with captured_rounds():
        [trees] = llm.generate(prompts, greedy(3))
    plain = open_llm(target, attention="cpu-packed", **options).generate(prompts, greedy(3), spec="off")
    assert tokens_of([trees]) == tokens_of(plain)
    assert trees.metrics.acceptance_length > 1
    llm.engine.check_integrity()
