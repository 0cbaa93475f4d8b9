"""Tiny random models on disk, engines over them, and an oracle drafter: what the engine's tests share.

Every parameter is random, norms and biases too, and attention is sharp enough that greedy continuations wander instead
of repeating one token. Drafts are the target's weights with noise, so that deep paths are accepted.
"""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import treespec_weights
from treespec import LLM, RequestOutput, SamplingParams
from treespec.drafters.base import Drafter
from treespec.drafters.custom_source import CustomSource
from treespec.mixture_weights import MixtureWeights
from treespec.models.decoder import Decoder
from treespec.planning.planner import Planner
from treespec.planning.round_costs import CostCurve
from treespec.request import Request
from treespec.startup import selftest
from treespec.tree import TokenTree
from treespec_weights import convert_checkpoint, default_folder
from treespec_weights.draft_vocabulary import write_draft_vocabulary

EOS = 0
VOCAB = 512
NOISES = (0.04, 0.07, 0.1)  # of the three drafts, relative to each tensor's own spread
CURVE = CostCurve((1, 16, 64), (1e-3, 1.15e-3, 1.6e-3), 1e-5)
"""Costs under which an automatic tree is worth growing; measuring takes a second per engine and says other things."""

SHAPE = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024}
SHAPE |= {"bos_token_id": 1, "eos_token_id": EOS, "tie_word_embeddings": False}

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "attention_factor": 1.0, "original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 3.0 * i for i in range(8)]}
"""For heads of `SHAPE`: a request of up to 64 positions has other rotations than a longer one."""

_root = tempfile.TemporaryDirectory(prefix="treespec-tests-")


def new_folder(name: str) -> Path:
    """An empty folder that lives as long as the test process."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_root.name))


def embed_models_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the embedded models be those in a folder."""
    monkeypatch.setattr(treespec_weights, "models_folder", lambda group="default": folder / group)


@functools.cache
def embedded_draft(name: str) -> Path:
    """An embedded draft as a model of its own: in bfloat16, with the target's tokenizer."""
    folder = new_folder(name) / "model"
    convert_checkpoint(default_folder(name), folder, dtype=torch.bfloat16)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_folder("target") / file, folder)
    return folder


def make_llama(
    folder: Path,
    seed: int,
    dtype: torch.dtype = torch.float32,
    faint_after: int = 99,  # layers from this one on add little to the others
    max_shard_size: str = "1GB",
    **config: Any,
) -> Path:
    """A random Llama checkpoint; `config` overrides `SHAPE`."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(SHAPE | config)))
    randomize(model, gain=1.0, head_gain=5.0)
    with torch.no_grad():
        for layer in model.model.layers[faint_after:]:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


@torch.no_grad()
def randomize(model: torch.nn.Module, gain: float, head_gain: float) -> None:
    """Make every parameter random, with sharp attention; gains are those of matrices, the head's and the others'."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.normal_(0.0, 0.2)
            parameter.add_(0.0 if name.endswith("bias") else 1.0)
        else:
            own = head_gain if "lm_head" in name else 2.0 if "q_proj" in name or "k_proj" in name else gain
            parameter.normal_(0.0, 1.0 if "embed" in name else own * parameter.shape[-1] ** -0.5)


def make_draft(folder: Path, target: Path, seed: int, noise: float) -> Path:
    """The target with noise of `noise` times each tensor's spread."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in load_file(target / "model.safetensors").items():
        spread = noise * tensor.float().std(correction=0)
        tensors[name] = (tensor + spread * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(target / name, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def add_noise(model: Any, noise: float, seed: int = 1) -> Any:
    """A model in memory, to whose parameters noise of `noise` times their spread was added."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    return model


def change_rows(source: Path, folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """Copy a model with other rows of its embedding and its head."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    rows = {name: change(rows) for name, rows in tensors.items() if "embed_tokens" in name or "lm_head" in name}
    save_file(tensors | rows, folder / "model.safetensors", metadata={"format": "pt"})
    return edit_config(folder, vocab_size=len(next(iter(rows.values()))))


def reduce_vocabulary(folder: Path, draft: Path, target_ids: np.ndarray, size: int = VOCAB) -> Path:
    """Copy a draft with only the rows of `target_ids`; that of -1 is the mean of all."""
    change_rows(draft, folder, lambda rows: torch.cat((rows, rows.mean(0, keepdim=True)))[target_ids].contiguous())
    write_draft_vocabulary(folder, target_ids, size)
    return folder


def edit_config(folder: Path, drop: Iterable[str] = (), **changes: Any) -> Path:
    """Drop and set keys of a checkpoint's config.json; returns the folder."""
    path = folder / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps(config | changes))
    return folder


