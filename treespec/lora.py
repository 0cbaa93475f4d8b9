"""LoRA adapters of requests, loaded on first use."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from treespec.errors import ConfigError
from treespec.utils.options import rejects_unknown
from treespec.utils.scalars import as_int


@rejects_unknown
@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter that a request uses, with the fields of vLLM's class.

    Args:
        lora_name: the adapter's name.
        lora_int_id: a number of at least 1. Unlike in vLLM, adapters are told apart by their names and folders.
        lora_path: PEFT's folder: adapter_config.json and adapter_model.safetensors; or a hub id. Its files must not
            change while the engine has the adapter.

    Raises:
        ConfigError: an invalid value.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str | os.PathLike) or not os.fspath(value):
                raise ConfigError(f"{name}={value!r}; valid: a text that is not empty")
        if as_int(self.lora_int_id, 1) is None:
            raise ConfigError(f"lora_int_id={self.lora_int_id!r}; valid: an int of at least 1")


@dataclass(frozen=True, eq=False)
class Lora:
    """A loaded adapter."""

    digest: bytes  # hash of its files
    updates: Any  # result of `Decoder.updates`


_Key = tuple[str, str]  # name and path


class LoraCache:
    """Loads adapters, and keeps those of running and waiting requests, and the last few that were asked for.

    Each name keeps the weights that its folder held when it was loaded; names of equal files share memory.
    """

    def __init__(self, load: Callable[[str], Lora], num_kept: int):
        self._load, self._num_kept = load, num_kept
        self._in_use = WeakValueDictionary[_Key, Lora]()
        self._kept: dict[_Key, Lora] = {}  # the last one asked for at the end
        self._lock, self._loading = threading.Lock(), threading.Lock()

    def get(self, request: LoRARequest, fresh: bool = False) -> Lora:
        """Return an adapter; `fresh` reads its files again. Requests with a loaded adapter do not wait for loading.

        Raises the errors of `load_lora`, and ConfigError for a rank above `max_lora_rank`.
        """
        key = _key(request)
        lora = None if fresh else self._use(key)
        if lora is None:
            with self._loading:
                lora = None if fresh else self._use(key)
                if lora is None:
                    lora = self._use(key, self._load(os.path.expanduser(request.lora_path)))
        assert lora is not None
        return lora

    def forget(self, request: LoRARequest) -> None:
        """Drop an adapter from memory when its last request has ended."""
        with self._lock:
            self._kept.pop(_key(request), None)
            self._in_use.pop(_key(request), None)

    def _use(self, key: _Key, loaded: Lora | None = None) -> Lora | None:
        """Return the adapter of a key, which `loaded` replaces, and keep it as the last one that was asked for."""
        with self._lock:  # also while it is looked up, so that a replaced adapter is not put back
            lora = self._in_use.get(key)
            if loaded is not None:
                lora = next((other for other in self._in_use.values() if other.digest == loaded.digest), loaded)
            if lora is not None:
                self._in_use[key] = lora
                self._kept.pop(key, None)
                self._kept[key] = lora
                while len(self._kept) > self._num_kept:
                    del self._kept[next(iter(self._kept))]
        return lora

    @property
    def nbytes(self) -> int:
        return sum(lora.updates.nbytes for lora in {*self._in_use.values()})


def _key(request: LoRARequest) -> _Key:
    path = os.path.expanduser(request.lora_path)
    return request.lora_name, os.path.realpath(path) if Path(path).exists() else path
