"""Parity check of a model run by the adapter against transformers' forward.

A random prompt is prefilled in chunks, followed by a token tree, in a batch with a second request. Each row's logits
are compared with transformers' eager attention over the row's whole path, in two steps:

1. Structure: both sides compute in float32 (float64 if necessary) on the model's weights. Rounding is then negligible,
   and a tight bound detects a wrong mask, position, scale or head.
2. Precision: the decoder computes in the model's dtype. bfloat16 models can amplify rounding until transformers' own
   attention backends differ by 0.3 of the logits' RMS, so the bound is a multiple of transformers' own distance from
   the result of step 1.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from treespec.adapter.route import configs_of, implementation
from treespec.adapter.source import Source
from treespec.adapter.trace import AdapterConfig
from treespec.adapter.upcast import UpcastMode
from treespec.cache.kv_cache import KVCache, pages_for
from treespec.errors import ModelError, describe_error
from treespec.models.decoder import Decoder
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows

logger = logging.getLogger("treespec")

PROMPT = PAGE_SIZE + 6  # tokens; spans two pages
CHUNKS = (0, 1, 8, 48, PROMPT)  # prefill chunk boundaries
PARENTS = np.array([-1, 0, 0, 1, 1, 2, 3, 3, 5, 6, 7, 9, 10])  # 13 nodes, 6 deep
STRUCTURE_BOUND = 1e-4
"""Maximum row distance in step 1. Measured for correct models: up to 4e-5 in float32 and 4e-6 in float64. The faults
injected by the tests start at 3e-3."""
_NO_ROUNDING = 0.1  # larger distances are not explained by float32 or TF32 rounding, so float64 is not tried
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""By dtype, a distance always accepted in step 2, and the only bound if step 1 cannot run."""
NOISE_FACTOR = 3.0
"""Maximum ratio of the decoder's to transformers' RMS distance from step 1. Measured for correct models: 0.7 to 1.4."""


