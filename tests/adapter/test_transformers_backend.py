"""Any architecture through transformers' own code: parity with transformers, identity with plain decoding, refusals."""

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.stablelm import modeling_stablelm

from tests.helpers.architectures import VOCAB, continuations, logits_after, make_model, open_adapter_llm, saved
from tests.helpers.exactness import Run, assert_exact, differences, run
from tests.helpers.faults import decoder_with
from tests.helpers.models import OracleDrafter, greedy, make_llama, new_folder, quick_start, random_prompts
from tests.helpers.walk import tiny_config
from treespec import LLM, SamplingParams, SpecConfig, hf
from treespec.adapter.decoder import AdapterDecoder
from treespec.adapter.route import Window, configs_of, routed, window_below
from treespec.adapter.source import Source
from treespec.adapter.trace import reference_attention, trace
from treespec.adapter.trace import run as run_rows
from treespec.cache.kv_cache import KVCache
from treespec.errors import CheckpointError, ConfigError, ExactnessError, KernelError, ModelError
from treespec.models.attention import CpuAttention
from treespec.startup.selftest import differing_rows
from treespec_kernels.attention.tree_batch import RequestRows

pytestmark = pytest.mark.slow

EXACT = (
    "llama gpt_neox opt gpt2 gemma2 stablelm cohere2 olmo2 granite gpt_bigcode diffllama deepseek_v3 gpt_oss mixtral "
    "glm4_moe"
).split()
TREES = SpecConfig(nodes=16)
COUNT = 24


def assert_near(model: Any, found: Run, prefixes: Sequence[tuple[int, ...]], bound: float) -> None:
    """Asserts that logits are as near to transformers', relatively to their spread."""
    for prefix in prefixes:
        expected = logits_after(model, prefix)
        distance = (found.logits[prefix].float() - expected).square().mean().sqrt()
        assert distance < bound * expected.std(), f"after {len(prefix)}"


def foretold(model: Any, prompts: list[list[int]], count: int) -> tuple[list[list[int]], OracleDrafter]:
    """What transformers writes after the prompts, and a drafter that knows it."""
    wanted = continuations(model, prompts, count)
    truths = [prompt + more for prompt, more in zip(prompts, wanted, strict=True)]
    return wanted, OracleDrafter(truths, 5, vocab=VOCAB)


@pytest.mark.parametrize(("kind", "alone"), [*((kind, False) for kind in EXACT), ("gemma2", True), ("cohere2", True)])
def test_parity_and_identity(kind: str, alone: bool) -> None:
    """Greedy tokens are transformers', all logits of trees are within 1e-4 of it, and equal plain decoding's.

    Also of the attention for other masks, of every row `alone`, given windows and soft caps.
    """
    model, folder = saved(kind)
    prompts = random_prompts([5, 58, 1] + [129] * (kind == "cohere2"), vocab=VOCAB)  # four windows deep
    wanted, oracle = foretold(model, prompts, COUNT)
    with decoder_with(window_below=(lambda *_: None) if alone else window_below):
        llm = open_adapter_llm(folder, [oracle], backend="transformers", max_num_batched_tokens=37)
    frozen = llm.stats()["frozen"]
    assert frozen["backend"] == "transformers"
    assert frozen["exactness"].startswith("bit-identical")
    plain = run(llm, prompts, greedy(COUNT))
    assert plain.tokens == wanted
    tree = assert_exact(llm, plain, TREES)
    assert tree.acceptance_length > 3.5
    nodes = sorted(tree.logits, key=len)
    assert_near(model, tree, nodes[:12] + nodes[12::40], 1e-4)


@pytest.mark.parametrize("kind", ["cohere2", "mellum"])
def test_bfloat16(kind: str) -> None:
    model, folder = saved(kind, torch.bfloat16)
    oracle = OracleDrafter([], 5, vocab=VOCAB)
    llm = open_adapter_llm(folder, [oracle], dtype="bfloat16")
    plain = run(llm, random_prompts([9, 66], vocab=VOCAB), greedy(16))
    oracle.truths = plain.sequences
    tree = assert_exact(llm, plain, TREES)
    assert llm.config.dtype == torch.bfloat16 and tree.acceptance_length > 3
    assert_near(model, tree, list(tree.logits)[::20], 5e-2)


