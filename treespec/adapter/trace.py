"""Tracing of a transformers model: its attention calls, shapes and head."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from treespec.adapter.route import AttentionCall, MaskRule, configs_of, is_routed, routed, visible_keys
from treespec.adapter.source import Source
from treespec.errors import ModelError, describe_error
from treespec_weights.rules import ModelShape

_TOKENS = 5
_head_runs = threading.RLock()  # otherwise a second thread could save the first one's patched forward as the original


@dataclass(frozen=True, eq=False)
class AdapterConfig:
    """Architecture of a traced model; field names as in `ModelConfig`.

    `shape` has one layer per attention call; its head_dim is the maximum width of keys and values.
    """

    source: Source
    shape: ModelShape
    masks: tuple[MaskRule, ...]  # one per layer
    sinks: tuple[bool, ...]  # whether each layer has sinks
    base: str  # submodule that returns the hidden states for the head
    output: type  # its output class
    folder: Path  # this and the following fields describe the source
    max_positions: int
    short_context: int
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]


def reference_attention(call: AttentionCall) -> Tensor:
    """Attend over one sequence from position 0 on: reference implementation of a route handler."""
    rows = torch.arange(len(call.query), device=call.query.device)
    group = call.query.shape[1] // call.key.shape[1]
    q, k, v = (tensor.float().transpose(0, 1) for tensor in (call.query, call.key, call.value))
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * call.scale
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    visible = visible_keys(call.mask, rows, rows) & (rows[None] <= rows[:, None])
    scores = scores.masked_fill(~visible, -torch.inf)
    if call.sinks is not None:
        scores = torch.cat((scores, call.sinks.float()[:, None, None].expand(-1, len(rows), 1)), -1)
    weights = torch.softmax(scores, -1)[..., : len(rows)]
    return (weights @ v.repeat_interleave(group, 0)).transpose(0, 1)


def run(module: nn.Module, tokens: Tensor, positions: Tensor) -> Any:
    """Call a routed model, or its base model, on flattened rows: int64 tokens and positions [num_rows].

    Passes a mask of ones, because without a mask transformers interprets jumps in positions as packed sequences.
    """
    return module(
        input_ids=tokens[None],
        position_ids=positions[None],
        attention_mask=torch.ones_like(tokens)[None],
        use_cache=False,
        return_dict=True,
    )


def run_head(model: nn.Module, base: nn.Module, hidden: Tensor, output: type) -> Tensor:
    """Compute logits [num_rows, vocab] with the model's own head code, including scales and caps.

    Patches the base model's forward to return `hidden`, [num_rows, hidden_size], in this thread only.
    """
    me = threading.get_ident()
    with _head_runs:
        original = base.__dict__.get("forward")

        def patched(*inputs: Any, **options: Any) -> Any:
            if threading.get_ident() == me:
                return output(last_hidden_state=hidden[None])
            return type(base).forward(base, *inputs, **options) if original is None else original(*inputs, **options)

        base.__dict__["forward"] = patched
        try:
            tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            return model(input_ids=tokens, use_cache=False, return_dict=True).logits[0]
        finally:
            del base.__dict__["forward"]
            if original is not None:
                base.__dict__["forward"] = original


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[tuple[str, Any]]]:
    """Record names and outputs of submodules that return hidden states, in order of completion."""
    ended: list[tuple[str, Any]] = []

    def note(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if is_routed() and isinstance(getattr(output, "last_hidden_state", None), Tensor):
            ended.append((name, output))

    handles = [module.register_forward_hook(partial(note, name)) for name, module in model.named_modules() if name]
    try:
        yield ended
    finally:
        for handle in handles:
            handle.remove()


def record_calls(label: str, model: nn.Module, forward: Callable[[], Any]) -> tuple[list[AttentionCall], Any]:
    """Run code of a model with the reference attention. Returns the attention calls, and what `forward` returns."""
    calls: list[AttentionCall] = []

    def record(call: AttentionCall) -> Tensor:
        calls.append(call)
        return reference_attention(call)

    try:
        with torch.inference_mode(), routed(configs_of(model), record):
            return calls, forward()
    except ModelError as error:
        raise ModelError(f"{label}: {error}") from error
    except Exception as error:  # model code may raise anything
        raise ModelError(f"{label} fails on flattened rows: {describe_error(error)}") from error


def trace(source: Source, model: nn.Module) -> AdapterConfig:
    """Run a few tokens through a model and record its attention calls."""
    tokens = torch.arange(_TOKENS, device=next(model.parameters()).device)
    with _watched(model) as watched:
        calls, logits = record_calls(source.name, model, lambda: run(model, tokens, tokens).logits[0])
    if not calls:
        raise ModelError(
            f"{source.name}: {type(model).__name__} does not use transformers' attention interface, so its keys "
            "cannot be kept for a token tree"
        )
    if not watched:
        raise ModelError(f"{source.name}: {type(model).__name__} has no submodule that returns hidden states")
    base, out = watched[-1]  # the outermost submodule, which the model's head code calls
    heads = {(call.query.shape[1], call.key.shape[1]) for call in calls}
    if len(heads) != 1:
        raise ModelError(f"{source.name}: layers of {sorted(heads)} heads and KV heads; layers must agree")
    [(num_heads, num_kv_heads)] = heads
    if num_heads % num_kv_heads:
        raise ModelError(f"{source.name}: {num_heads} heads are not a multiple of {num_kv_heads} KV heads")
    text = source.hf_config.get_text_config(decoder=True)
    shape = ModelShape(
        num_layers=len(calls),
        hidden_size=out.last_hidden_state.shape[-1],
        intermediate_size=width if isinstance(width := getattr(text, "intermediate_size", None), int) else 0,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=max(max(call.key.shape[2], call.value.shape[2]) for call in calls),
        vocab_size=logits.shape[-1],
    )
    sinks = tuple(call.sinks is not None for call in calls)
    names = ("folder", "max_positions", "short_context", "dtype", "eos_token_ids")
    copied: dict[str, Any] = {name: getattr(source, name) for name in names}
    return AdapterConfig(source, shape, tuple(call.mask for call in calls), sinks, base, type(out), **copied)
