"""Model shapes, and settings for checking, timing and compiling ops."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from treespec_kernels.attention.tree_attention_plan import AttentionShape
from treespec_kernels.launch.triton_launch import target_of
from treespec_kernels.linear.quantized import WeightForm
from treespec_kernels.linear.rms_norm import NormKind

META = torch.device("meta")
PAGE_SIZE = 64
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Formats compiled for a shape without a format: int8 per channel, int4 per group, and int4 with zero points as in AWQ.
AOT_FORMS = (WeightForm(8), WeightForm(4, 128), WeightForm(4, 128, True))


class LinearLayer(NamedTuple):
    """A linear layer with weight [out_features, in_features]; with silu_gate, out_features counts gates and ups."""

    name: str
    out_features: int
    in_features: int
    silu_gate: bool = False


@dataclass(frozen=True)
class KernelShape:
    """Properties of a model that its kernels depend on; the defaults are Llama's."""

    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    norm: NormKind = "rms"  # kind of norm of the residual stream; a model with LayerNorm has biases in all layers
    post_norms: bool = False  # whether attention and MLP outputs are normalised before the residual add
    qk_norm: bool = False  # whether the heads of Q and K are normalised
    rotary: bool = True  # whether Q and K are rotated by position
    gated: bool = True  # whether the MLP has a gate projection
    activation: str = "silu"
    capped: bool = False  # whether attention scores and logits have soft caps
    quantized: WeightForm | None = None  # format of the linear layers; None for dense layers
    # Heads and head size of the planes that K and V lie in, if layers are of unequal sizes, as in Gemma 4: then V is
    # normalised too, and the residual stream has a factor
    planes: tuple[int, int] | None = None

    @property
    def linear_layers(self) -> tuple[LinearLayer, ...]:
        """Linear layers of one decoder layer, in execution order; a model may have no MLP."""
        width, hidden, intermediate = self.num_heads * self.head_dim, self.hidden_size, self.intermediate_size
        attention = (
            LinearLayer("qkv", width + 2 * self.num_kv_heads * self.head_dim, hidden),
            LinearLayer("o", hidden, width),
        )
        up = LinearLayer("up", intermediate, hidden)
        up = LinearLayer("gate_up", 2 * intermediate, hidden, True) if self.gated else up
        return (*attention, up, LinearLayer("down", hidden, intermediate)) if intermediate else attention

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, self.dtype)

    @property
    def cache_dims(self) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Dimensions of a layer's cache before K and V, none or the number of planes, and its heads and their size."""
        if self.planes is None:
            return (), (self.num_kv_heads, self.head_dim)
        heads, head_dim = self.planes
        return (self.num_kv_heads * self.head_dim // (heads * head_dim),), self.planes

    @property
    def biased(self) -> bool:
        """Whether the linear layers have biases."""
        return self.norm == "layer"

    @property
    def cap(self) -> float | None:
        """Soft cap of scores and logits."""
        return 30.0 if self.capped else None


@dataclass(frozen=True)
class Setting:
    """Model and passes that define the cases of ops."""

    shape: KernelShape
    device: torch.device = META  # device of the inputs; "meta" for launches that are only compiled
    nodes: int = 32  # rows of one request's tree pass, including the root
    context: int = 2048  # committed positions of each request
    requests: int = 4  # requests of a batch
    prefill: int = 0  # rows of a prefill pass; 0 for none
    groups: int = 1  # number of stacked SSMs of equal shape; 1 for a target
    layers: int = 1
    compiled_for: str | None = None  # target of launches on "meta", from `target_of`

    @property
    def dtype(self) -> torch.dtype:
        return self.shape.dtype

    @property
    def target(self) -> str | None:
        """Architecture for choosing default configurations, from `target_of`."""
        return self.compiled_for or target_of(self.device)

    @property
    def stack(self) -> tuple[int, ...]:
        """Leading dimensions of stacked weights and rows; empty for a single model."""
        return (self.groups,) if self.groups > 1 else ()

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows: plain decoding, a tree, a batch of trees."""
        return tuple(dict.fromkeys((1, self.nodes, self.requests * self.nodes)))

    @property
    def batches(self) -> tuple[int, ...]:
        """Numbers of requests: one, and a batch."""
        return tuple(dict.fromkeys((1, self.requests)))

    def random(self, generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Return normally distributed numbers in the dtype.

        Zeros would not be representative, because they draw less power and run faster on a GPU.
        """
        return self.random_fp32(generator, *shape).mul_(scale).to(self.dtype)

    def random_fp32(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)


_LLAMAS = (  # head_dim, heads, KV heads, hidden, intermediate, vocabulary
    (64, 4, 2, 256, 704, 4096),
    (64, 32, 8, 2048, 8192, 128256),
    (128, 32, 8, 4096, 14336, 128256),
)


def default_shapes(dtypes: Iterable[torch.dtype] = DTYPES) -> tuple[KernelShape, ...]:
    """Return the shapes of the bundled default target, Llama 1B and Llama 8B, in every dtype."""
    return tuple(KernelShape(dtype, *sizes) for dtype in dtypes for sizes in _LLAMAS)
