"""`generate` of transformers, decoding by token trees."""

import functools
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from treespec.adapter.source import Source
from treespec.config import SpecConfig
from treespec.errors import ConfigError, RequestError
from treespec.hf.checks import Prompts, check_config, read_prompts
from treespec.hf.engines import engine_for
from treespec.hf.rows import Row, make_row, processors_of_row, started_later

logger = logging.getLogger("treespec")

_MAX_SEED = 2**53


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
    **model_kwargs: Any,
) -> Any:
    """What `model.generate(**inputs, custom_generate=treespec.hf.generate, drafts=[...])` calls.

    The model is used as it is: nothing of it is copied or changed, and other threads may run it meanwhile. It computes
    in its own dtype, under `torch.autocast` too, which the log says: cast the model where that is not wanted. Greedily
    the tokens are those of `model.generate` without autocast; sampled ones have its law and come from
    `torch.manual_seed` alone, whatever is drafted.

    Args:
        model: a `PreTrainedModel` in eval mode.
        input_ids: int64 [rows, width], padded on the left.
        logits_processor, stopping_criteria, generation_config: as transformers prepares them. Processors are called for
            each node of a tree with its own prefix, [1, length], so they must not keep what they saw; criteria after
            each token, row by row.
            `max_time` counts generating alone, not the building of an engine at the first call. `stop_strings` would
            need the `tokenizer`, which transformers keeps to itself, as it does `assistant_model`: say
            stopping_criteria=[StopStringCriteria(tokenizer, ["..."])] and drafts=[assistant_model] instead.
        drafts: small models: folders, hub ids, models in memory, `Drafter` objects. "lookup", which is on anyway, says
            that nothing else is wanted.
        spec: how to speculate; "off" is plain decoding.
        token_streamer: with `put` and `end`. (transformers keeps what it is given as `streamer` to itself.)
        exact: refuse where trees would not have the bits of plain decoding; False is faster where torch's matrix
            products need rows of a fixed number.
        model_kwargs: attention_mask, position_ids; anything else that says something is refused.

    Returns:
        int64 [rows, width + new tokens], or a GenerateDecoderOnlyOutput with `return_dict_in_generate`, whose
        past_key_values are None; the scores and logits of a row that has ended stay its last ones.

    Raises:
        ConfigError: beams, guidance, watermarks, constraints and whatever else is not done.
        RequestError: a prompt that cannot be served, a processor that fails.
        ModelError, DraftError, ExactnessError: as `LLM`.
    """
    processors, criteria = list(logits_processor or ()), list(stopping_criteria or ())
    check_config(generation_config, processors, criteria, len(input_ids))
    prompts = read_prompts(input_ids, model_kwargs)
    resolved = SpecConfig.resolve(spec, SpecConfig())
    most = generation_config.max_length - input_ids.shape[1]
    if most < 1:
        raise RequestError(
            f"max_length={generation_config.max_length} leaves nothing behind {input_ids.shape[1]} tokens"
        )
    longest = max(map(len, prompts.tokens)) + most
    positions = Source.from_model(model).max_positions
    if longest > positions:
        raise RequestError(
            f"{longest - most} tokens of prompt and {most} new ones, but the model has {positions} positions; lower "
            "max_new_tokens"
        )
    began = time.time()
    llm = engine_for(model, _sources(drafts), resolved, exact, len(input_ids), longest, positions)
    if torch.is_autocast_enabled(llm.config.device.type):
        _say_no_autocast(llm.config.dtype)
    stopping = type(stopping_criteria)(started_later(criteria, time.time() - began))
    llm.check_sources(resolved)
    decoder = llm.engine.runner.target
    least, largest = int(input_ids.min()), int(input_ids.max())
    if not 0 <= least <= largest < decoder.vocab_size:
        raise RequestError(f"input_ids from {least} to {largest}; valid: 0 to {decoder.vocab_size - 1}")
    seed = int(torch.randint(_MAX_SEED, (1,), device="cpu")) if generation_config.do_sample else 0
    rows = [
        make_row(
            tokens, row, generation_config, type(logits_processor)(processors_of_row(processors, row)),
            stopping, input_ids[row, :pad], most, resolved, seed, decoder.vocab_size, decoder.device,
        )
        for row, (tokens, pad) in enumerate(zip(prompts.tokens, prompts.padding, strict=True))
    ]  # fmt: skip
    streamer = _Streamer(token_streamer, prompts, rows, generation_config)
    for row in llm._run(rows):
        if row.error is not None:
            raise row.exception
        with llm.between_rounds():
            due = streamer.due()
        streamer.put(due)
    streamer.end()
    return _output(prompts, rows, generation_config)


