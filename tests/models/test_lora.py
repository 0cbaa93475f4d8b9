"""LoRA adapters: a request with one has the bits of the same request alone, and the logits of the merged model."""

import functools
import itertools
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.drafters.test_heads import SHAPE, make_head, target_of
from tests.helpers.exactness import Run, differences, recorded
from tests.helpers.families import HYBRIDS, TYPICAL, fitting, make_model
from tests.helpers.gguf_files import write_gguf
from tests.helpers.logits import error, our_logits
from tests.helpers.loras import CONFIG, lora_request, make_lora, merge
from tests.helpers.models import (
    VOCAB,
    exact_in_compiled,
    greedy,
    make_draft,
    new_folder,
    open_llm,
    quick,
    random_prompts,
    tiny,
    tokens_of,
)
from tests.helpers.quantized_checkpoints import needs_compiler
from tests.helpers.sharing import assert_as_alone, few_pages, random_requests, run_at_random_times
from treespec import LLM, LoRARequest, RequestOutput, SamplingParams, SpecConfig
from treespec.errors import CheckpointError, ConfigError, ExactnessError, KernelError
from treespec.models.adapter_slots import AdapterSlots, FusedUpdates, SlotLimits
from treespec.models.layer import TRITON
from treespec.models.low_rank import fused_updates
from treespec.models.model_config import ModelConfig
from treespec_kernels.comparison import assert_close
from treespec_kernels.linear.linear import Linear
from treespec_weights.lora import load_lora

pytestmark = needs_compiler
PASSES = ("eager", "compiled")
LENGTHS = (9, 64, 70, 31, 65)


@functools.cache
def loras_of(dtype: torch.dtype) -> tuple[LoRARequest, LoRARequest]:
    """An adapter of all matrices, and one of few, so that fused products have parts without updates."""
    folder, target = new_folder("loras"), tiny(dtype)[0]
    few = make_lora(folder / "few", target, 2, r".*(layers\.0\..*(v|o)|layers\.1\..*(up|down))_proj", r=40)
    return lora_request(make_lora(folder / "all", target, 1, dtype=dtype)), lora_request(few)


def run(llm: LLM, prompts: list[list[int]], loras: Sequence[Any], spec: Any = "off", **options: Any) -> Run:
    with recorded(llm) as (logits, unequal):
        outputs = llm.generate(prompts, greedy(12, **options), spec, lora_request=loras)
    llm.engine.check_integrity()
    return Run(prompts, tokens_of(outputs), logits, unequal, outputs)


QUICK = ("llama eager", "llama compiled", "phi3 compiled", "gpt2 compiled")


@pytest.mark.parametrize("name", quick([f"{name} {passes}" for passes in PASSES for name in TYPICAL], QUICK))
def test_logits_are_those_of_the_merged_model(name: str, tmp_path: Path) -> None:
    """In every family: fused and transposed tensors, permuted heads, products without a gate."""
    case, compiled = TYPICAL[name.rpartition(" ")[0]], name.endswith("compiled")
    target = make_model(tmp_path / "target", case, 3, **(fitting(case) if compiled else {}))
    lora = make_lora(tmp_path / "lora", target, 7)
    (tokens,) = random_prompts((72,), vocab=509)
    merged = open_llm(merge(tmp_path / "merged", target, lora), compile=compiled)
    llm = open_llm(target, compile=compiled, enable_lora=True)
    expected, plain = our_logits(merged, tokens), our_logits(llm, tokens)
    assert_close(our_logits(llm, tokens, lora_request(lora)), expected, max_error=1e-3, rms_error=1e-4)
    assert (plain - expected).square().mean().sqrt() > 0.05 * expected.square().mean().sqrt()


