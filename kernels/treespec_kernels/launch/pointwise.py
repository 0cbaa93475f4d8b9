"""Pointwise functions of the kernels. Needs triton.

tanh is computed with an exponential, because it has no exact instruction and is missing in the interpreter.
"""

import triton
import triton.language as tl


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply the activation named `ACTIVATION` (`activations.py`) to fp32 x; "none" returns x."""
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), with 2 sqrt(2 / pi) as one factor.
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "relu":
        y = tl.where(x < 0.0, 0.0, x)  # keeps NaN
    elif ACTIVATION == "relu2":
        y = tl.where(x < 0.0, 0.0, x * x)
    else:
        y = x
    return y


@triton.jit
def activate_gate(gate, up, ACTIVATION: tl.constexpr):
    """Return act(gate) * up in fp32, or `clamped_swiglu` (`activations.py`) of both."""
    if ACTIVATION == "clamped_swiglu":
        g = tl.where(gate > 7.0, 7.0, gate)  # keeps NaN
        u = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        y = g / (1.0 + tl.exp(-1.702 * g)) * (u + 1.0)
    else:
        y = activate(gate, ACTIVATION) * up
    return y


@triton.jit
def soft_cap(x, cap):
    """Return cap * tanh(x / cap), in fp32."""
    return cap * (2.0 / (1.0 + tl.exp(-2.0 * (x / cap))) - 1.0)
