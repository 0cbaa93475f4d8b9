"""Roofline: minimum bytes and operations of a pass, and the resulting time bound."""

import math

from treespec_kernels.linear.quantized import WeightForm
from treespec_weights.load import quantizable
from treespec_weights.rules import ModelShape


def weight_bytes(shape: ModelShape, itemsize: int, form: WeightForm | None = None) -> int:
    """Return the bytes of the weights that a pass reads in full, which excludes an untied embedding.

    `form` is the quantisation format of the layers' matrices, with scales of `itemsize`.
    """
    looked_up = 0 if shape.tied else shape.vocab_size * shape.hidden_size
    total = (shape.num_parameters() - looked_up) * itemsize
    if form is not None:
        for size in quantizable(shape).values():
            count = math.prod(size)
            total += count * form.bits // 8 + count // form.group_of(size[1]) * itemsize - count * itemsize
    return total


def kv_bytes(shape: ModelShape, itemsize: int) -> int:
    """Return the bytes of K and V of one position in all layers."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * itemsize


def pass_bytes(
    shape: ModelShape, rows: int, context: int, itemsize: int, requests: int = 1, form: WeightForm | None = None
) -> int:
    """Return the bytes of weights, K and V read once, plus logits written. `rows` and `context` are per request.

    Partial sums and partial attention results are implementation overhead and not counted.
    """
    logits = requests * rows * shape.vocab_size * itemsize
    return weight_bytes(shape, itemsize, form) + requests * (context + rows) * kv_bytes(shape, itemsize) + logits


def pass_flop(shape: ModelShape, rows: int, context: int, requests: int = 1) -> int:
    """Return the FLOP (multiplications and additions) of a pass."""
    embed = 0 if shape.tied else shape.vocab_size * shape.hidden_size
    dense = 2 * (shape.num_parameters() - embed) * rows
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * rows * (context + rows // 2)
    return requests * (dense + attention)


def attention_bytes(num_heads: int, num_kv_heads: int, head_dim: int, rows: int, context: int, itemsize: int) -> int:
    """Return the bytes of one layer's attention: K, V and queries read once, results written."""
    return ((context + rows) * 2 * num_kv_heads + 2 * rows * num_heads) * head_dim * itemsize


def floor_us(num_bytes: float, flop: float, bytes_per_second: float, flop_per_second: float | None) -> float:
    """Return the lower bound of the time in microseconds."""
    arithmetic = flop / flop_per_second if flop_per_second else 0.0
    return 1e6 * max(num_bytes / bytes_per_second, arithmetic)
