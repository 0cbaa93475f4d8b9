"""compile=True: the pass in C++ has the promises of the eager one, under the same self-test."""

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.test_exactness import SPECS, plain_run
from tests.helpers.exactness import assert_exact, differences, run, threads
from tests.helpers.families import Case, make_model
from tests.helpers.logits import error, our_logits, their_logits
from tests.helpers.models import (
    VOCAB,
    OracleDrafter,
    exact_in_compiled,
    greedy,
    make_llama,
    new_folder,
    open_llm,
    quick,
    random_prompts,
    tiny,
    tiny_llm,
    wide,
)
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec import SpecConfig
from treespec.cache.kv_cache import KVCache
from treespec.engine.host_executor import verify_request
from treespec.engine.runner import Choices
from treespec.errors import ExactnessError
from treespec.request import Request
from treespec.sampling.sampler import Sampler
from treespec.sampling.transforms import Transforms
from treespec.sampling_params import SamplingParams
from treespec.tree import TokenTree
from treespec_kernels.comparison import assert_close
from treespec_kernels.cpu.decoder_cpu import CompiledModel
from treespec_kernels.tuning.testing import tree_parents

pytestmark = needs_compiler


@exact_in_compiled
def test_company_chunks_and_places_change_nothing(dtype: torch.dtype) -> None:
    plain = plain_run(dtype, (2, 31, 62, 65), compiled=True)
    for chunk, seqs in ((1, 1), (7, 3)):
        llm = tiny_llm(dtype, (0, 2), max_num_batched_tokens=chunk, max_num_seqs=seqs, compile=True)
        for spec in ("off", SPECS["16"]):
            assert_exact(llm, plain, spec)


@exact_in_compiled
def test_deep_accepts(dtype: torch.dtype) -> None:
    plain = plain_run(dtype, (1, 9, 31, 62, 64, 126), 20, compiled=True)
    spec = SpecConfig(nodes=200, max_depth=12)  # beyond the reach of the eager packed attention
    oracle = OracleDrafter(plain.sequences, 9, wrong=8, bushy=True)
    llm = open_llm(tiny(dtype)[0], [oracle], spec=spec, compile=True)
    assert assert_exact(llm, plain, spec).acceptance_length == 10


