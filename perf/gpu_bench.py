"""Models, passes and timing of `perf/gpu.py`."""

import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from processes import Figures
from torch import Tensor

from treespec.cache.kv_cache import KVCache
from treespec.models.attention import make_attention
from treespec.models.model_config import ModelConfig
from treespec.models.triton_decoder import TritonDecoder
from treespec.startup.memory import GPU_PREFILL_CHUNKS
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.launch.graph_capture import GraphMemory, capture_replay
from treespec_kernels.tuning.testing import tree_parents
from treespec_kernels.tuning.tuned import KernelConfigs
from treespec_weights import LLAMA, ModelShape

Call = Callable[[], Any]

SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


class Bench:
    """State of a process: sizes, earlier rows and one open model; `dry`: in Triton's interpreter, without bfloat16."""

    def __init__(self, out: Path, scratch: Path, dry: bool, rows: dict[str, Figures]):
        self.out, self.scratch, self.dry, self.rows = out, scratch, dry, rows
        self.device, self.dtype = torch.device("cpu" if dry else "cuda"), torch.float32 if dry else torch.bfloat16
        self.large = self.llama(1, 32, 64, 2, 1) if dry else self.llama(32, 4096, 14336, 32, 8)
        self.small = self.large if dry else self.llama(16, 2048, 8192, 32, 8)
        self.context, self.requests, self.nodes = (20, 2, 3) if dry else (2048, 64, 32)
        self.prefill = 5 if dry else GPU_PREFILL_CHUNKS[0]
        self._name: Any = None
        self._open: Any = None

    def llama(self, *sizes: int) -> ModelConfig:
        raw = {"model_type": "llama", "vocab_size": 64 if self.dry else 128256, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
        raw |= {"hidden_act": "silu", "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}
        raw, folder = raw | dict(zip(SIZES, sizes, strict=True)), self.scratch / "-".join(map(str, sizes))
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(raw))  # for `treespec autotune`
        return ModelConfig.from_raw(folder, raw, LLAMA)

    def keep(self, name: Any, make: Call) -> Any:
        """Return the open model `name`, creating it in place of another one if necessary."""
        if self._name != name:
            self.release()
            self._name, self._open = name, make()
        return self._open

    def release(self) -> None:
        self._name, self._open = None, None
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()

    def passes(self, exact: bool = True, tuned: bool = False) -> "Passes":
        """Return passes of the large model. `tuned`: with the configurations tuned in this run."""
        positions, folder = self.requests * (self.context + PAGE_SIZE), self.out if tuned else None
        return self.keep((exact, tuned), lambda: Passes.of(self, self.large, positions, exact, folder))

    def random(self, *size: int, scale: float = 1.0) -> Tensor:
        """Return normal numbers; zeros would draw less power and allow higher clocks."""
        return torch.empty(size, dtype=self.dtype, device=self.device).normal_(0.0, scale)

    def weights(self, shape: ModelShape) -> dict[str, Tensor]:
        """Return random parameters that keep activations near 1."""
        params = {name: self.random(*size, scale=size[-1] ** -0.5) for name, size in shape.parameters().items()}
        return {name: tensor if tensor.dim() > 1 else 1 + tensor for name, tensor in params.items()}

    def capture(self, *calls: Call) -> Call:
        """Run calls twice, and return a function that replays their CUDA graph."""

        def run() -> None:
            for call in calls:
                call()

        run()
        run()
        return run if self.dry else capture_replay(run, GraphMemory.of(self.device))

    def timed(self, *calls: Call, graph: bool = True, seconds: float = 2.0) -> Figures:
        """Return the milliseconds per call, captured in one graph or launched individually."""
        run, samples = self.capture(*calls) if graph else lambda: [call() for call in calls], []
        began = time.perf_counter()
        if self.dry:
            run()
            return spread([1e3 * (time.perf_counter() - began)])
        while len(samples) < 35 and (len(samples) < 10 or time.perf_counter() - began < seconds):
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(5)]
            for start, end in events:  # queued together, to exclude the host's time
                start.record()
                run()
                end.record()
            torch.cuda.synchronize()
            samples += [start.elapsed_time(end) / len(calls) for start, end in events]
        return spread(samples[5:])  # clocks ramp up during the first samples

    def floor(self, num_bytes: float, figures: Figures) -> Figures:
        """Add the floor for this many bytes, and its share of the time."""
        floor = 1e3 * num_bytes / self.rows["copy"]["bytes_per_second"]
        return figures | {"floor_ms": round(floor, 5), "floor_share": round(floor / figures["ms"], 4)}


def spread(milliseconds: Sequence[float]) -> Figures:
    return dict(zip(("p10", "ms", "p90"), np.percentile(milliseconds, [10, 50, 90]).round(5).tolist(), strict=True))


class Passes:
    """Target passes of a decoder over a pool of K and V, in pages of random order."""

    def __init__(self, decoder: Any, pool: Tensor):
        self.decoder, self.pool = decoder, pool
        self.pages = 1 + np.random.default_rng(0).permutation(pool.shape[2] - 1)  # page 0 is for padding

    @classmethod
    def of(cls, bench: Bench, config: ModelConfig, positions: int, exact: bool = True, tuned: Any = None) -> "Passes":
        """Return passes of a model with random weights, with room for `positions` positions."""
        configs = KernelConfigs.load(bench.device, folder=tuned)
        attention: Any = make_attention("triton", config.shape, bench.dtype, bench.device, configs)
        decoder = TritonDecoder(config, bench.weights(config.shape), attention, configs, exact, min(positions, 1 << 16))
        size = 1 + positions // PAGE_SIZE, attention.cache_dtype, bench.device
        return cls(decoder, KVCache.allocate(config.shape, *size).normal_())

    def tree(self, context: int, tree: int | TokenTree, requests: int = 1) -> Callable[[], Tensor]:
        """Plan a pass over a tree per request, given or of `tree` random nodes; see `launch`."""
        if isinstance(tree, int):
            parents = tree_parents("random", tree, torch.Generator().manual_seed(0))
            tree = TokenTree.from_parents([1 + node % 50 for node in range(tree)], parents, 0.5, "random")
        num_pages, rows = len(self.pages) // requests, []
        for pages in self.pages[: num_pages * requests].reshape(requests, num_pages):
            tree_rows = RequestRows(context, np.arange(len(tree)), tree.depths, tree.visible, tree.depths, pages)
            rows.append(RequestRows.chain(context, 1, pages) if len(tree) == 1 else tree_rows)
        return self.launch(rows, tree.tokens.tolist() * requests)

    def launch(self, rows: list[RequestRows], tokens: Sequence[int], num_logits: int = 0) -> Callable[[], Tensor]:
        """Plan a pass; return a function that launches it and returns logits of the last `num_logits` rows, or all."""
        layout, ids = self.decoder.plan(rows, self.pool), torch.tensor(tokens, device=self.decoder.device)

        def run() -> Tensor:
            with torch.inference_mode():
                return self.decoder.logits(self.decoder.forward(ids, layout, self.pool)[-num_logits:])

        return run