def test_sampled_tokens_do_not_depend_on_drafts() -> None:
    _, folder = saved("granite")
    draft = new_folder("granite-draft")
    make_model("granite", seed=1).save_pretrained(draft)
    llm = open_adapter_llm(folder, [draft, folder])
    params = SamplingParams(max_tokens=20, temperature=1.3, top_p=0.9, seed=5, ignore_eos=True)
    prompts = random_prompts([12, 33, 3, 8], vocab=VOCAB)
    plain, tree = run(llm, prompts, params), run(llm, prompts, params, SpecConfig())
    assert not differences(plain, tree)
    assert tree.acceptance_length > 1.3


def test_a_native_target_takes_an_adapted_draft() -> None:
    target = make_llama(new_folder("target"), 0, vocab_size=VOCAB)
    llm = open_adapter_llm(target, [saved("gpt_bigcode")[1]], backend="auto")
    frozen = llm.stats()["frozen"]
    assert (frozen["backend"], frozen["exactness"]) == ("native", "bit-identical")
    plain = run(llm, random_prompts([12, 33], vocab=VOCAB), greedy(24))
    tree = assert_exact(llm, plain, SpecConfig(nodes=8))
    assert sum(output.metrics.nodes_verified for output in tree.outputs) > 2 * 24


class LowRank(nn.Module):
    """A linear layer with a low-rank adapter (LoRA), as peft puts it in a model's place."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


def test_low_rank_adapters_of_a_model_in_memory() -> None:
    model, prompts = make_model("stablelm"), random_prompts([30, 4], vocab=VOCAB)
    without = continuations(model, prompts, 20)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.mlp.down_proj = LowRank(layer.self_attn.q_proj), LowRank(layer.mlp.down_proj)
    wanted, oracle = foretold(model, prompts, 20)
    assert wanted != without
    llm = open_adapter_llm(model, [oracle])
    assert run(llm, prompts, greedy(20)).tokens == wanted == run(llm, prompts, greedy(20), TREES).tokens


@pytest.mark.parametrize("kind", ["llama", "phimoe"])
def test_longrope_by_request(kind: str) -> None:
    """Requests of both lengths in a batch; phimoe's scale of rotations depends on the length too."""
    long = [2.0 + 3.0 * i for i in range(4)]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": long, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 64, "short_mscale": 1.1, "long_mscale": 1.5}
    model = make_model(kind, num_key_value_heads=2, head_dim=8, rope_parameters=rope)
    prompts = random_prompts([5, 65, 48, 90], vocab=VOCAB)
    wanted, oracle = foretold(model, prompts, 16)
    llm = open_adapter_llm(model, [oracle], max_model_len=None)
    frequencies = {name: buffer.clone() for name, buffer in model.named_buffers()}
    plain = run(llm, prompts, greedy(16))
    assert plain.tokens == wanted and llm.config.max_model_len == 256
    assert assert_exact(llm, plain, TREES).acceptance_length > 2
    assert all(torch.equal(buffer, frequencies[name]) for name, buffer in model.named_buffers())
    for prompt, tokens in zip(prompts, wanted, strict=True):
        assert run(llm, [prompt], greedy(16)).tokens == [tokens]


