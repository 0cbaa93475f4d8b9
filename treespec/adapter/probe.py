"""The parity check of a model that runs through the adapter, against transformers' own forward.

A prompt of random tokens is prefilled in chunks and a token tree is verified behind it, beside a second request with
another text. The logits of every row are compared with those of transformers' eager attention over the row's whole
path, in two steps:

1. Structure: both sides compute in float32 (float64 where float32 is not enough), on the model's own weights. Rounding
   is then small whatever the model does with it, and the bound is tight: a wrong mask, position, scale or head shows.
2. Precision: the decoder as it will run, in the model's dtype. A bfloat16 model may amplify rounding so much that
   transformers' own attentions differ by 0.3 of the logits' RMS, so the bound is a multiple of the distance that
   transformers itself has from the result of step 1.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from treespec.adapter.route import configs_of, implementation
from treespec.adapter.source import Source
from treespec.adapter.trace import AdapterConfig
from treespec.adapter.upcast import UpcastMode
from treespec.cache import KVCache, pages_for
from treespec.errors import ModelError, describe_error
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows

if TYPE_CHECKING:
    from treespec.adapter.decoder import AdapterDecoder

logger = logging.getLogger("treespec")

PROMPT = PAGE_SIZE + 6  # into a second page
CHUNKS = (0, 1, 8, 48, PROMPT)  # where prefill is cut
PARENTS = np.array([-1, 0, 0, 1, 1, 2, 3, 3, 5, 6, 7, 9, 10])  # 13 nodes, 6 deep
STRUCTURE_BOUND = 1e-4
"""Largest distance of a row in step 1. Measured for models that are run right: up to 4e-5 in float32 and 4e-6 in
float64. The faults of the tests start at 3e-3."""
_NO_ROUNDING = 0.1  # a distance that float32 does not come to, not even with TF32: float64 need not be asked
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""By dtype, a distance that is always accepted in step 2, and the only bound where step 1 cannot run."""
NOISE_FACTOR = 3.0
"""How much further than transformers' own logits those of the decoder may be from step 1's, in the RMS over all rows.
Measured for models that are run right: 0.7 to 1.4."""


