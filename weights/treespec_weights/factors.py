"""Factors of a model on its parameters and activations."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Factors(NamedTuple):
    """Factors of a model (maximal update parametrization, µP; arXiv 2203.03466), beside those that have a key each.

    Those on parameters round no matrix: they are on norms and convolutions, in float32, and on biases.
    """

    parameters: Mapping[str, float] = MappingProxyType({})  # by their names in a layer
    scores: float = 1.0  # on attention scores
    values: float = 1.0  # on the values of attention
    steps: float = 1.0  # on Mamba 2's time steps, before their bias
    stream: float = 1.0  # on what a layer adds to the residual stream
