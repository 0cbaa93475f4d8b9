"""Programmatic launches, and the engine, on a simulated GPU."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from tests.helpers.calls import calls_of
from tests.helpers.drafting import make_target
from tests.helpers.families import TYPICAL, WINDOW, make_model, small
from tests.helpers.heads_made import TargetShape, write_eagle1, write_eagle3
from tests.helpers.models import (
    greedy,
    make_draft,
    make_llama,
    new_folder,
    open_llm,
    quick_start,
    random_prompts,
    tokens_of,
)
from tests.interpreted.engines import LONG, ON_GPU, PROMPTS, TREES, captured_at_start, leave, rounds_wait_for_nothing
from tests.simulated_gpu import Gpu
from treespec import LLM, RoundRecord, SpecConfig
from treespec.cache.kv_cache import KVCache
from treespec.engine.host_executor import HostExecutor
from treespec.errors import ConfigError, KernelError
from treespec.graphs.verify_stage import VerifyStage
from treespec.models import triton_decoder
from treespec.models.attention import make_attention
from treespec.models.model_config import ModelConfig
from treespec.models.triton_decoder import TritonDecoder
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.launch.predecessors import wait_for_predecessors
from treespec_kernels.launch.switches import without
from treespec_kernels.launch.triton_launch import LaunchConfig, known_issue, launch_options
from treespec_kernels.linear.quantized import WeightForm
from treespec_kernels.ops import cases_of, pass_chain
from treespec_kernels.ops.shapes import KernelShape, Setting
from treespec_kernels.sampling.row_topk import row_topk_triton
from treespec_kernels.tuning.tuned import KernelConfigs, TunedEntry
from treespec_weights import load_weights


@triton.jit
def reads_and_waits(x, EARLY: tl.constexpr, PDL: tl.constexpr):
    if EARLY:
        wait_for_predecessors(PDL)
    if tl.program_id(0) != 1:
        tl.store(x, tl.load(x) + 1)
        wait_for_predecessors(PDL)


@triton.jit
def leaves_without(x, EARLY: tl.constexpr, PDL: tl.constexpr):
    if EARLY or tl.program_id(0) == 0:
        wait_for_predecessors(PDL)


@pytest.mark.parametrize(
    ("kernel", "refused"),
    [(reads_and_waits, "create_masked_load before the wait"), (leaves_without, "a program has not waited")],
)
def test_a_program_that_does_not_wait_is_noticed(gpu: Gpu, kernel: Any, refused: str) -> None:
    x = torch.zeros(1, device="cuda")
    for early, programmatic in ((False, False), (True, True)):
        kernel[(3,)](x, early, **launch_options(programmatic))
    with pytest.raises(RuntimeError, match=refused):
        kernel[(3,)](x, False, **launch_options(True))


@pytest.mark.parametrize("form", [None, WeightForm(4, 32)])
@mock.patch.multiple(pass_chain, REPLAYS=2, LAYERS=2, takes_pdl=lambda device: True)
def test_the_check_of_programmatic_launches(gpu: Gpu, form: WeightForm | None) -> None:
    """Captured and replayed: every launch of the chain has the option, every program waits, and bits stay the same."""
    shape = KernelShape(torch.float16, 16, 4, 2, 32, 64, 100, quantized=form)
    setting = Setting(shape, torch.device("cuda"), nodes=2, context=3, groups=2)
    for case in cases_of("programmatic_launch", setting):
        assert case.candidates() == [LaunchConfig(), LaunchConfig(pdl=True)]
        for config in case.candidates():
            gpu.launches.signatures.clear()
            case.check(config)
            found = gpu.launches.signatures.values()
            assert {launch.options.get("launch_pdl", False) for launch in found} == {config.pdl}
    assert gpu.replays == 8
    right = pass_chain.rms_norm_triton

    def planted(*given: Any, pdl: bool, out: torch.Tensor, **named: Any) -> torch.Tensor:
        right(*given, pdl=pdl, out=out, **named)
        return out.add_(pdl)

    with mock.patch.object(pass_chain, "rms_norm_triton", planted):
        case.check(LaunchConfig())
        with pytest.raises(AssertionError, match="differs from the chain without PDL"):
            case.check(LaunchConfig(pdl=True))


@pytest.mark.parametrize("measured", [None, False])
def test_a_decoder_launches_as_was_measured(gpu: Gpu, measured: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree's pass and its logits, with the bits of kernels in order; the vendor's kernels stay in order."""
    monkeypatch.setattr(triton_decoder, "takes_pdl", lambda device: True)
    config = ModelConfig.from_hf(make_llama(new_folder("launched") / "target", 0, torch.float16, **LONG))
    key = {"dtype": "float16", "groups": 1, "hidden_size": config.shape.hidden_size}
    entry = TunedEntry("programmatic_launch", key, {"pdl": measured}, 1.0, 1.0, {}, {}, "2026-01-01")
    configs = KernelConfigs([] if measured is None else [entry])
    device = torch.device("cuda")

    def decoder(exact: bool) -> TritonDecoder:
        weights = load_weights(config.folder, config.shape, config.rules, torch.float16, device)
        attention = make_attention("triton", config.shape, torch.float16, device, configs)
        return TritonDecoder(config, weights, attention, configs, exact, 64)

    assert not decoder(exact=False).kernels.pdl
    opened = decoder(exact=True)
    assert opened.kernels.pdl is (measured is not False)  # without a measurement, where the device has it
    pool = KVCache.allocate(config.shape, 2, torch.float16, device)
    layout = opened.plan([RequestRows.chain(0, 3, np.array([1]))], pool)
    tokens, results = torch.tensor([3, 1, 4], device=device), []
    for off, constant in (("", 2), ("prefetch", 1), ("pdl", 0)):
        constant *= opened.kernels.pdl
        gpu.launches.signatures.clear()
        with without(off):
            results.append(opened.logits(opened.forward(tokens, layout, pool)).cpu())
        found = gpu.launches.signatures.values()
        assert {launch.arguments["PDL"] for launch in found} == {constant}
        assert {launch.options.get("launch_pdl", False) for launch in found} == {constant > 0}
        assert {launch.kernel for launch in found} >= {
            *("norm_rows", "multiply_rows", "attend_items", "project_to_vocab")
        }
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    leave(gpu)


