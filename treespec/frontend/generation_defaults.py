"""Default sampling parameters from a model's generation_config.json."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treespec.errors import ConfigError, ModelError
from treespec.sampling_params import SamplingParams
from treespec_weights.documents import GENERATION_CONFIG, read_generation_config
from treespec_weights.files import resolve_folder

_NAMED = {"auto": None, "treespec": SamplingParams(), "vllm": SamplingParams(temperature=1.0, max_tokens=16)}
_VALID = f"{', '.join(map(repr, _NAMED))}, or a folder with a {GENERATION_CONFIG}"


def stated_params(generation_config: str | os.PathLike[str]) -> SamplingParams | None:
    """Return the sampling parameters of `generation_config`; None if it refers to the model's."""
    if not isinstance(generation_config, str | os.PathLike):
        raise ConfigError(f"generation_config={generation_config!r}; valid: {_VALID}")
    if generation_config in _NAMED:
        return _NAMED[str(generation_config)]
    folder = resolve_folder(os.fspath(generation_config))
    if not (folder / GENERATION_CONFIG).is_file():
        raise ConfigError(f"generation_config={str(generation_config)!r} has no {GENERATION_CONFIG}; valid: {_VALID}")
    return params_of(read_generation_config(folder), folder)


def params_of(raw: Mapping[str, Any], folder: Path) -> SamplingParams:
    """Return the sampling parameters of the generation config of the model in `folder`."""
    try:
        return SamplingParams(**_options(raw))
    except ConfigError as error:
        raise ModelError(
            f"{folder / GENERATION_CONFIG}: {error}; correct it, or use generation_config='treespec'"
        ) from error


def _options(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `SamplingParams`. As in vLLM, a temperature without `do_sample` enables sampling."""
    options: dict[str, Any] = {}
    names, sampled = {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}, raw.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        raise ConfigError(f"do_sample={sampled!r}; valid: true or false")
    if sampled is True or (sampled is None and raw.get("temperature") is not None):
        options = {"temperature": 1.0} | ({"top_k": 50} if sampled else {})  # defaults of transformers
        names |= {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
    options |= {option: raw[name] for name, option in names.items() if raw.get(name) is not None}
    for name in {"top_k", "max_tokens"} & options.keys():  # some tools write 50.0
        if isinstance(options[name], float) and options[name].is_integer():
            options[name] = int(options[name])
    return options
