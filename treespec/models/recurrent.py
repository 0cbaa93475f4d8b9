"""Recurrent layers of the eager decoder: Gated DeltaNets, Mamba 2's layers, and LFM2's gated convolutions."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from treespec.models.layer import COMPILED, EAGER, Layer, LinearMaker, present, take_projection
from treespec.models.model_config import ModelConfig
from treespec.models.state_pass import StatePass
from treespec_kernels.recurrent.mixer_rows import MixerSizes
from treespec_kernels.recurrent.request_state import StateShape
from treespec_weights.blocks import Weights

# Limits of compiled passes:
MAX_KERNEL = 16  # tokens of a convolution
STATE_LANES = 16  # divides the sizes of keys and values


def recurrent_sizes(config: ModelConfig) -> dict[str, Any]:
    """Return `Architecture`'s fields for recurrent layers; {} in models without them."""
    shape = config.shape.recurrent
    if shape is None:
        return {}
    sizes = {name: getattr(shape, name) for name in ("kernel", "key_heads", "key_dim", "value_dim", "tiled", "rates")}
    sizes |= {"channels": shape.channels(config.shape.hidden_size), "state_heads": shape.heads}
    scales = {"beta_scale": 2.0 if shape.doubled else 1.0, "step_scale": config.step_scale}
    return sizes | scales | {"mixer_eps": _epsilon(config), "mixer_norm": shape.normed}


def _epsilon(config: ModelConfig) -> float:
    """Return the epsilon of a mixer's norm, whose input is not divided by `stream_scale` as the residual stream is."""
    mixer_eps = config.shape.recurrent and config.shape.recurrent.eps
    return mixer_eps or config.norm_eps * config.stream_scale**2


def take_mixer(weights: Weights, prefix: str, config: ModelConfig) -> dict[str, Any]:
    """Pop the parameters of a layer's recurrent mixer, by field of `CompiledLayerWeights`."""
    shape = config.shape.recurrent
    assert shape is not None
    names = present(COMPILED["mix"], prefix, weights)
    return {
        "mix": [take_projection(weights, prefix, (name,)) for name in names],
        "mix_bias": _take_bias(weights, prefix, names),
        **_take_conv(weights, prefix),
        **({} if shape.kind == "conv" else _take_steps(weights, prefix)),
    }


def _take_bias(weights: Weights, prefix: str, names: Sequence[str]) -> Tensor | None:
    """Pop the bias of a product of several matrices, if they have biases."""
    biases = [weights.pop(f"{prefix}{name}_bias") for name in names if f"{prefix}{name}_bias" in weights]
    return torch.cat(biases) if biases else None