def test_a_model_that_reads_its_linear_weights_itself() -> None:
    class Reading(modeling_stablelm.StableLmMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = nn.functional.linear(x, self.gate_proj.weight)
            return self.down_proj(self.act_fn(gate) * self.up_proj(x))

    model = make_model("stablelm")
    for layer in model.model.layers:
        layer.mlp.__class__ = Reading
    prompts = random_prompts([9], vocab=VOCAB)
    llm = open_adapter_llm(model)
    assert llm.config.linear == "torch"
    assert llm.stats()["frozen"]["exactness"] == "bit-identical at 32 fixed rows"
    assert run(llm, prompts, greedy(12)).tokens == continuations(model, prompts, 12)


def test_a_tree_larger_than_the_fixed_rows() -> None:
    model = make_model("stablelm")
    with pytest.raises(ConfigError, match="a tree of 64 nodes, but this engine keeps 32 slots"):
        open_adapter_llm(model).generate([[1, 2, 3]], greedy(4), spec=SpecConfig(nodes=64))
    large = open_adapter_llm(model, spec=SpecConfig(nodes=64))
    assert large.stats()["frozen"]["fixed_rows"] == 64
    assert_exact(large, run(large, [[1, 2, 3]], greedy(12)), SpecConfig(nodes=64))


def test_fixed_rows_are_proven_with_passes_of_that_size() -> None:
    """A product that rounds differently in larger passes, which an engine with fixed rows never makes."""
    model = make_model("stablelm")
    model.model.layers[0].mlp.register_forward_hook(lambda _, args, out: out * (1 + (out.shape[1] > 32) * 2**-20))
    with quick_start(differing_rows):
        llm = LLM(model, device="cpu", max_model_len=256)
    assert llm.stats()["frozen"]["exactness"] == "bit-identical at 32 fixed rows"


def test_layers_of_several_shapes_are_all_proven() -> None:
    """As many of the first layers as have one of each kind."""
    config = Source.from_model(model := make_model("stablelm", num_hidden_layers=4))
    layers = model.model.layers
    layers[2].mlp.gate_proj, layers[2].mlp.up_proj = nn.Linear(32, 50, bias=False), nn.Linear(32, 50, bias=False)
    layers[2].mlp.down_proj = nn.Linear(50, 32, bias=False)
    decoder = AdapterDecoder(trace(config, model), model, CpuAttention(4), 100)
    pool = KVCache.allocate(decoder.config.shape, 3, torch.float32, "cpu")
    rows = [RequestRows.chain(0, 4, np.array([1]))]
    with torch.inference_mode():
        for num_layers, written in ((1, [True, True, True, False]), (None, [True] * 4)):
            pool.zero_()
            decoder.forward(torch.arange(4), decoder.plan(rows, pool), pool, num_layers)
            assert [bool(layer.any()) for layer in pool] == written
    assert len(model.model.layers) == 4


# --- refusals


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bloom", "does not use transformers' attention interface"),
        ("mamba", "recurrent state"),
        ("recurrent_gemma", "recurrent state"),
    ],
)
def test_architectures_that_cannot_run(kind: str, reason: str) -> None:
    _, folder = saved(kind)
    for backend in ("auto", "transformers"):
        with pytest.raises((ModelError, CheckpointError), match=reason) as caught:
            open_adapter_llm(folder, backend=backend)
        assert kind in str(caught.value)
    with pytest.raises(CheckpointError, match="is not supported"):
        open_adapter_llm(folder, backend="native")


def test_a_native_hybrid_in_memory_is_told_to_use_its_folder() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("mamba2")).eval()
    for use in (LLM, hf.accelerate):
        with pytest.raises(ModelError, match=r"recurrent state.*open its folder, which runs natively"):
            use(model)


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    config = {"model_type": "strange", "auto_map": {"AutoConfig": "strange.StrangeConfig"}}
    (tmp_path / "strange.py").write_text("raise SystemExit('remote code was run')")
    for said, reason in ((config, "auto_map"), ({"model_type": "t5", "vocab_size": VOCAB}, "encoder")):
        (tmp_path / "config.json").write_text(json.dumps(said))
        for backend in ("auto", "transformers"):
            with pytest.raises((ModelError, CheckpointError), match=reason):
                open_adapter_llm(tmp_path, backend=backend)


NORM, ONES = "model.layers.1.input_layernorm.weight", torch.ones(31)


