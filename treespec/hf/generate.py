"""A custom `generate` loop for transformers that decodes with token trees."""

import functools
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from treespec.adapter.source import Source, check_inputs
from treespec.config.configs import SpecConfig
from treespec.errors import RequestError
from treespec.hf.checks import check_config, check_drafts, check_dropped_arguments, read_padding
from treespec.hf.engines import engine_for
from treespec.hf.rows import EndingStreamer, Row, RowStreamer, make_rows, temperature_of, with_delayed_start
from treespec.outputs import RequestMetrics
from treespec.sampling_params import SamplingParams

logger = logging.getLogger("treespec")

_MAX_SEED = 2**53
_metrics: "weakref.WeakKeyDictionary[nn.Module, GenerateMetrics]" = weakref.WeakKeyDictionary()
_guard = threading.Lock()  # guards `_metrics`


@dataclass(frozen=True)
class GenerateMetrics(RequestMetrics):
    """Metrics of a `generate` call, summed over its rows.

    Attributes:
        rows: metrics of each output row.
    """

    rows: tuple[RequestMetrics, ...]


def last_metrics(model: nn.Module) -> GenerateMetrics | None:
    """Return the metrics of the last token-tree call with this model, from any thread; None before the first.

    Covers `accelerate` and `custom_generate=treespec.hf.generate`. Failed calls and calls passed to transformers are
    not recorded.
    """
    with _guard:
        return _metrics.get(model)


