"""Comparison of tensors: bit by bit, and within bounds relative to the RMS."""

import torch


def assert_close(actual: torch.Tensor, expected: torch.Tensor, *, max_error: float, rms_error: float) -> None:
    """Assert that tensors are close, with errors relative to the RMS of `expected`.

    Elementwise relative errors would require impossible precision for small elements.

    Args:
        max_error: bound on max |actual - expected| / rms(expected), beyond one rounding step of the dtype at
            `expected`: a gated activation has values of 14 RMS, whose bfloat16 neighbours are 0.1 RMS away.
        rms_error: bound on rms(actual - expected) / rms(expected).

    Raises:
        AssertionError: shapes or dtypes differ, a value on either side is NaN or infinite, or an error exceeds a bound.
    """
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    if expected.numel() == 0:
        return
    step = torch.finfo(expected.dtype).eps
    actual, expected = actual.double().cpu(), expected.double().cpu()
    for name, tensor in (("expected", expected), ("actual", actual)):
        wrong = (~tensor.isfinite()).nonzero()
        assert len(wrong) == 0, f"{name} is not finite at {len(wrong)} places, first {wrong[:4].tolist()}"
    scale = expected.square().mean().sqrt().clamp(min=1e-30)
    difference = (actual - expected).abs()
    error = (difference - step * expected.abs()).clamp(min=0) / scale
    worst, rms = float(error.max()), float((difference / scale).square().mean().sqrt())
    if worst <= max_error and rms <= rms_error:
        return
    place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    bounds = f"max error {worst:.3g} (bound {max_error:.3g}), rms error {rms:.3g} (bound {rms_error:.3g})"
    raise AssertionError(f"{bounds}, worst at {place}: {actual[place]:.6g}, expected {expected[place]:.6g}")


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors of one dtype are bit-identical: NaNs with equal bits are, +0 and -0 are not."""
    return torch.equal(bits(tensor), bits(other))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
