"""Row-invariant activations of an MLP: bits depend neither on the number of values nor on their index.

ATen's SiLU and GELU round differently in their vectorised body and in their scalar tail, so a row's bits depend on the
number of rows. `exp`, `erf` and `tanh` have no scalar tail (tested for every width from 1 to 14,336). All activations
compute in fp32, with every operation rounded, and return the dtype of their input.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

_TANH_SCALE = math.sqrt(2 / math.pi)


def silu(x: Tensor) -> Tensor:
    """Return x sigmoid(x)."""
    y = x.float()
    return (y / (1 + torch.exp(-y))).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) in fp32."""
    return 1 / (1 + torch.exp(-x.float()))


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) in fp32, which does not overflow."""
    y = x.float()
    return torch.relu(y) + torch.log1p(torch.exp(-y.abs()))


def gelu(x: Tensor) -> Tensor:
    """Return x Phi(x), with the normal distribution function Phi (arXiv 1606.08415)."""
    y = x.float()
    return (y * 0.5 * (1 + torch.erf(y * math.sqrt(0.5)))).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU's approximation 0.5 x (1 + tanh(u)) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    y = x.float()
    u = (y + y * y * y * 0.044715) * _TANH_SCALE
    return (y / (1 + torch.exp(u * -2))).to(x.dtype)


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0)."""
    return torch.relu(x)


def relu2(x: Tensor) -> Tensor:
    """Return max(x, 0)^2 (arXiv 2109.08668)."""
    y = torch.relu(x.float())
    return (y * y).to(x.dtype)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gpt-oss's g sigmoid(1.702 g) (u + 1), with g at most 7, and u from -7 to 7."""
    g, u = gate.float().clamp(max=7.0), up.float().clamp(-7.0, 7.0)
    return (g / (1 + torch.exp(g * -1.702)) * (u + 1)).to(gate.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap tanh(x / cap) (Gemma 2, arXiv 2408.00118)."""
    return (torch.tanh(x.float() / cap) * cap).to(x.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu2": relu2,
}