@pytest.mark.parametrize("compiled", quick((False, True), (True,)))
@exact_in_compiled
def test_adapters_of_a_batch_change_no_bits_of_one_another(dtype: torch.dtype, compiled: bool) -> None:
    """Nor of requests without one; in trees, too, whose drafts have none."""
    target, drafts = tiny(dtype)
    whole, few = loras_of(dtype)
    prompts, loras = random_prompts(LENGTHS), [whole, few, None, few, whole]
    llm = open_llm(target, drafts[:2], compile=compiled, enable_lora=True, max_num_batched_tokens=48)
    alone = [run(llm, [prompt], [lora]) for prompt, lora in zip(prompts, loras, strict=True)]
    base = run(open_llm(target, compile=compiled), [prompts[2]], None)
    assert not differences(base, alone[2])
    assert len({tuple(one.tokens[0]) for one in alone}) == len(prompts)
    for spec in ("off", SpecConfig(nodes=16), SpecConfig(branching=(3, 2, 1, 1))):
        together = run(llm, prompts, loras, spec)
        for place, one in enumerate(alone):
            assert together.tokens[place] == one.tokens[0], (spec, place)
        assert not [p for one in alone for p in one.logits if not torch.equal(one.logits[p], together.logits[p])]
        assert spec == "off" or together.acceptance_length > 1.1
    same = run(llm, [prompts[0]] * 3, [whole, None, few])  # of equal prompts, only tokens tell the adapters apart
    assert same.tokens[0] == alone[0].tokens[0] and len({tuple(tokens) for tokens in same.tokens}) == 3


@pytest.mark.parametrize("compiled", quick((False, True), (True,)))
@exact_in_compiled
@pytest.mark.parametrize("name", quick(("gemma4", "gemma4, experts", *HYBRIDS), ("qwen3_5_moe",)))
def test_adapters_of_other_layers(name: str, dtype: torch.dtype, compiled: bool) -> None:
    """Recurrent ones, and those of unequal sizes, whose values may be the keys, and which may have no keys."""
    root, sizes = new_folder("other"), fitting(TYPICAL[name]) if compiled else {}
    target, prompts = make_model(root / "target", TYPICAL[name], 3, dtype, **sizes), random_prompts(LENGTHS, vocab=509)
    whole = lora_request(make_lora(root / "whole", target, 7))
    few = lora_request(make_lora(root / "few", target, 8, r".*layers\.\d+\..*\.(v_proj|in_proj|in_proj_(z|ba|a))", r=9))
    drafts = [make_draft(root / "ssm", target, 1, 0.05)]
    llm = open_llm(target, drafts, compile=compiled, enable_lora=True, max_num_batched_tokens=48)
    loras = [whole, None, few, whole, few]
    alone = [run(llm, [prompt], [one]) for prompt, one in zip(prompts, loras, strict=True)]
    assert not differences(run(open_llm(target, compile=compiled), [prompts[1]], None), alone[1])
    first = [next(iter(run(llm, [prompts[0]], one).logits.values())) for one in (whole, None, few)]
    assert not any(torch.equal(*pair) for pair in itertools.combinations(first, 2))
    for spec in ("off", SpecConfig(nodes=16), SpecConfig(branching=(3, 2, 1, 1))):
        together = run(llm, prompts, loras, spec)
        assert together.tokens == [one.tokens[0] for one in alone]
        assert all(torch.equal(one.logits[p], together.logits[p]) for one in alone for p in one.logits)
        assert spec == "off" or together.acceptance_length > 1.1


@pytest.mark.parametrize("form", quick(("int8", "int4", "Q8_0", "F32"), ("int4", "F32")))
def test_updates_on_quantised_targets_and_gguf_files(form: str, tmp_path: Path) -> None:
    target, (draft, *_) = tiny(torch.bfloat16)
    options: dict[str, Any] = {"compile": True, "enable_lora": True, "dtype": "bfloat16"}
    if form.startswith("int"):
        llm = open_llm(target, [draft], quantization=form, **options)
    else:
        llm = open_llm(write_gguf(tmp_path / "model.gguf", target, form), [draft], **options)
    prompts, loras = random_prompts((70, 31)), [*loras_of(torch.bfloat16)]
    alone = [run(llm, [prompt], lora) for prompt, lora in zip(prompts, loras, strict=True)]
    together = run(llm, prompts, loras, SpecConfig(nodes=16))
    assert together.tokens == [one.tokens[0] for one in alone]
    assert all(torch.equal(one.logits[p], together.logits[p]) for one in alone for p in one.logits)
    exact = our_logits(open_llm(target, **options), prompts[0], loras[0])  # with heads in the order of llama.cpp, too
    bounds = {"int4": 0.5, "F32": 0.0}
    assert error(our_logits(llm, prompts[0], loras[0]), exact.float()) <= bounds.get(form, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("qwen3_5", "granite_hybrid"))
