"""Default sampling parameters from a model's generation_config.json."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treespec.errors import ConfigError, ModelError
from treespec.sampling_params import SamplingParams
from treespec_weights.documents import GENERATION_CONFIG, read_generation_config
from treespec_weights.files import resolve_folder

_NAMES = ("auto", "treespec", "vllm")
_VALID = f"{', '.join(map(repr, _NAMES))}, or a folder with a {GENERATION_CONFIG}"


def check_generation_config(generation_config: Any) -> None:
    """Check `generation_config` before the model is loaded. The model's own file is read later."""
    if not isinstance(generation_config, str | os.PathLike):
        raise ConfigError(f"generation_config={generation_config!r}; valid: {_VALID}")
    if generation_config not in _NAMES:
        default_sampling_params(generation_config, Path())


def default_sampling_params(
    generation_config: str | os.PathLike[str], folder: Path, in_memory: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Return the sampling parameters of calls that give none, as `EngineOptions.generation_config` describes.

    "auto" reads the file in the model's `folder`, or the generation config of a model in memory, `in_memory`.
    """
    if generation_config == "treespec":
        return SamplingParams()
    if generation_config == "vllm":
        return SamplingParams(temperature=1.0, max_tokens=16)
    if generation_config != "auto":
        folder, in_memory = resolve_folder(os.fspath(generation_config)), None
        if not (folder / GENERATION_CONFIG).is_file():
            raise ConfigError(
                f"generation_config={str(generation_config)!r} has no {GENERATION_CONFIG}; valid: {_VALID}"
            )
    try:
        return SamplingParams(**_options(read_generation_config(folder) if in_memory is None else in_memory))
    except ConfigError as error:
        raise ModelError(
            f"{folder / GENERATION_CONFIG}: {error}; correct it, or use generation_config='treespec'"
        ) from error


def _options(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `SamplingParams`.

    As in vLLM, a temperature without `do_sample` means sampling. With do_sample=true the defaults are transformers':
    temperature 1 and top_k 50.
    """
    options: dict[str, Any] = {}
    names, sampled = {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}, raw.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        raise ConfigError(f"do_sample={sampled!r}; valid: true or false")
    if sampled is True or (sampled is None and raw.get("temperature") is not None):
        options = {"temperature": 1.0} | ({"top_k": 50} if sampled else {})
        names |= {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
    options |= {option: raw[name] for name, option in names.items() if raw.get(name) is not None}
    for name in {"top_k", "max_tokens"} & options.keys():  # some tools write 50.0
        if isinstance(options[name], float) and options[name].is_integer():
            options[name] = int(options[name])
    return options
