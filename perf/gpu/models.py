"""Models to measure: decoders with random weights of a shape, and the shape of the embedded target grown to a size."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpu.setting import Setting
from treespec.cache import KVCache, pages_for
from treespec.config import ModelConfig
from treespec.models.attention import make_attention
from treespec.models.layer_kinds import LayerKind, Rope
from treespec.models.triton_decoder import TritonDecoder
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.linear.quantized import WeightForm
from treespec_kernels.tuning.tuned import KernelConfigs
from treespec_weights import LLAMA, ModelShape, default_folder, read_config
from treespec_weights.grow import grown_shape
from treespec_weights.load import quantizable, quantized_group
from treespec_weights.quantize import BITS, quantize
from treespec_weights.sizes import parse_size


def random_weights(setting: Setting, shape: ModelShape, quantization: str | None = None) -> dict[str, Tensor]:
    """Create random parameters of a shape, scaled to keep activations near 1.

    `quantization` quantises the matrices as `LLM(quantization=)` does.
    """
    form, weights = form_of(shape, quantization), {}
    matrices = quantizable(shape) if form is not None else {}
    for name, size in shape.parameters().items():
        made = setting.random(*size, scale=size[1] ** -0.5 if len(size) > 1 else 0.1)
        if form is not None and name in matrices:
            weights[name], weights[f"{name}_scale"], _ = quantize(made, form.bits, form.group)
        else:
            weights[name] = made if len(size) > 1 else 1.0 + made
    return weights


def form_of(shape: ModelShape, quantization: str | None) -> WeightForm | None:
    """Return the quantisation format of a shape's matrices in "int8" or "int4"; None for None."""
    return None if quantization is None else WeightForm(BITS[quantization], quantized_group(shape, quantization))


def config_of(setting: Setting, shape: ModelShape) -> ModelConfig:
    """Return the configuration of a Llama of this shape."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    rope = Rope(1.0 / 500000.0**exponent, torch.ones(shape.head_dim // 2), shape.head_dim)
    return ModelConfig(
        folder=Path("random"),
        rules=LLAMA,
        shape=shape,
        norm_eps=1e-5,
        activation="silu",
        parallel=False,
        query_scale=shape.head_dim**-0.5,
        score_cap=None,
        logit_cap=None,
        embed_scale=1.0,
        ropes=(rope,),
        layers=(LayerKind(0, None),) * shape.num_layers,
        max_positions=131072,
        dtype=setting.dtype,
        eos_token_ids=(),
    )


def open_decoder(
    setting: Setting,
    shape: ModelShape,
    exact: bool,
    num_positions: int,
    config: ModelConfig | None = None,
    quantization: str | None = None,
    tuned: bool = True,
) -> tuple[TritonDecoder, str]:
    """Create a decoder with random weights, and its description.

    Args:
        setting, shape: of the model.
        exact: whether passes are bit-identical to plain decoding; False uses the engine's faster variant.
        num_positions: maximum number of positions.
        config: configuration of another family; None for a Llama of this shape.
        quantization: quantisation of the layers, "int8" or "int4"; None for none.
        tuned: whether to use tuned configurations, where there are any, instead of the defaults.
    """
    configs = KernelConfigs.load(setting.device) if tuned else KernelConfigs()
    attention = make_attention("triton", shape, setting.dtype, setting.device, configs, exact)
    weights = random_weights(setting, shape, quantization)
    config = config or config_of(setting, shape)
    decoder = TritonDecoder(config, weights, attention, configs, exact, num_positions)
    return decoder, f"TritonDecoder, exact={exact}: {configs.describe()}"


class Passes:
    """Target passes of a decoder over a cache of random K and V.

    Args:
        setting, shape: of the model.
        max_context, max_rows: maximum context length and number of rows per request.
        requests: batch size.
        exact, config, quantization, tuned: as in `open_decoder`.
    """

    def __init__(
        self,
        setting: Setting,
        shape: ModelShape,
        max_context: int,
        max_rows: int,
        requests: int = 1,
        exact: bool = True,
        config: ModelConfig | None = None,
        quantization: str | None = None,
        tuned: bool = True,
    ):
        self.shape, self.requests, self.form = shape, requests, form_of(shape, quantization)
        positions = max_context + max_rows + 1
        self.decoder, self.how = open_decoder(setting, shape, exact, positions, config, quantization, tuned)
        per_request = pages_for(positions)
        dtype = self.decoder.attention.cache_dtype
        self.pool = KVCache.allocate(shape, requests * per_request + 1, dtype, setting.device)
        self.pool.normal_()
        order = np.random.default_rng(setting.seed).permutation(requests * per_request) + 1
        self.pages = order.reshape(requests, per_request)

    def prepare(
        self, context: int, parents: Sequence[int], tokens: Sequence[int] | None = None
    ) -> Callable[[], Tensor]:
        """Plan a pass over one tree per request; calling the result launches all kernels up to the logits.

        Args:
            context: number of committed positions.
            parents: parents of the tree's nodes.
            tokens: tokens of the tree's nodes, the same for every request; None for random ones.
        """
        depths = np.zeros(len(parents), dtype=np.int64)
        visible = np.eye(len(parents), dtype=bool)
        for node in range(1, len(parents)):
            depths[node] = depths[parents[node]] + 1
            visible[node] |= visible[parents[node]]
        if len(parents) == 1:
            rows = [RequestRows.chain(context, 1, pages) for pages in self.pages]
        else:
            nodes = np.arange(len(parents))
            rows = [RequestRows(context, nodes, depths, visible, depths, pages) for pages in self.pages]
        layout = self.decoder.plan(rows, self.pool)
        if tokens is None:
            tokens = np.random.default_rng(len(parents)).integers(self.shape.vocab_size, size=len(parents)).tolist()
        ids = torch.tensor(list(tokens) * self.requests, device=self.decoder.device)
        return lambda: self.decoder.logits(self.decoder.forward(ids, layout, self.pool))


def shape_of_size(size: str) -> ModelShape:
    """Return the shape of the embedded target grown to about `size` parameters."""
    source = default_folder("target")
    return grown_shape(ModelShape.from_hf(read_config(source), LLAMA, source), parse_size(size))