@functools.cache
def _say_no_autocast(dtype: torch.dtype) -> None:
    """Once a dtype: an evaluation calls for every batch."""
    logger.warning("torch.autocast changes nothing in treespec.hf.generate: the model computes in %s, as it is", dtype)


def _sources(drafts: Sequence[Any] | None) -> list[Any]:
    """The drafts that are models or drafters; "lookup" names what is on by itself."""
    if drafts is None:
        return []
    if isinstance(drafts, str) or not isinstance(drafts, Sequence):
        raise ConfigError(f"drafts={drafts!r}; valid: a list of folders, hub ids, models, Drafter objects or 'lookup'")
    return [draft for draft in drafts if not (isinstance(draft, str) and draft == "lookup")]


def _pad_token(config: Any) -> int:
    pad = config._pad_token_tensor
    return 0 if pad is None else int(pad.reshape(-1)[0])


class _Streamer:
    """Hands tokens to a streamer as transformers' loop does: the prompt, then one step of all rows at a time."""

    def __init__(self, streamer: Any, prompts: Prompts, rows: Sequence[Row], config: Any):
        if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
            raise ConfigError(f"token_streamer={streamer!r}; valid: an object with put and end")
        self._streamer, self._rows, self._pad, self._steps = streamer, rows, _pad_token(config), 0
        if streamer is not None:
            streamer.put(prompts.input_ids.cpu())

    def due(self) -> list[list[int]]:
        """The steps that every row has come to, or has ended before, and that were not handed out."""
        found: list[list[int]] = []
        while True:
            step = self._steps
            open_rows = [row for row in self._rows if row.ended is None]
            if any(row.num_generated <= step for row in open_rows) or all(
                row.num_generated <= step for row in self._rows
            ):
                return found
            tokens = [row.output_token_ids[step] if step < row.num_generated else self._pad for row in self._rows]
            found.append(tokens)
            self._steps += 1

    def put(self, steps: list[list[int]]) -> None:
        """Hand out tokens of each step, of every row one."""
        for tokens in steps if self._streamer is not None else ():
            self._streamer.put(torch.tensor(tokens, dtype=torch.int64, device="cpu"))

    def end(self) -> None:
        if self._streamer is not None:
            self.put(self.due())
            self._streamer.end()


def _output(prompts: Prompts, rows: Sequence[Row], config: Any) -> Any:
    """What transformers' own loop returns."""
    steps, pad = max(row.num_generated for row in rows), _pad_token(config)
    new = [row.output_token_ids + [pad] * (steps - row.num_generated) for row in rows]
    ids = prompts.input_ids
    sequences = torch.cat((ids, torch.tensor(new, dtype=ids.dtype, device=ids.device)), 1)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    def gathered(which: int) -> tuple[Tensor, ...]:
        """[rows, vocab] of every step; a row that has ended keeps its last."""
        found = [row.recorded() for row in rows]
        return tuple(torch.stack([own[min(step, len(own) - 1)][which] for own in found]) for step in range(steps))

    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=gathered(1) if config.output_scores else None,
        logits=gathered(0) if config.output_logits else None,
    )