def test_updates_of_hybrid_gguf_files(name: str, tmp_path: Path) -> None:
    """Whose value heads may be in another order than PEFT's."""
    target = make_model(tmp_path / "target", TYPICAL[name], 3, **fitting(TYPICAL[name]))
    lora, (tokens,) = lora_request(make_lora(tmp_path / "lora", target, 7)), random_prompts((40,), vocab=509)
    file = write_gguf(tmp_path / "model.gguf", target)
    found, expected = (our_logits(open_llm(path, enable_lora=True), tokens, lora) for path in (file, target))
    assert_close(found, expected, max_error=1e-3, rms_error=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_draft_heads_read_the_states_of_the_adapted_target(compiled: bool) -> None:
    target = target_of()
    llm = open_llm(target, [make_head("eagle")], compile=compiled, enable_lora=True)
    lora = lora_request(make_lora(new_folder("lora"), target, 1))
    prompts, loras = random_prompts((70, 31, 9), vocab=SHAPE.vocab_size), [lora, None, lora]
    alone = [run(llm, [prompt], [one]) for prompt, one in zip(prompts, loras, strict=True)]
    together = run(llm, prompts, loras, SpecConfig(nodes=16))
    assert together.tokens == [one.tokens[0] for one in alone]
    assert all(torch.equal(one.logits[p], together.logits[p]) for one in alone for p in one.logits)


def test_adapters_share_no_prefix_and_samples_share_theirs() -> None:
    target, (draft, *_) = tiny()
    options: dict[str, Any] = {"enable_lora": True, "enable_prefix_caching": True}
    llm, (whole, few) = open_llm(target, [draft], **options), loras_of(torch.float32)
    (prompt,) = random_prompts((150,))
    expected = [run(open_llm(target, enable_lora=True), [prompt], lora).tokens for lora in (whole, few, None)]
    for cached in (0, 128):
        for lora, tokens in zip((whole, few, None), expected, strict=True):
            again = run(llm, [prompt], lora, None)
            assert again.tokens == tokens and again.outputs[0].metrics.cached_tokens == cached
    params = SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=8, ignore_eos=True)
    sampled, plain = (llm.generate(prompt, params, spec, lora_request=few) for spec in (None, "off"))
    assert tokens_of(sampled) == tokens_of(plain)
    assert tokens_of(sampled) != tokens_of(llm.generate(prompt, params, lora_request=whole))


@pytest.mark.parametrize("compiled", quick((False, True), (True,)))
def test_random_interleavings_of_adapters_that_share_prompts(compiled: bool) -> None:
    """In few pages, with prefix caching, preemption, samples, aborts, and fewer adapters at once than there are.

    How far prompts are computed in a step depends on measured times, and so does what few pages keep: with all pages,
    the prompts of the last run are those that the run before has cached.
    """
    target, drafts = tiny()
    hybrid = make_model(new_folder("hybrid"), TYPICAL["lfm2"], 3, **(fitting(TYPICAL["lfm2"]) | {"vocab_size": VOCAB}))
    options: dict[str, Any] = {"compile": compiled, "enable_lora": True, "max_num_seqs": 4}
    llm = open_llm(target, [drafts[0], hybrid], enable_prefix_caching=True, max_loras=2, **options)
    loras = [*loras_of(torch.float32), None, lora_request(make_lora(new_folder("third"), target, 4, r".*o_proj"))]
    asked = [(*request, loras[i % 4]) for i, request in enumerate(random_requests(0, 8, (200, 150), 40, (8, 24)))]

    def run() -> list[dict[int, RequestOutput]]:
        with few_pages(llm, 14):
            crowded = run_at_random_times(llm, asked, 0, aborts=0.02)
        return [crowded, *(run_at_random_times(llm, asked, seed, aborts=0.02) for seed in (1, 2))]

    assert_as_alone(open_llm(target, **options), llm, asked, run)
    assert llm.stats()["cached_tokens"] >= 128