# --- the engine


def test_rounds_of_heads(gpu: Gpu) -> None:
    """With EAGLE heads in all levels, an SSM and a table. After a prompt of one token no head can draft."""
    shape = TargetShape(32, 48, 2, num_attention_heads=2, num_key_value_heads=1, vocab_size=64)
    target, head, other = make_target(shape, torch.float16), new_folder("head"), new_folder("head")
    options: dict[str, Any] = {"draft_vocab": 48, "own_embedding": False, "boundaries": (0, 1)}
    write_eagle3(head, shape, layout="specforge", seed=1, **options)
    write_eagle1(other, shape, bias=True, own_embedding=False, seed=2)
    drafts = [make_draft(new_folder("ssm"), target, 1, 0.04), head, other, "table"]
    llm = open_llm(target, drafts, spec=TREES, max_num_seqs=2, suffix_tokens=64, **ON_GPU)
    assert llm.stats()["frozen"]["rounds"] == "on the device"
    spec = SpecConfig(nodes=8, max_depth=2, sources=("ssm", "table"))
    prompts, params = random_prompts([1, 9], vocab=64), [greedy(4), greedy(4, temperature=0.9, seed=3)]
    records: list[RoundRecord] = []
    with rounds_wait_for_nothing(gpu):
        plain = tokens_of(llm.generate(prompts, params, spec="off"))
        with llm.add_round_observer(records.append):
            trees = llm.generate(prompts, params, spec=spec)
    assert tokens_of(trees) == plain
    assert any(output.metrics.acceptance_length > 1.2 for output in trees)
    names = {name for each in records for node in range(1, len(each.tree)) for name in each.tree.sources_of(node)}
    assert names == set(llm.draft_names) - {"lookup", "suffix"}
    llm.engine.check_integrity()
    leave(gpu)


@pytest.mark.parametrize(
    ("target", "draft", "layers", "length"), [("gemma2", "gemma3", 2, WINDOW + 2), ("gpt_neox", "gpt2", 1, 3)]
)
def test_rounds_of_other_families(gpu: Gpu, target: str, draft: str, layers: int, length: int) -> None:
    """Together they have every switch of the kernels."""
    root = new_folder("families")
    folders = []
    for name in (target, draft):
        heads = {"n_head": 2} if name == "gpt2" else {"num_attention_heads": 2, "num_key_value_heads": 1}
        folders.append(make_model(root / name, TYPICAL[name], 3, torch.float16, **small(name, layers), **heads))
    prompts, spec = random_prompts([length], vocab=61), SpecConfig(nodes=4, max_depth=1)
    llm = open_llm(folders[0], folders[1:], spec=spec, max_num_seqs=1, **ON_GPU)
    with rounds_wait_for_nothing(gpu):
        plain = tokens_of(llm.generate(prompts, greedy(3), spec="off"))
        [trees] = llm.generate(prompts, greedy(3), spec=spec)
    assert tokens_of([trees]) == plain and trees.metrics.nodes_verified > trees.metrics.target_passes
    llm.engine.check_integrity()
    leave(gpu)