def generate(
    model: nn.Module,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    drafts: Sequence[Any] | None = None,
    spec: SpecConfig | str | None = None,
    token_streamer: Any = None,
    exact: bool = True,
    target_tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Run the loop behind `model.generate(**inputs, custom_generate=treespec.hf.generate, drafts=[...])`.

    transformers does not pass `streamer=`, `assistant_model=` and `tokenizer=` to custom loops. The first two are
    rejected, and `stop_strings=` must be given as stopping_criteria=[StopStringCriteria(tokenizer, ["..."])]. Models
    prepared by `treespec.hf.accelerate` accept all three.

    The model is neither copied nor modified, and other threads may run it meanwhile. It computes in its own dtype even
    under `torch.autocast` (with a warning); cast the model to change that. Greedy tokens equal those of
    `model.generate` without autocast, except where rounding decides between close logits (frequent in 16 bits); sampled
    tokens have its distribution and depend only on `torch.manual_seed`, not on the drafts.

    Args:
        model: a `PreTrainedModel` in eval mode.
        input_ids: int64 [rows, width], padded on the left.
        logits_processor, stopping_criteria, generation_config: as prepared by transformers. Processors are called per
            tree node with its prefix, [1, length], and must be stateless; criteria are called after each token, row by
            row. `max_time` excludes building the engine at the first call.
        drafts: draft models (folders, hub ids, models in memory, alone or as (model, tokenizer)) or `Drafter` objects;
            "lookup" for prompt lookup only, which is always on.
        spec: speculative decoding options; "off" means plain decoding.
        token_streamer: object with `put` and `end`, ended even on errors.
        exact: raise an error if trees are not bit-identical to plain decoding; False is faster if torch's matrix
            products need a fixed number of rows.
        target_tokenizer: the model's tokenizer, for connecting drafts; None loads it from the folder or hub id that the
            model was loaded from.
        model_kwargs: attention_mask and position_ids; others are rejected.

    Returns:
        int64 [rows, width + new tokens], or a GenerateDecoderOnlyOutput with `return_dict_in_generate`, with
            past_key_values=None; finished rows repeat their last scores and logits.

    Raises:
        ConfigError: beam search, guidance, watermarks, constraints and other unsupported features.
        RequestError: an invalid prompt, or a processor failed.
        ModelError, DraftError, ExactnessError: as in `LLM`.
    """
    check_dropped_arguments(model)
    with EndingStreamer("token_streamer", token_streamer) as ending:
        processors, criteria = list(logits_processor or ()), list(stopping_criteria or ())
        check_config(generation_config, processors, criteria, len(input_ids))
        check_inputs(model)
        padding = read_padding(input_ids, model_kwargs)
        prompts = [row[pad:] for row, pad in zip(input_ids.tolist(), padding, strict=True)]
        resolved = SpecConfig.resolve(spec, SpecConfig())
        max_new_tokens = generation_config.max_length - input_ids.shape[1]
        if max_new_tokens < 1:
            room = f"max_length={generation_config.max_length}"
            raise RequestError(f"{room} leaves no room after {input_ids.shape[1]} tokens")
        max_length = max(map(len, prompts)) + max_new_tokens
        positions = Source.from_model(model).max_positions
        if max_length > positions:
            tokens = f"{max_length - max_new_tokens} prompt tokens and {max_new_tokens} new tokens"
            raise RequestError(f"{tokens}, but the model has {positions} positions; lower max_new_tokens")
        began = time.time()
        check_drafts(drafts)
        sources = [draft for draft in drafts or () if not (isinstance(draft, str) and draft == "lookup")]  # always on
        llm = engine_for(model, sources, resolved, exact, len(input_ids), max_length, positions, target_tokenizer)
        if torch.is_autocast_enabled(llm.config.device.type):
            warn_autocast(llm.config.dtype)
        stopping = type(stopping_criteria)(with_delayed_start(criteria, time.time() - began))
        llm.check_sources(resolved)
        decoder = llm.engine.runner.target
        least, largest = int(input_ids.min()), int(input_ids.max())
        if not 0 <= least <= largest < decoder.vocab_size:
            raise RequestError(f"input_ids from {least} to {largest}; valid: 0 to {decoder.vocab_size - 1}")
        seed = int(torch.randint(_MAX_SEED, (1,), device="cpu")) if generation_config.do_sample else 0
        params = SamplingParams(max_tokens=max_new_tokens, temperature=temperature_of(generation_config), seed=seed)
        pads = [row[:pad] for row, pad in zip(input_ids, padding, strict=True)]
        row_options = logits_processor, stopping, generation_config, params, resolved
        rows = make_rows(prompts, pads, *row_options, decoder.vocab_size, decoder.device)
        streamer = RowStreamer(ending, input_ids, rows, _pad_token(generation_config))
        for row in llm.rounds.run(rows):
            row.raise_error()
            with llm.rounds.turn():
                steps = streamer.due()
            streamer.put(steps)
        streamer.put(streamer.due())
        metrics = vars(RequestMetrics.of(rows))
        with _guard:
            _metrics[model] = GenerateMetrics(**metrics, rows=tuple(RequestMetrics.of([row]) for row in rows))
        return _output(input_ids, rows, generation_config)


@functools.cache
def warn_autocast(dtype: torch.dtype) -> None:
    """Warn once per dtype, since evaluations call `generate` for every batch."""
    logger.warning("torch.autocast has no effect in treespec.hf.generate: the model computes in %s", dtype)


def _pad_token(config: Any) -> int:
    pad = config._pad_token_tensor
    return 0 if pad is None else int(pad.reshape(-1)[0])


def _output(ids: Tensor, rows: Sequence[Row], config: Any) -> Any:
    steps, pad = max(row.num_generated for row in rows), _pad_token(config)
    new_tokens = [row.output_token_ids + [pad] * (steps - row.num_generated) for row in rows]
    sequences = torch.cat((ids, torch.tensor(new_tokens, dtype=ids.dtype, device=ids.device)), 1)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    def gathered(i: int) -> tuple[Tensor, ...]:
        """Return a tensor [rows, vocab] per step. Finished rows repeat their last one."""
        records = [row.recorded() for row in rows]
        return tuple(
            torch.stack([record[min(step, len(record) - 1)][i] for record in records]) for step in range(steps)
        )

    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=gathered(1) if config.output_scores else None,
        logits=gathered(0) if config.output_logits else None,
    )
