"""A model's factors on parameters and activations."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Factors(NamedTuple):
    """Factors (maximal update parametrization, µP; arXiv 2203.03466) other than those with a config key of their own.

    Factors on parameters apply to norms, convolutions (in float32) and biases only, so that no matrix is rounded.
    """

    parameters: Mapping[str, float] = MappingProxyType({})  # factor by parameter name in a layer
    scores: float = 1.0  # factor on attention scores
    values: float = 1.0  # factor on attention values
    steps: float = 1.0  # factor on Mamba 2's time steps, before their bias
    stream: float = 1.0  # factor on a layer's additions to the residual stream