@exact_in_compiled
def test_thread_counts_change_nothing(dtype: torch.dtype) -> None:
    """Not even between engines: threads share out rows, heads and columns, never a sum."""
    (target, draft), runs = wide(dtype), []
    for count in (1, 2):
        with threads(count):
            llm = open_llm(target, [draft], max_model_len=320, compile=True)
            prompts = random_prompts((270, 129, 5))
            runs += [run(llm, prompts, greedy(5), spec) for spec in ("off", SPECS["40"])]
    assert not any(differences(runs[0], other) for other in runs[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [48, 509, 1024])
def test_the_best_token_is_the_first_of_the_largest(dtype: torch.dtype, vocab: int) -> None:
    """As torch has it: equal ones, infinite ones, and a NaN wherever it stands."""
    target = make_llama(new_folder("vocabulary") / "target", 0, dtype, vocab_size=vocab)
    decoder = open_llm(target, compile=True).engine.runner.target
    logits = torch.randint(-3, 4, (200, vocab), generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[torch.arange(100), torch.arange(100) % vocab] = 9.0
    logits[50], logits[60, 7:], logits[61, vocab - 1] = -torch.inf, -torch.inf, torch.inf
    logits[70, 0], logits[71, vocab - 1], logits[72, vocab // 2] = math.nan, math.nan, -math.nan
    values, tokens = decoder.best(logits)
    expected = logits.float().max(-1)
    assert torch.equal(values.isnan(), expected.values.isnan()) and values.isnan().sum() == 3
    whole = ~values.isnan()
    assert torch.equal(values[whole], expected.values[whole]) and torch.equal(tokens[whole], expected.indices[whole])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_walk_equals_its_reference(dtype: torch.dtype) -> None:
    """Paths, tokens and K/V of random trees; some requests are sampled, in C++ or not; some logits are not finite."""
    llm, choose, generator = tiny_llm(dtype, (), compile=True), random.Random(0), torch.Generator().manual_seed(0)
    runner, cache, lengths, decided = llm.engine.runner, llm.engine.cache, set[int](), list[bool]()
    original = cache.pools[0].clone()
    before = torch.randn(original.shape, generator=generator).to(dtype)
    for case in range(60):
        requests, trees, rows = list[Request](), list[TokenTree](), list[Tensor]()
        for _ in range(choose.randint(1, 4)):
            count, tokens = choose.choice([1, 2, 20, 40]), [1] * choose.randint(1, 80)
            request = Request(tokens, SamplingParams(), SpecConfig.off(), max_tokens=100)
            request.context_len, request.pages = len(tokens) - 1, cache.reserve(request.request_id, len(tokens) + count)
            if choose.random() < 0.4:
                params, library = SamplingParams(temperature=0.15), choose.choice([None, runner.target.growth])
                transforms = Transforms(params, len(tokens), (), (), VOCAB, runner.target.device)
                request.sampler = Sampler(params, transforms, (), VOCAB, runner.target.device, case, library=library)
            parents = tree_parents(choose.choice(["chain", "star", "random"]), count, generator)
            siblings = [[*parents[:i]].count(parent) for i, parent in enumerate(parents)]  # before each node
            tree = TokenTree.from_parents(siblings, parents, 1.0, "lookup")
            logits = torch.rand(count, VOCAB, generator=generator)
            logits[torch.arange(count), torch.randint(3, (count,), generator=generator)] = 2.0
            if choose.random() < 0.2:
                column = choose.randrange(VOCAB) if request.sampler is None else 0
                logits[choose.randrange(count), column] = choose.choice([math.nan, math.inf])
            requests.append(request), trees.append(tree), rows.append(logits.to(dtype))
        results = []
        for walk in (runner.walk, runner.walk_ref):
            cache.pools[0].copy_(before)
            paths, next_tokens = walk(requests, trees, torch.cat(rows))
            ends, outputs = [*itertools.accumulate(map(len, rows))], list[tuple[list[int], int]]()
            for i, (request, tree, path, token) in enumerate(zip(requests, trees, paths, next_tokens, strict=True)):
                if not len(path):
                    outputs.append(([], -1))
                    continue
                choices = Choices(path, None if token < 0 else token, torch.cat(rows), ends[i] - len(tree), ends[i])
                path, token = verify_request(request, tree, choices)
                outputs.append((path.tolist(), token))
                if choices.next_token is None:
                    cache.commit_target([request.pages], [request.context_len], [path])
                if walk == runner.walk and request.sampler is not None and request.sampler.native_choice is not None:
                    decided.append(choices.next_token is not None)
            results.append((outputs, cache.pools[0].clone()))
        (of_call, kv), (of_steps, expected) = results
        assert of_call == of_steps and torch.equal(kv, expected), case
        lengths |= {len(path) for path, _ in of_call}
        for request in requests:
            cache.release(request.request_id)
    cache.pools[0].copy_(original)
    assert {0, 1, 2, 3, 4} <= lengths and len(decided) > 10 and all(decided)


THREE = {"num_attention_heads": 3, "num_key_value_heads": 3}
BIASED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
CLOSE = {
    "llama": Case("llama", THREE),
    "llama, biases": Case("llama", THREE | BIASED),
    "qwen2": Case("qwen2", {"use_sliding_window": False}),
    "mistral": Case("mistral", {"sliding_window": 17, "num_key_value_heads": 1}),
    "phi3, a part of each head": Case("phi3", {"rope_parameters": PARTIAL}),
    "gemma2, heads of 80": Case("gemma2", {"head_dim": 80, "sliding_window": 17, "attn_logit_softcapping": 3.0}),
}


@pytest.mark.parametrize("name", quick(CLOSE, list(CLOSE)[:-1]))  # another library takes seconds to compile
def test_close_to_the_eager_pass(name: str, tmp_path: Path) -> None:
    """In float32; odd vocabularies, biases, groups of one, two, three and four heads."""
    hidden = 48 if name.startswith("llama") else 64
    folder = make_model(tmp_path / "model", CLOSE[name], 3, hidden_size=hidden, intermediate_size=80)
    (tokens,) = random_prompts((72,), vocab=509)
    logits = [our_logits(open_llm(folder, compile=compiled), tokens) for compiled in (False, True)]
    assert_close(*logits, max_error=1e-4, rms_error=1e-5)


@exact_in_compiled
def test_the_cache_holds_what_passes_read(dtype: torch.dtype) -> None:
    """Compiled passes read K and V in the model's dtype, eager ones in float32; drafts as the target."""
    for compiled in (False, True):
        llm = tiny_llm(dtype, compile=compiled)
        frozen, held = llm.stats()["frozen"], dtype if compiled else torch.float32
        assert frozen["compile"] is compiled
        assert (frozen["attention"] == "compiled") is (frozen["linear"] == "compiled") is compiled
        assert len(llm.engine.cache.pools) == 4 and {pool.dtype for pool in llm.engine.cache.pools} == {held}
        shapes = [model.config.shape for model in (llm.engine.runner.target, *llm.engine.sources.ssms.models)]
        pages = llm.engine.cache.num_pages + 1
        assert llm.stats()["memory"]["kv_cache"] == pages * KVCache.bytes_per_page(shapes, held)


def test_as_far_from_float32_as_transformers_is(tmp_path: Path) -> None:
    """In bfloat16: K, V and the weights of attention are rounded as there."""
    folder = make_llama(tmp_path / "model", 40, torch.bfloat16, num_hidden_layers=4)
    (tokens,) = random_prompts((160,))
    exact = their_logits(folder, tokens)

    ours = our_logits(open_llm(folder, compile=True), tokens)
    assert ours.dtype == torch.bfloat16
    assert error(ours, exact) < error(their_logits(folder, tokens, torch.bfloat16), exact)


@pytest.mark.parametrize("name", ["forward", "logits"])
def test_the_self_test_refuses_what_is_not_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(CompiledModel, name)

    def faulty(self: CompiledModel, x: Tensor, *rest: Any, **options: Any) -> Tensor:
        y = original(self, x, *rest, **options)
        return y * (1 + 2**-22) if len(x) % 3 == 1 else y

    monkeypatch.setattr(CompiledModel, name, faulty)
    with pytest.raises(ExactnessError, match=r"plain decoding.*compiled"):
        open_llm(tiny()[0], prove=True, compile=True)
