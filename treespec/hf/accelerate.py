"""Installation of treespec as a model's `generate` method, and its removal."""

import copy
import inspect
import logging
from collections.abc import Sequence
from typing import Any

from torch import nn

from treespec.adapter.source import Source, check_inputs
from treespec.config.configs import SpecConfig
from treespec.errors import ConfigError
from treespec.hf.checks import check_drafts
from treespec.hf.generate import generate
from treespec.hf.rows import EndingStreamer

logger = logging.getLogger("treespec")

# Draft sizes of assisted generation. They change no tokens, and the planner chooses its own sizes.
_HINTS = """num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind
    target_lookbehind""".split()


def accelerate(
    model: Any, drafts: Sequence[Any] | None = None, spec: SpecConfig | str | None = None, exact: bool = True
) -> Any:
    """Make a model's `generate` (also in pipelines) decode with token trees, until `restore(model)`.

    Arguments and results are those of transformers' `generate`: greedy decoding returns the same tokens, except where
    rounding decides between close logits (frequent in 16 bits), and sampling has the same distribution. `streamer=` is
    supported and ended even on errors, `assistant_model=` becomes another draft, and `tokenizer=` is used for
    `stop_strings=` and, with `assistant_tokenizer=`, to connect the two vocabularies. Other features such as beam
    search raise an error. Calls may override `drafts=`, `spec=` and `exact=`; calls with another `custom_generate=` go
    to transformers.

    Args:
        model: a `PreTrainedModel` in eval mode. Weights and code are not modified; `generate` is set on this instance.
        drafts, spec, exact: as in `treespec.hf.generate`.

    Returns:
        The model.

    Raises:
        ConfigError: invalid drafts or spec, or `generate` was already replaced by other code.
        ModelError: an unsupported model; the full check happens at the first call.
    """
    Source.from_model(model)
    check_inputs(model)
    check_drafts(drafts)
    SpecConfig.resolve(spec, SpecConfig())
    replaced = model.__dict__.get("generate")
    if replaced is not None and not isinstance(replaced, _Generate):
        raise ConfigError(f"model.generate was replaced by {replaced!r}; delete that attribute first")
    # an instance attribute takes precedence over the class's method
    model.__dict__["generate"] = _Generate(model, drafts, spec, exact)
    return model


def restore(model: nn.Module) -> Any:
    """Undo `accelerate`; no effect on other models. Returns the model."""
    if isinstance(model.__dict__.get("generate"), _Generate):
        del model.__dict__["generate"]
    return model


class _Generate:
    """Callable that replaces a model's `generate`."""

    def __init__(self, model: nn.Module, drafts: Sequence[Any] | None, spec: SpecConfig | str | None, exact: bool):
        self._model = model
        self._options: dict[str, Any] = {"drafts": drafts, "spec": spec, "exact": exact}

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(type(self._model).generate)  # type: ignore[attr-defined]
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Generate":
        """Bind the copy to the copied model, with the same drafts."""
        copied = copy.copy(self)
        copied._model = copy.deepcopy(self._model, memo)
        return copied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, method = self._model, type(self._model).generate  # type: ignore[attr-defined]
        positional = list(inspect.signature(method).parameters)[1:]
        arguments = dict(zip(positional, args, strict=False)) | kwargs
        if len(args) > len(positional) or arguments.keys() & set(positional[: len(args)]) & kwargs.keys():
            return method(model, *args, **kwargs)  # raises transformers' TypeError
        custom = arguments.pop("custom_generate", None)
        if custom is not None and custom is not generate:
            logger.info("generate(custom_generate=%r): handled by transformers, without treespec", custom)
            return method(model, *args, **kwargs)
        streamer = arguments.pop("streamer", None)
        if streamer is None:
            streamer = arguments.pop("token_streamer", None)
        with EndingStreamer("streamer", streamer) as ending:
            options = self._options | {name: arguments.pop(name) for name in self._options if name in arguments}
            options["drafts"] = self._drafts(options["drafts"], arguments)
            if any(isinstance(draft, tuple) for draft in options["drafts"] or ()):
                arguments.setdefault("target_tokenizer", arguments.get("tokenizer"))
            _announce_hints(arguments)
            _check_unsupported(arguments)
            self._read_stop_strings(arguments)
            return method(model, custom_generate=generate, token_streamer=ending, **options, **arguments)

    def _drafts(self, drafts: Sequence[Any] | None, arguments: dict[str, Any]) -> list[Any] | None:
        """Return the drafts of a call, including its assistant model."""
        check_drafts(drafts)
        assistant, tokenizer = arguments.pop("assistant_model", None), arguments.pop("assistant_tokenizer", None)
        if assistant is None:
            return None if drafts is None else list(drafts)
        other_drafts = [draft for draft in drafts or () if draft is not assistant]
        return [*other_drafts, assistant if tokenizer is None else (assistant, tokenizer)]

    def _read_stop_strings(self, arguments: dict[str, Any]) -> None:
        """Convert `stop_strings` and `tokenizer`, which custom loops do not receive, to a stopping criterion."""
        tokenizer, config = arguments.pop("tokenizer", None), arguments.get("generation_config")
        strings = arguments.pop("stop_strings", None)
        default = getattr(self._model, "generation_config", None)
        if strings is None and config is not None:
            strings = config.stop_strings
        if default is not None and default.stop_strings is not None:
            setting = f"model.generation_config.stop_strings={default.stop_strings!r}"
            raise ConfigError(f"{setting}; set it to None there, and pass stop_strings= and tokenizer= to the call")
        if strings is None:
            return
        if tokenizer is None:
            raise ConfigError(f"stop_strings={strings!r} needs the model's tokenizer: generate(..., tokenizer=...)")
        from transformers import StoppingCriteriaList, StopStringCriteria

        if config is not None and config.stop_strings is not None:
            arguments["generation_config"] = config = copy.deepcopy(config)
            config.stop_strings = None
        criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)
        arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or ()), criterion])


def _announce_hints(arguments: dict[str, Any]) -> None:
    """Drop arguments that change no token, and log them."""
    hints = {name: arguments.pop(name) for name in _HINTS if arguments.get(name) is not None}
    if hints:
        hints_text = ", ".join(f"{name}={value!r}" for name, value in hints.items())
        logger.info("generate(%s): no effect; the planner chooses the draft sizes", hints_text)


def _check_unsupported(arguments: dict[str, Any]) -> None:
    """Reject arguments that transformers would not pass to `treespec.hf.generate`."""
    if arguments.pop("synced_gpus", None):
        raise ConfigError("synced_gpus=True: treespec runs a model on one GPU; omit it")
    config = arguments.get("generation_config")
    if arguments.get("token_healing") or getattr(config, "token_healing", False):
        raise ConfigError("token_healing=True changes the prompt; omit it")
    if arguments.get("cache_implementation") == "paged":
        raise ConfigError("cache_implementation='paged' is transformers' continuous batching; omit it")