def test_a_slot_keeps_nothing_of_the_adapter_before() -> None:
    """Infinity times 0 is NaN, so zeros in B would not hide rows of A that a wider adapter has left."""
    config = ModelConfig.from_hf(tiny(torch.float32)[0])
    slots = AdapterSlots(config, SlotLimits(1, 40), torch.float32, torch.device("cpu"))
    outputs, inputs = config.shape.parameters()["layers.0.q"]
    for rank, value in ((40, math.inf), (2, 1.0)):
        update = torch.full((rank, inputs), value), torch.ones(outputs, rank)
        slots.of([FusedUpdates(fused_updates(config, {"layers.0.q": update}, TRITON))])
    down, up = slots.layers[0]["qkv"]
    assert down.isfinite().all() and down[0].count_nonzero() == 2 * inputs and up[0].count_nonzero() == 2 * outputs


def test_a_batch_has_max_loras_adapters_and_idle_ones_are_forgotten() -> None:
    target, loras = tiny()[0], [*loras_of(torch.float32), None]
    llm = open_llm(target, enable_lora=True, max_loras=1)
    prompts, seen = random_prompts((9, 9, 9, 9)), set[int]()
    llm.add_round_observer(lambda _: seen.add(len({r.lora for r in llm.engine.scheduler.running} - {None})))
    asked = [loras[i] for i in (0, 1, 2, 0)]
    outputs = llm.generate(prompts, greedy(6), lora_request=asked)
    alone = [llm.generate([p], greedy(6), lora_request=lora) for p, lora in zip(prompts, asked, strict=True)]
    assert tokens_of(outputs) == [tokens for one in alone for tokens in tokens_of(one)]
    assert seen <= {0, 1} and llm.loras is not None
    held = llm.loras.get(loras[0])  # type: ignore[arg-type]
    assert llm.stats()["memory"]["loras"] == held.updates.nbytes > 0  # that of the other was dropped
    assert llm.loras.get(loras[0]) is held  # type: ignore[arg-type]
    llm.loras.forget(loras[0])  # type: ignore[arg-type]
    assert llm.stats()["memory"]["loras"] == 0


def test_each_name_keeps_what_its_folder_held_when_it_was_loaded(tmp_path: Path) -> None:
    """Names of equal files share memory; one that is loaded again, or forgotten, changes no other."""
    folder, other = (make_lora(tmp_path / name, tiny()[0], seed) for seed, name in enumerate("ab"))
    llm = open_llm(tiny()[0], enable_lora=True, max_loras=2)
    assert llm.loras is not None
    first, second = (LoRARequest(name, 1, str(folder)) for name in ("first", "second"))
    held = llm.loras.get(first)
    assert llm.loras.get(second) is held and llm.stats()["memory"]["loras"] == held.updates.nbytes
    assert llm.loras.get(second, fresh=True) is held, "the files have not changed"
    (folder / "adapter_model.safetensors").write_bytes((other / "adapter_model.safetensors").read_bytes())
    changed = llm.loras.get(first, fresh=True)
    assert llm.loras.get(second) is held and changed.digest != held.digest
    llm.loras.forget(first)
    assert llm.loras.get(second) is held


def test_modules_may_have_the_names_of_another_class(tmp_path: Path) -> None:
    """PEFT names modules as they are in memory: the text model's, or one for text and images."""
    target = tiny()[0]
    config, lora = ModelConfig.from_hf(target), make_lora(tmp_path / "lora", target, 1)
    matrices = load_lora(lora, config.shape, config.rules, torch.float32).matrices
    for base in ("model.language_model.", "language_model.model.", "backbone."):
        renamed = shutil.copytree(lora, tmp_path / base) / "adapter_model.safetensors"
        tensors = {name.replace("model.layers", base + "layers"): tensor for name, tensor in load_file(renamed).items()}
        save_file(tensors, renamed)
        again = load_lora(renamed.parent, config.shape, config.rules, torch.float32).matrices
        assert all(all(map(torch.equal, matrices[name], pair)) for name, pair in again.items())
        assert again.keys() == matrices.keys()