def _take_conv(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """Pop a convolution, fp32: its weight [kernel, channels], and its bias, if it has one."""
    names = [name for name in ("conv", "conv_q", "conv_k", "conv_v") if prefix + name in weights]
    weight, bias = torch.cat([weights.pop(prefix + name) for name in names]), _take_bias(weights, prefix, names)
    return {"conv": weight[:, 0].float().t().contiguous()} | ({} if bias is None else {"conv_bias": bias.float()})


def _take_steps(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """Pop the vectors of a layer with a state per head, fp32."""
    dt_bias, log, gain = (weights.pop(prefix + name).float() for name in ("dt_bias", "decay_log", "mix_gain"))
    skip = {"skip": weights.pop(f"{prefix}skip").float()} if f"{prefix}skip" in weights else {}
    return {"dt_bias": dt_bias, "rate": -log.exp(), "gain": gain} | skip


def state_shape(config: ModelConfig, num_nodes: int, dtype: torch.dtype) -> StateShape | None:
    """Return the sizes of a request's state for trees of up to `num_nodes` nodes; None without recurrent layers."""
    shape = config.shape.recurrent
    if shape is None:
        return None
    width = shape.width(config.shape.hidden_size)
    sizes = shape.heads, shape.key_dim, shape.value_dim
    return StateShape(len(shape.layers), sizes, shape.kernel - 1, width, num_nodes, dtype)


def _take_product(weights: Weights, prefix: str, name: str, make_linear: LinearMaker) -> Any:
    """Pop a product of a mixer."""
    names = present(EAGER[name], prefix, weights)
    return make_linear(take_projection(weights, prefix, names), _take_bias(weights, prefix, names))


class StateMixer:
    """Mixer with a short convolution and a state per head, without the output projection."""

    def __init__(self, weights: Weights, i: int, config: ModelConfig, make_linear: LinearMaker):
        shape = config.shape.recurrent
        assert shape is not None
        heads = shape.key_heads, shape.key_dim, shape.heads, shape.value_dim
        options = shape.doubled, config.step_scale, shape.normed
        self._sizes, self._tiled = MixerSizes(shape.kind == "delta", *heads, *options), shape.tiled
        self._channels, self._eps = shape.channels(config.shape.hidden_size), _epsilon(config)
        self.index, prefix = i, f"layers.{i}."
        self.mix, self.rates = (_take_product(weights, prefix, name, make_linear) for name in ("mix", "rates"))
        self.vectors = _take_conv(weights, prefix) | _take_steps(weights, prefix)

    def __call__(self, product: Callable[[str], Tensor], rows: StatePass, layer: int) -> Tensor:
        """Return the mixed rows before the output projection, [num_rows, heads * value_dim].

        `product` computes `mix` and `rates` of the layer's input.
        """
        mixed, vectors, first = product("mix"), self.vectors, rows.num_replayed
        convolved, gate = mixed[:, : self._channels], mixed[:, self._channels :]
        inputs = rows.exchange(layer, torch.cat((convolved, product("rates")), 1))
        parameters = vectors["conv"], vectors.get("conv_bias"), vectors["dt_bias"], vectors["rate"]
        made = rows.mix(inputs, rows.taps, *parameters, self._sizes)
        out = rows.update(layer, *made, self._sizes.delta, self._tiled)
        norm = vectors["gain"], vectors.get("skip"), self._sizes, self._eps
        return rows.gate(out[first:], made.v[first:], gate, *norm)

    @property
    def nbytes(self) -> int:
        return self.mix.nbytes + self.rates.nbytes + sum(vector.nbytes for vector in self.vectors.values())


class ConvMixer:
    """LFM2's gated convolution, without the output projection."""

    def __init__(self, weights: Weights, i: int, config: ModelConfig, make_linear: LinearMaker):
        self.index, self._dtype, prefix = i, make_linear.dtype, f"layers.{i}."
        self.mix = _take_product(weights, prefix, "mix", make_linear)
        self.conv = _take_conv(weights, prefix)["conv"]

    def __call__(self, product: Callable[[str], Tensor], rows: StatePass, layer: int) -> Tensor:
        """Return the mixed rows before the output projection, [num_rows, hidden_size]; `product` as in `StateMixer`."""
        before, after, x = product("mix").chunk(3, 1)
        inputs = rows.exchange(layer, before * x)
        mixed = rows.convolve(inputs, rows.taps[rows.num_replayed :], self.conv)
        return (mixed * after.float()).to(self._dtype)

    @property
    def nbytes(self) -> int:
        return self.mix.nbytes + self.conv.nbytes


def make_mixer(weights: Weights, i: int, config: ModelConfig, make_linear: LinearMaker) -> StateMixer | ConvMixer:
    """Pop the parameters of the mixer of layer i, and return it."""
    assert config.shape.recurrent is not None
    kind = ConvMixer if config.shape.recurrent.kind == "conv" else StateMixer
    return kind(weights, i, config, make_linear)


class RecurrentLayer(Layer):
    """A layer with a mixer in place of attention, or beside it."""

    def __init__(self, weights: Weights, i: int, config: ModelConfig, make_linear: LinearMaker, min_rows: int):
        super().__init__(weights, i, config, make_linear, min_rows)
        self.mixer = make_mixer(weights, i, config, make_linear)
