"""Layers for multi-token prediction (MTP, arXiv 2412.19437) in a target's own checkpoint, run by transformers' code.

The layer's row combines a token's embedding with the state of the token before it: the target's output state after a
verified token, and the layer's own output after a drafted one. The target's vocabulary head reads its outputs.
"""

import inspect
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treespec.adapter.decoder import AdapterDecoder, AdapterPass
from treespec.adapter.route import routed
from treespec.adapter.source import Source
from treespec.adapter.trace import AdapterConfig, record_calls
from treespec.errors import ModelError, describe_error
from treespec.models.attention import Attention
from treespec.models.feature_head import FeatureHead
from treespec_weights.mtp import MTP, MtpForm


def adapter_mtp_form(target: Source) -> MtpForm:
    """Return the form of a target's layer. Raises ModelError if it has none, or several."""
    count = getattr(target.hf_config.get_text_config(decoder=True), "num_mtp_layers", None)
    if not isinstance(count, int) or not count:
        raise ModelError(f"drafts: {MTP!r}: {target.name} has no MTP layer (num_nextn_predict_layers)")
    if count > 1:
        raise ModelError(f"drafts: {MTP!r}: {target.name} has {count} MTP layers; supported: one")
    checkpoint_folder = target.hf_config.name_or_path
    if target.model_ref is not None and not (checkpoint_folder and Path(checkpoint_folder).is_dir()):
        raise ModelError(
            f"drafts: {MTP!r}: {target.name} does not hold its MTP layer, which is in its checkpoint; load the "
            "model from a local folder, or give this folder to LLM"
        )
    return MtpForm(target.folder)


def open_mtp(target: AdapterConfig, model: nn.Module) -> tuple[AdapterConfig, nn.Module]:
    """Load and trace a target's MTP layer; return the config of a decoder of one layer, and transformers' module."""
    label = f"the MTP layer of {target.source.name}"
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        import transformers

        raise ModelError(f"{label}: transformers {transformers.__version__} has no MTP layers; upgrade it") from error
    device, dtype = (getattr(next(model.parameters()), name) for name in ("device", "dtype"))
    try:
        with torch.inference_mode(False), torch.no_grad():
            layer = MtpModel.from_pretrained(model, device_map={"": device})
            layer.shared_head = None  # `MtpHead` asks the target's decoder
            layer = layer.to(dtype).eval()
    except Exception as error:  # transformers may raise anything
        raise ModelError(f"{label}: transformers cannot load it: {describe_error(error)}") from error
    tokens = torch.arange(5, dtype=torch.int64, device=device)
    states = torch.randn(5, target.shape.hidden_size, dtype=dtype, device=device)
    calls, _ = record_calls(label, layer, lambda: _run(layer, tokens, states, tokens))
    if len(calls) != 1:
        raise ModelError(f"{label} attends {len(calls)} times; supported: once")
    [call] = calls
    shape = replace(
        target.shape,
        num_layers=1,
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        head_dim=max(call.key.shape[2], call.value.shape[2]),
    )
    return replace(target, shape=shape, masks=(call.mask,), sinks=(call.sinks is not None,), base=""), layer


def _run(layer: Any, tokens: Tensor, states: Tensor, positions: Tensor) -> Tensor:
    """Return the outputs of a routed layer, transformers' module, for flattened rows, [num_rows, hidden_size].

    `tokens` and `positions` are int64 [num_rows], `states` those of the tokens before, [num_rows, hidden_size].
    """
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    config = layer.config
    embedded, position_ids = layer.embed_tokens(tokens)[None].to(states.dtype), positions[None]
    kind = (getattr(config, "layer_types", None) or ["full_attention"])[0]
    make_mask = create_sliding_window_causal_mask if kind == "sliding_attention" else create_causal_mask
    # A mask of ones, because without a mask transformers interprets jumps in positions as packed sequences.
    ones = torch.ones_like(tokens)[None]
    # Before transformers 5.24 the cache was named past_key_values.
    no_cache = {name: None for name in ("cache", "past_key_values") if name in inspect.signature(make_mask).parameters}
    mask = make_mask(config=config, inputs_embeds=embedded, attention_mask=ones, position_ids=position_ids, **no_cache)
    rotation = None
    if layer.rotary_emb is not None:
        rotation = layer.rotary_emb(
            embedded,
            position_ids=position_ids,
            **({"layer_type": kind} if getattr(layer, "has_per_layer_rope", False) else {}),
        )
    options = {"position_embeddings": rotation, "position_ids": position_ids, "attention_mask": mask, **no_cache}
    out: Tensor = layer.layers[0](embedded, states[None], **options)[0]
    return layer.shared_post_norm(out) if layer.use_shared_post_norm else out


class MtpDecoder(AdapterDecoder):
    """Decoder of an MTP layer, whose passes also take the states of the tokens before their rows."""

    def __init__(self, config: AdapterConfig, layer: nn.Module, attention: Attention, longest: int):
        self._layer = layer
        super().__init__(config, layer, attention, longest, exact=False)  # a draft's bits do not affect the output

    @property
    def model(self) -> nn.Module:
        return self._layer

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's weights, without the target's embeddings."""
        return sum(weight.nbytes for weight in self._layer.get_submodule("layers").parameters())

    def forward_pairs(self, tokens: Tensor, states: Tensor, layout: AdapterPass, kv: Tensor) -> Tensor:
        """Run a pass: write the rows' K/V to their slots, and return the outputs of `_run`."""
        count = len(tokens)
        padding = layout.num_rows - count
        tokens, states = F.pad(tokens, (0, padding)), F.pad(states, (0, 0, 0, padding))
        with routed(self._configs, partial(self._attend_call, layout, kv), self.exact):
            return _run(self._rotating(self._layer, layout.long), tokens, states, layout.positions)[:count]

    def _find_layer_list(self, base: nn.Module) -> tuple[str | None, int, int]:
        return None, 0, 1


class MtpHead(FeatureHead):
    """An MTP layer as a draft head: reads the output of the target's final norm, and then its own outputs."""

    kind = "mtp"
    decoder: MtpDecoder

    @property
    def nbytes(self) -> int:
        return self.decoder.nbytes

    def forward_features(  # type: ignore[override]
        self, tokens: Tensor, features: Tensor, layout: AdapterPass, kv: Tensor
    ) -> tuple[Tensor, Tensor]:
        output = self.decoder.forward_pairs(tokens, features, layout, kv)
        return output, output