def test_ranks_and_scales_of_single_modules(tmp_path: Path) -> None:
    target = tiny()[0]
    names = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
    patterns: dict[str, Any] = {"rank_pattern": {"q_proj": 9}, "alpha_pattern": {r"layers.1.mlp.down_proj": 3.0}}
    both = f"({'|'.join(names)})"
    lora = make_lora(tmp_path / "lora", target, 3, both, {names[0]: 9}, use_rslora=True, **patterns)
    (tokens,) = random_prompts((20,))
    llm = open_llm(target, enable_lora=True, max_lora_rank=9)
    merged = our_logits(open_llm(merge(tmp_path / "merged", target, lora)), tokens)
    assert_close(our_logits(llm, tokens, lora_request(lora)), merged, max_error=1e-3, rms_error=1e-4)
    with pytest.raises(ConfigError, match="an adapter of rank 9, above max_lora_rank=8; raise it"):
        open_llm(target, enable_lora=True, max_lora_rank=8).generate([1], lora_request=lora_request(lora))


_Q = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "peft_type": ({"peft_type": "LOHA"}, "'peft_type': 'LOHA'; supported: 'LORA'"),
    "use_dora": ({"use_dora": True}, "'use_dora': True is not supported: DoRA .*; merge the adapter"),
    "bias": ({"bias": "lora_only"}, "'bias': 'lora_only' is not supported: biases .*; merge the adapter"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, r"'modules_to_save': \['lm_head'\] is not supported: whole"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "'init_lora_weights': 'pissa_niter_4': .* save it converted"),
    "r": ({"r": 4}, r"'model.layers.\d.*' ?: has rank 5, but adapter_config.json says 4"),
    "lora_alpha": ({"lora_alpha": None}, "'lora_alpha': None for 'lora_alpha'; expected a positive number"),
    "pattern": ({"alpha_pattern": {"(": 1}}, r"'alpha_pattern': '\(' is no regular expression"),
    "patterns": ({"rank_pattern": [1]}, r"'rank_pattern': \[1\]; expected an object"),
}
TENSORS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "embedding": (
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 512)},
        "lora_embedding_A': not supported: an update of the embedding",
    ),
    "head": ({f"base_model.model.lm_head.lora_{s}.weight": torch.ones(2, 2) for s in "AB"}, "updates of lm_head are"),
    "saved": ({"base_model.model.lm_head.weight": torch.ones(2, 2)}, "lm_head.weight': .*a part of the model itself"),
    "magnitude": ({f"{_Q}.lora_magnitude_vector": torch.ones(2)}, "lora_magnitude_vector': not supported: DoRA"),
    "half": ({f"{_Q}.lora_A.weight": torch.ones(2, 64)}, "'model.layers.0.self_attn.q_proj': lora_B is missing"),
    "layer": (
        {_Q.replace("0", "7") + ".lora_A.weight": torch.ones(2, 64)},
        "does not fit the model: 'num_hidden_layers' is 2",
    ),
    "shape": (
        {f"{_Q}.lora_A.weight": torch.ones(5, 32), f"{_Q}.lora_B.weight": torch.ones(64, 4)},
        r"(?s)lora_A.weight': has shape \[5, 32\], expected \['rank', 64\].*has shape \[64, 4\], expected \[64, 5\]",
    ),
    "integers": (
        {f"{_Q}.lora_{s}.weight": torch.ones(64 if s == "B" else 5, 5 if s == "B" else 64).int() for s in "AB"},
        "has dtype I32, expected",
    ),
    "no rank": (
        {f"{_Q}.lora_A.weight": torch.ones(0, 64), f"{_Q}.lora_B.weight": torch.ones(64, 0)},
        r"lora_A.weight': has shape \[0, 64\], expected \['rank', 64\]",
    ),
    "nothing": ({}, "adapter_model.safetensors': holds no tensor"),
}


@functools.cache
def enabled() -> LLM:
    return open_llm(tiny()[0], enable_lora=True)