@functools.cache
def tiny(dtype: torch.dtype = torch.float32) -> tuple[Path, tuple[Path, ...]]:
    """A target and three drafts of it, named `ssm-1` to `ssm-3`; without a tokenizer."""
    root = new_folder(str(dtype).removeprefix("torch."))
    target = make_llama(root / "target", 0, dtype)
    return target, tuple(make_draft(root / f"ssm-{i}", target, i, noise) for i, noise in enumerate(NOISES, start=1))


DEFAULTS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "draft_quantization": None}


_proofs: dict[Any, list[str]] = {}


def differing_rows_once(decoder: Decoder, pool: torch.Tensor, *rest: Any) -> list[str]:
    how = decoder.dtype, decoder.attention.name, decoder.linear, decoder.min_rows, decoder.quantization
    key = (decoder.config.compute_key, min(pool.shape[2], 17), how, torch.get_num_threads(), rest)
    if key not in _proofs:
        _proofs[key] = selftest.differing_rows(decoder, pool, *rest)
    return _proofs[key]


@contextmanager
def quick_start(proof: Callable[..., list[str]] = differing_rows_once) -> Iterator[None]:
    """Engines that open while the block runs have `CURVE` for their costs, and this self-test."""
    with (
        mock.patch("treespec.startup.cost_measurement.load", lambda key: CURVE),
        mock.patch("treespec.startup.build.differing_rows", proof),
    ):
        yield


def open_llm(model: Path, drafts: Iterable[Any] = (), prove: bool | None = False, **options: Any) -> LLM:
    """An engine on the CPU, compiled where it can be, with drafts as they are stored and `CURVE` for its costs.

    `prove` runs the self-test, most of the start: True always, False once for each shape, None never, for Triton's
    interpreter, where it takes minutes.
    """
    with quick_start({True: selftest.differing_rows, False: differing_rows_once, None: lambda *_: []}[prove]):
        llm = LLM(model, drafts=list(drafts), **(DEFAULTS | options))
    at_fixed_costs(llm.engine.host.planner)  # what times of this machine would teach is luck
    return llm


@functools.cache
def tiny_llm(dtype: torch.dtype = torch.float32, ssms: tuple[int, ...] = (0, 1, 2), **options: Any) -> LLM:
    """An engine over `tiny` with some of its drafts, built once; tests that break an engine open their own."""
    target, drafts = tiny(dtype)
    return open_llm(target, [drafts[i] for i in ssms], **options)


@functools.cache
def wide(dtype: torch.dtype) -> tuple[Path, Path]:
    """A target of 16 heads over 8 KV heads and a draft of it, whose work is shared between threads."""
    root = new_folder("wide")
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 16, "num_key_value_heads": 8}
    target = make_llama(root / "target", 5, dtype, **sizes, num_hidden_layers=2)  # heads as `tiny`, for one library
    return target, make_draft(root / "ssm", target, 1, 0.05)


def quick(names: Iterable[Any], fast: Container[Any]) -> list[Any]:
    """Parameters of a test, of which those that are not in `fast` are slow tests."""
    marks = {True: [], False: [pytest.mark.slow]}
    return [pytest.param(name, marks=marks[name in fast], id=str(name).removeprefix("torch.")) for name in names]


FLOATS = (torch.float32, torch.bfloat16)
exact_in = pytest.mark.parametrize("dtype", quick(FLOATS, FLOATS[:1]))  # one dtype of exactness is quick
exact_in_compiled = pytest.mark.parametrize("dtype", quick(FLOATS, FLOATS[1:]))  # and that of checkpoints, compiled