def test_what_files_lack_or_have_too_much(tmp_path: Path) -> None:
    """transformers warns and fills up at random; an entry of the index that is not needed is ignored."""
    model, folder = saved("stablelm")
    tensors, shard = load_file(folder / "model.safetensors"), "model-00001-of-00001.safetensors"
    shutil.copy(folder / "config.json", tmp_path)
    index = tmp_path / "model.safetensors.index.json"

    def load(tensors: dict[str, torch.Tensor], **more: str) -> dict[str, torch.Tensor]:
        save_file(tensors, tmp_path / shard, metadata={"format": "pt"})
        places = dict.fromkeys(tensors, shard) | {"mtp.fc.weight": shard} | more
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
        return Source.from_folder(tmp_path).load(torch.float32, torch.device("cpu")).state_dict()

    loaded = load(tensors)
    assert all(torch.equal(loaded[name], weight) for name, weight in model.state_dict().items())
    without = {name: tensor for name, tensor in tensors.items() if name != NORM}
    with pytest.raises(CheckpointError, match=rf"{NORM}': missing; the index places it in '{shard}'.*download or conv"):
        load(without, **{NORM: shard})
    with pytest.raises(CheckpointError, match="outside"):
        load(tensors, **{NORM: "../outside.safetensors"})
    index.unlink()
    (tmp_path / shard).unlink()
    strange = {"model.layers.7.strange": torch.zeros(3)}
    for changed, named in ((without, NORM), (tensors | strange, "layers.7.strange"), (without | {NORM: ONES}, "31")):
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises((CheckpointError, ModelError), match=named):
            open_adapter_llm(tmp_path)


def test_what_cannot_be_had() -> None:
    model, folder = saved("stablelm")
    for given, options, error, words in (
        (folder, {"compile": True}, KernelError, "compile=True"),
        (folder, {"linear": "torch"}, KernelError, "linear='torch'"),
        (model, {"backend": "native"}, ConfigError, "a model in memory"),
        (model, {"dtype": "bfloat16"}, ModelError, "convert it first"),
        (saved("jetmoe")[1], {}, ExactnessError, "experts"),
    ):
        with pytest.raises(error, match=words):
            open_adapter_llm(given, **options)


def test_the_selftest_finds_experts_that_share_a_product() -> None:
    """In float32, where the bits of a product depend on its number of rows."""
    model, folder = saved("mixtral")
    kind = next(type(part) for part in model.modules() if hasattr(part, "is_transposed"))
    with (
        mock.patch("treespec.adapter.route.run_experts", kind.forward.__wrapped__),
        pytest.raises(ExactnessError, match="bit-identical"),
    ):
        open_adapter_llm(folder, backend="transformers")


def test_a_model_in_memory_keeps_its_own_experts() -> None:
    model = make_model("mixtral")
    tokens = torch.arange(9, dtype=torch.int64)[None]
    with torch.inference_mode():
        expected = model(tokens).logits
        with routed(configs_of(model), reference_attention), ThreadPoolExecutor(1) as other:
            assert torch.equal(other.submit(torch.inference_mode()(lambda: model(tokens).logits)).result(), expected)
    assert torch.equal(model(tokens).logits, expected)


def shorter(window: Window | None) -> Window:
    assert window is not None
    return Window(None if window.size is None else window.size - 1)


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("window_below", lambda *args: shorter(window_below(*args))),
        ("run", lambda base, tokens, at: run_rows(base, tokens, torch.arange(len(at)))),
    ],
    ids=["a window one shorter", "positions by row"],
)
def test_the_probe_notices_planted_faults(name: str, planted: Any) -> None:
    """Those of the decoder itself; tests/adapter/test_adapter_probe.py has those of attention."""
    open_adapter_llm(model := make_model("gemma2"), exact=False)
    with decoder_with(**{name: planted}), pytest.raises(ModelError, match="logits differ from transformers'"):
        open_adapter_llm(model, exact=False)
    model.model.layers[0].register_forward_pre_hook(lambda _, args: (args[0] + args[0].mean(1, keepdim=True),))
    with pytest.raises(ModelError, match="logits differ from transformers'"):  # what mixes rows
        open_adapter_llm(model)