def refuse(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        enabled().generate([1, 2], greedy(1), lora_request=lora_request(folder))


@pytest.mark.parametrize("name", CONFIGS)
def test_unsupported_configs_are_refused(name: str, tmp_path: Path) -> None:
    config, message = CONFIGS[name]
    lora = make_lora(tmp_path, tiny()[0], 1)
    (lora / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    refuse(lora, message)


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_no_updates_are_refused(name: str, tmp_path: Path) -> None:
    tensors, message = TENSORS[name]
    refuse(make_lora(tmp_path, tiny()[0], 1, "none", more=tensors), message)


def test_updates_of_experts_are_refused(tmp_path: Path) -> None:
    target = make_model(tmp_path / "target", TYPICAL["qwen2_moe"], 3)
    llm = open_llm(target, enable_lora=True)
    for i, module in enumerate(("mlp.experts.2.up_proj", "mlp.shared_expert_gate", "mlp.gate")):
        lora = make_lora(tmp_path / str(i), target, 1, rf".*layers\.2\.{module}")
        with pytest.raises(CheckpointError, match=f"updates of model.layers.2.{module} are not supported"):
            llm.generate([1, 2], greedy(1), lora_request=lora_request(lora))
    stacked = {
        f"base_model.model.model.layers.2.mlp.experts.base_layer.lora_{s}.weight": torch.ones(2, 2) for s in "AB"
    }
    lora = make_lora(tmp_path / "stacked", target, 1, "none", more=stacked)
    with pytest.raises(CheckpointError, match=r"updates of model.layers.2.mlp.experts.base_layer are not supported"):
        llm.generate([1, 2], greedy(1), lora_request=lora_request(lora))


def test_missing_files_are_named(tmp_path: Path) -> None:
    refuse(tmp_path, "'adapter_config.json': no such file")
    lora = make_lora(tmp_path, tiny()[0], 1)
    (lora / "adapter_model.safetensors").rename(lora / "adapter_model.bin")
    refuse(lora, r"'adapter_model.safetensors': .*only 'adapter_model.bin': pickles are not loaded")
    with pytest.raises(FileNotFoundError, match="no such checkpoint folder: '/nowhere'"):
        enabled().generate([1], lora_request=LoRARequest("a", 1, "/nowhere"))


REQUESTS: dict[str, tuple[Callable[[], Any], str]] = {
    "id": (lambda: LoRARequest("a", 0, "b"), "lora_int_id=0; valid: an int of at least 1"),
    "path": (lambda: LoRARequest("a", 1, ""), "lora_path=''; valid: a text"),
    "keyword": (lambda: LoRARequest("a", 1, "b", rank=3), "LoRARequest: unknown 'rank'"),  # type: ignore[call-arg]
    "type": (lambda: enabled().generate([1], lora_request="a"), "lora_request='a' for 1 prompts; valid: a LoRARequest"),
    "count": (lambda: enabled().generate([1], lora_request=[None, None]), r"lora_request=\[None, None\] for 1 prompts"),
    "off": (
        lambda: open_llm(tiny()[0]).generate([1], lora_request=LoRARequest("a", 1, "b")),
        r"lora_request=.* requires LLM\(enable_lora=True\)",
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_wrong_requests_are_refused(name: str) -> None:
    make, message = REQUESTS[name]
    with pytest.raises(ConfigError, match=message):
        make()


def test_passes_without_low_rank_products_refuse_adapters() -> None:
    with pytest.raises(KernelError, match="enable_lora=True is for native families in passes on a CPU"):
        open_llm(tiny()[0], enable_lora=True, backend="transformers")


class _VaryingLinear(Linear):
    """A linear layer whose bits depend on the number of rows."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) * (1 + (len(x) == 7) * 2**-20)


def test_products_that_are_not_row_invariant_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treespec.models.low_rank.Linear", _VaryingLinear)
    with pytest.raises(
        ExactnessError, match=r"a low-rank product of .* is not row-invariant .*: 7 rows have other bits"
    ):
        open_llm(tiny()[0], compile=False, enable_lora=True).generate([1], lora_request=loras_of(torch.float32)[0])