class Probe:
    """Compares a decoder with transformers on two random texts."""

    def __init__(self, source: Source, config: AdapterConfig, model: nn.Module):
        self._source, self._config = source, config
        self._dtype, device = next(model.parameters()).dtype, next(model.parameters()).device
        vocab = config.shape.vocab_size
        num_embeddings = next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), vocab)
        # Stay within longrope's short factors, because transformers chooses the factors by the length of each path.
        length, nodes = max(min(PROMPT, (source.short_context or source.max_positions) - 8), 1), len(PARENTS)
        rng = np.random.default_rng(0)
        # Two requests with different texts, so that attending to the other's keys is detected.
        self._texts = [rng.integers(min(vocab, num_embeddings), size=length + nodes) for _ in range(2)]
        self.length, self.longest = length, length + nodes
        self._exact: Tensor | None = None  # [longest, vocab], from step 1
        try:
            self._expected = self._reference_logits(model, None, device)
        except Exception as error:  # model code may raise anything
            raise ModelError(f"{source.name} does not run: {describe_error(error)}") from error
        if not bool(torch.isfinite(self._expected).all()):
            raise ModelError(f"{source.name} computes NaN or infinity for random tokens")

    def compare_structure(self, model: nn.Module, make: Callable[[UpcastMode], Decoder]) -> None:
        """Run step 1 and keep its logits as the reference for step 2."""
        max_distance, device = float("inf"), next(model.parameters()).device
        for dtype in (torch.float32, torch.float64):
            mode = UpcastMode(dtype)
            try:
                expected = self._reference_logits(model, mode, device)
                logits = self._adapter_logits(make(mode), torch.float32)
            except ModelError:
                raise
            except Exception as error:  # kernels may support one dtype only; model code may raise anything
                if dtype == torch.float64:
                    break
                message, name = "%s does not compute in float32 (%s: %s): compared in %s alone", self._source.name
                logger.info(message, name, type(error).__name__, error, self._dtype)
                return
            max_distance = float(_distance(logits, expected).max())
            if max_distance <= STRUCTURE_BOUND:
                self._exact = expected
                return
            if max_distance > _NO_ROUNDING:
                break
        raise self._error(max_distance, STRUCTURE_BOUND, "computed in float32")

    def compare(self, decoder: Decoder, cache_dtype: torch.dtype) -> None:
        """Run step 2."""
        try:
            logits = self._adapter_logits(decoder, cache_dtype)
        except ModelError:
            raise
        except Exception as error:  # model code may raise anything
            raise ModelError(f"{self._source.name} fails on flattened rows: {describe_error(error)}") from error
        bound = BOUNDS[self._dtype]
        if self._exact is None:
            distance = float(_distance(logits, self._expected).max())
        else:
            distance = _overall(logits, self._exact)
            bound = max(bound, NOISE_FACTOR * _overall(self._expected, self._exact))
        if not distance <= bound:
            raise self._error(distance, bound, f"in {self._dtype}")

    def _error(self, distance: float, bound: float, how: str) -> ModelError:
        return ModelError(
            f"{self._source.name}: on flattened rows, {how}, logits differ from transformers' by {distance:.2g} "
            f"of their RMS (bound {bound:.2g}); the architecture has state or mixing beyond keys and values by position"
        )

    @torch.inference_mode()
    def _reference_logits(self, model: nn.Module, mode: UpcastMode | None, device: torch.device) -> Tensor:
        """Compute transformers' logits [longest, vocab] after each prompt token and tree node, one pass per leaf."""
        visible = RequestRows.tree(self.length, PARENTS, np.arange(0)).visible
        assert visible is not None
        prompt, tree = np.split(self._texts[1], [self.length])
        logits_after: dict[int, Tensor] = {}
        with implementation(configs_of(model), "eager"):
            for leaf in (node for node in range(len(PARENTS)) if node not in PARENTS):
                path = np.flatnonzero(visible[leaf])
                tokens = torch.from_numpy(np.concatenate((prompt, tree[path]))).to(device)
                with mode or nullcontext():
                    logits = model(input_ids=tokens[None], use_cache=False, return_dict=True).logits[0]
                logits = logits if logits.dtype == torch.float64 else logits.float()
                logits_after |= dict(zip(path.tolist(), logits[self.length :], strict=True))
        return torch.cat((logits[: self.length], torch.stack([logits_after[node] for node in range(len(PARENTS))])))

    @torch.inference_mode()
    def _adapter_logits(self, decoder: Decoder, cache_dtype: torch.dtype) -> Tensor:
        """Compute the same logits with a decoder, for the second of two batched requests."""
        count = pages_for(self.longest)
        kv = KVCache.allocate(self._config.shape, 1 + 2 * count, cache_dtype, decoder.device)
        requests = [1 + np.arange(count), 1 + count + np.arange(count)]

        def run(rows: list[RequestRows], start: int, stop: int) -> Tensor:
            tokens = np.concatenate([text[start:stop] for text in self._texts])
            ids = torch.from_numpy(tokens).to(decoder.device)
            hidden = decoder.forward(ids, decoder.plan(rows, kv), kv)
            logits = decoder.logits(hidden[: len(tokens)])[stop - start :]
            return logits if logits.dtype == torch.float64 else logits.float()

        chunks = []
        for start, stop in pairwise(min(cut, self.length) for cut in CHUNKS):
            if start < stop:
                rows = [RequestRows.chain(start, stop - start, pages, self.length) for pages in requests]
                chunks.append(run(rows, start, stop))
        trees = [RequestRows.tree(self.length, PARENTS, pages, self.length) for pages in requests]
        chunks.append(run(trees, self.length, self.longest))
        return torch.cat(chunks)


def _distance(actual: Tensor, expected: Tensor) -> Tensor:
    """Return each row's RMS difference, relative to the standard deviation of its expected logits: [num_rows]."""
    spread = (expected - expected.mean(1, keepdim=True)).square().mean(1).sqrt()
    return (actual - expected).square().mean(1).sqrt() / spread.clamp(min=1e-12)


def _overall(actual: Tensor, expected: Tensor) -> float:
    """Return the RMS of the rows' distances."""
    return float(_distance(actual, expected).square().mean().sqrt())