class Probe:
    """Texts for a model, what it computes for them by itself, and the comparison with what a decoder computes.

    Args:
        source, config: of the model.
        model: in eval mode; its linear layers may be packed once step 1 has run.

    Raises:
        ModelError: the model cannot run by itself, or it computes NaN.
    """

    def __init__(self, source: Source, config: AdapterConfig, model: nn.Module):
        self._source, self._config = source, config
        self._dtype, device = next(model.parameters()).dtype, next(model.parameters()).device
        vocab = config.shape.vocab_size
        known = next((each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)), vocab)
        length, nodes = max(min(PROMPT, source.max_positions - 8), 1), len(PARENTS)
        rng = np.random.default_rng(0)
        # Prompt and tree of two requests with different texts, so that a row that sees the other's keys shows.
        self._texts = [rng.integers(min(vocab, known), size=length + nodes) for _ in range(2)]
        self.length, self.longest = length, length + nodes
        self._exact: Tensor | None = None  # [longest, vocab], from step 1
        try:
            self._own = self._reference_logits(model, None, device)
        except Exception as error:  # model code from outside may raise anything
            raise ModelError(f"{source.name} does not run: {describe_error(error)}") from error
        if not bool(torch.isfinite(self._own).all()):
            raise ModelError(f"{source.name} computes NaN or infinity for random tokens")

    def compare_structure(self, model: nn.Module, make: Callable[[UpcastMode], "AdapterDecoder"]) -> None:
        """Step 1.

        Args:
            model: as it was given to the constructor.
            make: its decoder, computing in a wider dtype over a float32 cache.

        Raises:
            ModelError: the logits differ, or the model's code does not run by rows.
        """
        worst, device = float("inf"), next(model.parameters()).device
        for dtype in (torch.float32, torch.float64):
            mode = UpcastMode(dtype)
            try:
                expected = self._reference_logits(model, mode, device)
                found = self._adapter_logits(make(mode), torch.float32)
            except ModelError:
                raise
            except Exception as error:  # kernels of one dtype only; model code from outside may raise anything
                if dtype == torch.float64:
                    break
                logger.info(
                    "%s does not compute in float32 (%s: %s): compared in %s alone",
                    self._source.name,
                    type(error).__name__,
                    error,
                    self._dtype,
                )
                return
            worst = float(_distance(found, expected).max())
            if worst <= STRUCTURE_BOUND:
                self._exact = expected
                return
            if worst > _NO_ROUNDING:
                break
        raise self._error(worst, STRUCTURE_BOUND, "computed in float32")

    def compare(self, decoder: "AdapterDecoder", cache_dtype: torch.dtype) -> None:
        """Step 2. Raises ModelError where the logits are too far off, or the model's code does not run by rows."""
        try:
            found = self._adapter_logits(decoder, cache_dtype)
        except ModelError:
            raise
        except Exception as error:  # model code from outside may raise anything
            raise ModelError(f"{self._source.name} does not run by rows: {describe_error(error)}") from error
        bound = BOUNDS[self._dtype]
        if self._exact is None:
            distance = float(_distance(found, self._own).max())
        else:
            distance = _overall(found, self._exact)
            bound = max(bound, NOISE_FACTOR * _overall(self._own, self._exact))
        if not distance <= bound:
            raise self._error(distance, bound, f"in {self._dtype}")

    def _error(self, distance: float, bound: float, how: str) -> ModelError:
        return ModelError(
            f"{self._source.name}: run by rows, {how}, logits differ from transformers' own by {distance:.2g} of their "
            f"RMS (bound {bound:.2g}); the architecture keeps or mixes more than keys and values by position"
        )

    @torch.inference_mode()
    def _reference_logits(self, model: nn.Module, mode: UpcastMode | None, device: torch.device) -> Tensor:
        """[longest, vocab], after each token of the prompt and each node of the tree: one pass for every leaf."""
        _, visible = _topology()
        prompt, tree = np.split(self._texts[1], [self.length])
        after: dict[int, Tensor] = {}
        with implementation(configs_of(model), "eager"):
            for leaf in (node for node in range(len(PARENTS)) if node not in PARENTS):
                path = np.flatnonzero(visible[leaf])
                tokens = torch.from_numpy(np.concatenate((prompt, tree[path]))).to(device)
                with mode or nullcontext():
                    logits = model(input_ids=tokens[None], use_cache=False, return_dict=True).logits[0]
                logits = logits if logits.dtype == torch.float64 else logits.float()
                after |= dict(zip(path.tolist(), logits[self.length :], strict=True))
        return torch.cat((logits[: self.length], torch.stack([after[node] for node in range(len(PARENTS))])))

    @torch.inference_mode()
    def _adapter_logits(self, decoder: "AdapterDecoder", cache_dtype: torch.dtype) -> Tensor:
        """The same through a decoder, of the second of two requests that run side by side."""
        depths, visible = _topology()
        count = pages_for(self.longest)
        kv = KVCache.allocate(self._config.shape, 1 + 2 * count, cache_dtype, decoder.device)
        requests = [1 + np.arange(count), 1 + count + np.arange(count)]

        def run(rows: list[RequestRows], start: int, stop: int) -> Tensor:
            tokens = np.concatenate([text[start:stop] for text in self._texts])
            ids = torch.from_numpy(tokens).to(decoder.device)
            hidden = decoder.forward(ids, decoder.plan(rows, kv), kv)
            logits = decoder.logits(hidden[: len(tokens)])[stop - start :]
            return logits if logits.dtype == torch.float64 else logits.float()

        found = []
        for start, stop in pairwise(min(cut, self.length) for cut in CHUNKS):
            if start < stop:
                found.append(run([RequestRows.chain(start, stop - start, pages) for pages in requests], start, stop))
        nodes = np.arange(len(PARENTS))
        trees = [RequestRows(self.length, nodes, depths, visible, depths, pages) for pages in requests]
        found.append(run(trees, self.length, self.longest))
        return torch.cat(found)


def _topology() -> tuple[np.ndarray, np.ndarray]:
    """Depths of the tree's nodes, and which node sees which."""
    depths, visible = np.zeros(len(PARENTS), dtype=np.int64), np.eye(len(PARENTS), dtype=bool)
    for node in range(1, len(PARENTS)):
        depths[node] = depths[PARENTS[node]] + 1
        visible[node] |= visible[PARENTS[node]]
    return depths, visible


def _distance(found: Tensor, expected: Tensor) -> Tensor:
    """[num_rows], RMS of the difference over the RMS of the expected logits about their mean."""
    spread = (expected - expected.mean(1, keepdim=True)).square().mean(1).sqrt()
    return (found - expected).square().mean(1).sqrt() / spread.clamp(min=1e-12)


def _overall(found: Tensor, expected: Tensor) -> float:
    """RMS of the rows' distances."""
    return float(_distance(found, expected).square().mean().sqrt())