def test_a_gpu_that_is_not_the_threads_own(gpu: Gpu) -> None:
    target = make_llama(new_folder("other") / "target", 0, torch.float16, **LONG)
    gpu.current = 1
    with pytest.raises(ValueError, match="launched on cuda:1, its tensors lie on cuda:0"):
        row_topk_triton(torch.ones(2, 8, device="cuda:0"), 1)
    llm = open_llm(target, [], device="cuda:0", dtype="float16", spec="off", max_num_seqs=1, prove=None)
    assert llm.config.max_num_batched_tokens == 2048
    assert len(tokens_of(llm.generate(PROMPTS[:1], greedy(3)))[0]) == 3
    assert gpu.current == 1 and str(llm.config.device) == "cuda:0"
    with pytest.raises(ConfigError, match="device='cuda:2', but the last of the 2 that torch sees here is cuda:1"):
        open_llm(target, [], device="cuda:2")


def test_a_kernel_that_does_not_fit(gpu: Gpu) -> None:
    target = make_llama(new_folder("large") / "target", 0, torch.float16, **LONG)
    refused = mock.Mock(side_effect=OutOfResources(122880, 101376, "shared memory"))
    message = r"does not run on cuda:0: out of resource: shared memory, Required: 122880.*treespec autotune"
    with quick_start(refused), pytest.raises(KernelError, match=message):
        LLM(target, [], device="cuda", dtype="float16")


@pytest.mark.parametrize(
    ("capability", "version", "doubted"),
    [((10, 0), "3.7.1", True), ((10, 3), "3.6.0", True), ((10, 0), "3.10.0", False), ((9, 0), "3.6.0", False)],
)
def test_doubts(gpu: Gpu, capability: tuple[int, int], version: str, doubted: bool) -> None:
    gpu.properties.major, gpu.properties.minor = capability
    doubts = known_issue(torch.device("cuda"), version)
    assert (doubts is not None) == doubted and (doubts is None or f"Triton {version} may" in doubts)


def test_captured_rounds_that_give_other_tokens(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    """It goes step by step, says why, and nothing that the rounds left in the cache remains."""
    target = make_llama(new_folder("failing") / "target", 0, torch.float16, **LONG)

    def differing(host: HostExecutor, *rest: object) -> list[str]:
        host.runner.cache.pools[0].fill_(torch.nan)
        return ["trees of 16 nodes"]

    with captured_at_start(proven=True), mock.patch("treespec.startup.selftest.differing_rounds", differing):
        llm = open_llm(target, [], spec=TREES, max_num_seqs=1, **ON_GPU)
    assert llm.engine.captured is None and not llm.engine.cache.pools[0].any()
    [warning] = [record.getMessage() for record in caplog.records if record.name == "treespec"]
    assert "captured rounds give other tokens than plain decoding here; going step by step" in warning
    assert "trees of 16 nodes" in warning
    assert llm.stats()["frozen"]["rounds"] == "step by step" and llm.stats()["memory"]["captured_rounds"] == 0


def test_rounds_that_cuda_does_not_capture(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    """It goes step by step, with nothing of the capture that failed in the way of what follows."""
    target = make_llama(new_folder("waiting") / "target", 0, torch.float16, **LONG)
    before = torch.cuda.current_stream()
    waiting = calls_of(VerifyStage, "run", lambda calls: calls[-1][0].target.pool.sum().item())
    with captured_at_start(proven=True), waiting:
        llm = open_llm(target, [], spec=TREES, max_num_seqs=1, **ON_GPU)
    assert llm.stats()["frozen"]["rounds"] == "step by step"
    [warning] = [record for record in caplog.records if (record.name, record.levelname) == ("treespec", "WARNING")]
    assert "captured rounds do not run here; going step by step" in warning.getMessage()
    assert warning.exc_info is not None and "host cannot wait" in str(warning.exc_info[1])
    assert torch.cuda.current_stream() is before
    torch.cuda.empty_cache()
    plain, trees = (tokens_of(llm.generate(PROMPTS[:1], greedy(3), spec=spec)) for spec in ("off", TREES))
    assert trees == plain and len(plain[0]) == 3
