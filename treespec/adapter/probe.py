"""The gate for unknown architectures: a model through the adapter computes what it computes by itself.

A random text, behind it a token tree, and the same again as a second request: prefilled in chunks, decoded and passed
as a tree, and compared with transformers' own forward over each whole path.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from treespec.adapter.route import configs_of, implementation
from treespec.adapter.source import Source
from treespec.adapter.trace import AdapterConfig
from treespec.cache import KVCache, pages_for
from treespec.errors import ModelError
from treespec.models.decoder import Decoder
from treespec_kernels.tree_batch import PAGE_SIZE, RequestRows

PROMPT = PAGE_SIZE + 6  # into a second page
CHUNKS = (0, 1, 8, 48, PROMPT)  # where prefill is cut
PARENTS = np.array([-1, 0, 0, 1, 1, 2, 3, 3, 5, 6, 7, 9, 10])  # 13 nodes, 6 deep
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""RMS of the difference of two rows of logits, over the RMS of one of them without its mean: rounding alone stays
below a tenth of it, and a model that is run wrong differs by its whole."""


class Check:
    """What a model computes by itself, and the comparison with it.

    Args:
        source, config: of the model.
        expected: [PROMPT + num_nodes, vocab] float32, after each token of the prompt and each node of the tree.
        prompt, tree: int64, tokens.
    """

    def __init__(self, source: Source, config: AdapterConfig, expected: Tensor, prompt: np.ndarray, tree: np.ndarray):
        self._source, self._config, self._expected = source, config, expected
        self._prompt, self._tree = prompt, tree
        self.longest = len(prompt) + len(tree)

    @torch.inference_mode()
    def __call__(self, decoder: Decoder, cache_dtype: torch.dtype) -> None:
        """Compare. Raises ModelError where they differ, or where the model's code does not run."""
        try:
            found = self._logits(decoder, cache_dtype)
        except ModelError:
            raise
        except Exception as error:  # model code from outside may raise anything
            raise ModelError(f"{self._source.name} does not run by rows: {type(error).__name__}: {error}") from error
        worst = float(_distance(found, self._expected.to(found.device)).max())
        bound = BOUNDS[decoder.dtype]
        if not worst <= bound:
            raise ModelError(
                f"{self._source.name}: run by rows, logits differ from transformers' own by {worst:.2g} of their RMS "
                f"(bound {bound}); the architecture keeps or mixes more than keys and values by position"
            )

    def _logits(self, decoder: Decoder, cache_dtype: torch.dtype) -> Tensor:
        depths, visible = _topology()
        count = pages_for(self.longest)
        kv = KVCache.allocate(self._config.shape, 1 + 2 * count, cache_dtype, decoder.device)
        requests = [1 + np.arange(count), 1 + count + np.arange(count)]

        def run(rows: list[RequestRows], tokens: np.ndarray) -> Tensor:
            ids = torch.from_numpy(tokens).to(decoder.device)
            hidden = decoder.forward(ids, decoder.plan(rows, kv), kv)
            return decoder.logits(hidden[: len(tokens)]).float()

        found = []
        for start, stop in pairwise(CHUNKS):
            tokens = self._prompt[start:stop]
            chains = [RequestRows.chain(start, len(tokens), pages) for pages in requests]
            if len(tokens):
                found.append(run(chains, np.concatenate((tokens, tokens)))[len(tokens) :])  # of the second request
        nodes = np.arange(len(self._tree))
        trees = [RequestRows(len(self._prompt), nodes, depths, visible, depths, pages) for pages in requests]
        found.append(run(trees, np.concatenate((self._tree, self._tree)))[len(nodes) :])
        return torch.cat(found)


def _topology() -> tuple[np.ndarray, np.ndarray]:
    """Depths, and who sees whom."""
    depths, visible = np.zeros(len(PARENTS), dtype=np.int64), np.eye(len(PARENTS), dtype=bool)
    for node in range(1, len(PARENTS)):
        depths[node] = depths[PARENTS[node]] + 1
        visible[node] |= visible[PARENTS[node]]
    return depths, visible


def _distance(found: Tensor, expected: Tensor) -> Tensor:
    """[num_rows], RMS of the difference over the RMS of what was expected; a constant in all logits means nothing."""
    spread = (expected - expected.mean(1, keepdim=True)).square().mean(1).sqrt()
    return (found - expected).square().mean(1).sqrt() / spread.clamp(min=1e-12)


@contextmanager
def check_parity(source: Source, config: AdapterConfig, model: nn.Module) -> Iterator[Check]:
    """Let a model compute by itself, by its eager attention; the comparison may come when it was packed.

    Raises:
        ModelError: it cannot, or it computes NaN.
    """
    rng = np.random.default_rng(0)
    vocab, device = config.shape.vocab_size, next(model.parameters()).device
    known = next((each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)), vocab)
    prompt = rng.integers(min(vocab, known), size=max(min(PROMPT, source.max_positions - 8), 1))
    tree = rng.integers(min(vocab, known), size=len(PARENTS))
    _, visible = _topology()
    leaves = [node for node in range(len(PARENTS)) if node not in PARENTS]
    after: dict[int, Tensor] = {}
    try:
        with torch.inference_mode(), implementation(configs_of(model), "eager"):
            for leaf in leaves:
                path = np.flatnonzero(visible[leaf])
                tokens = torch.from_numpy(np.concatenate((prompt, tree[path]))).to(device)
                logits = model(input_ids=tokens[None], use_cache=False, return_dict=True).logits[0].float()
                after |= dict(zip(path.tolist(), logits[len(prompt) :], strict=True))
        expected = torch.cat((logits[: len(prompt)], torch.stack([after[node] for node in range(len(PARENTS))])))
    except Exception as error:  # model code from outside may raise anything
        raise ModelError(f"{source.name} does not run: {type(error).__name__}: {error}") from error
    if not bool(torch.isfinite(expected).all()):
        raise ModelError(f"{source.name} computes NaN or infinity for random tokens")
    yield Check(source, config, expected, prompt, tree)