def random_prompts(lengths: Sequence[int], seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Token ids without the end token."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, vocab, size=length).tolist() for length in lengths]


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Runs to the end: random models meet the end token by chance."""
    return SamplingParams(**({"max_tokens": max_tokens, "ignore_eos": True} | options))


def tokens_of(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    """What every completion of every output says."""
    return [completion.token_ids for output in outputs for completion in output.outputs]


def _learn_nothing(*args: object) -> None:
    """Stand for `RoundCosts.learn`; a function of the module, because a test pickles planners."""


def at_fixed_costs(planner: Planner) -> Planner:
    """A planner that learns nothing from measured times."""
    planner.costs.learn = _learn_nothing  # type: ignore[method-assign]
    return planner


def equal_weights() -> AbstractContextManager[object]:
    """While it lasts, the SSMs' weights stay equal, whatever they said before."""
    return mock.patch.object(MixtureWeights, "weights", lambda self, ssms: np.full(len(ssms), 1 / len(ssms)))


def tree_of(root: int, paths: dict[tuple[int, ...], float], name: str = "oracle") -> TokenTree:
    """The tree of these paths below the root token, each with the probability of its last token."""
    ordered = sorted(paths, key=len)
    index = {(): 0} | {path: i for i, path in enumerate(ordered, start=1)}
    parents, probs = [-1, *(index[path[:-1]] for path in ordered)], [1.0, *(paths[path] for path in ordered)]
    tree = TokenTree.from_parents([root, *(path[-1] for path in ordered)], parents, probs, name)
    return replace(tree, draw_probs=tree.probs[1:])


def assert_same_tree(ours: TokenTree, theirs: TokenTree, rtol: float = 0.0) -> None:
    """Asserts that two trees have the same nodes and draws; their probabilities may be `rtol` apart, relatively."""
    for name in ("tokens", "parents", "depths", "draw_nodes", "draw_sources"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    for name in ("probs", "draw_probs"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol, equal_nan=False)


def replace_drafters(llm: LLM, *drafters: Drafter) -> None:
    """Let custom drafters propose instead of all sources but SSMs, as if the engine had been built with them."""
    vocab_size = llm.engine.runner.target.vocab_size
    llm.engine.sources.others[:] = [CustomSource(drafter, vocab_size) for drafter in drafters]


@contextmanager
def drafting_by(llm: LLM, *drafters: Drafter, beside: bool = False) -> Iterator[None]:
    """`replace_drafters` while the block runs; with `beside`, the engine's own sources follow the custom drafters."""
    others = llm.engine.sources.others
    own = list(others)
    replace_drafters(llm, *drafters)
    others += own if beside else []
    try:
        yield
    finally:
        others[:] = own


class OracleDrafter:
    """Proposes the true continuation, `depth` deep, with wrong siblings before every true node."""

    def __init__(
        self,
        truths: Iterable[Sequence[int]],  # prompt and output; a request is recognised by its tokens so far
        depth: int,
        wrong: int = 2,  # siblings per level, with children of their own where `bushy`
        bushy: bool = False,
        name: str = "oracle",
        vocab: int = VOCAB,  # of the wrong tokens
        sure: float = 0.9,  # the probability that it gives the truth
    ):
        self.truths, self.depth, self.wrong = [list(truth) for truth in truths], depth, wrong
        self.bushy, self.name, self.vocab, self.sure = bushy, name, vocab, sure
        self.committed: dict[str, list[int]] = {}  # lengths of the paths it was told, by request
        self.released: list[str] = []

    def propose(self, requests: Sequence[Request], max_depths: Sequence[int]) -> list[TokenTree]:
        return [self.tree(request.tokens, depth) for request, depth in zip(requests, max_depths, strict=True)]

    def commit(self, requests: Sequence[Request], paths: Sequence[np.ndarray]) -> None:
        for request, path in zip(requests, paths, strict=True):
            self.committed.setdefault(request.request_id, []).append(len(path))

    def release(self, request: Request) -> None:
        self.released.append(request.request_id)

    def tree(self, tokens: list[int], max_depth: int) -> TokenTree:
        truth = next((t for t in self.truths if t[: len(tokens)] == tokens), tokens)
        coming = truth[len(tokens) : len(tokens) + min(self.depth, max_depth)]
        paths: dict[tuple[int, ...], float] = {}
        for level, token in enumerate(coming):
            above = tuple(coming[:level])
            for i in range(1, self.wrong + 1):
                other = (token + i * 37) % self.vocab
                paths[(*above, other)] = 0.01
                if self.bushy:
                    paths[(*above, other, (token + 1) % self.vocab)] = 0.5
            paths[(*above, token)] = self.sure
        return tree_of(tokens[-1], paths, self.name)


class Poisoner(OracleDrafter):
    """An oracle that proposes a bad token beside the true ones, at every depth."""

    def __init__(self, poison: int, *options: Any, **named: Any):
        super().__init__(*options, **named)
        self.poison = poison

    def tree(self, tokens: list[int], max_depth: int) -> TokenTree:
        tree = super().tree(tokens, max_depth)
        paths = {tuple(tree.tokens[tree.path_to(n)[1:]].tolist()): float(tree.probs[n]) for n in range(1, len(tree))}
        if len(tokens) % 3 == 0:  # in some rounds only, so that deep paths are committed behind poisoned ones
            above = max((path for path in paths if path[0] == tree.tokens[1:][0]), key=len, default=())
            for depth in range(min(len(above), 3) + 1):
                paths[(*above[:depth], self.poison)] = 0.3
                paths[(*above[:depth], self.poison, 7)] = 0.2
        return tree_of(tokens[-1], paths)
