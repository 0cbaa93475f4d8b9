"""The server's LoRA adapters, which requests choose by the name of their model."""

import asyncio
import itertools
from collections.abc import Iterator

from fastapi import HTTPException
from starlette.responses import PlainTextResponse, Response

from treespec.errors import ConfigError
from treespec.lora import LoraCache, LoRARequest
from treespec.serve.options import ServerOptions
from treespec.serve.protocol import LoadAdapterBody, UnloadAdapterBody
from treespec_weights.errors import CheckpointError


class Adapters:
    """Adapters by name, which clients load and unload if `allow_runtime_lora_updating` is set.

    Raises ConfigError and CheckpointError for `lora_modules` that cannot be loaded. `cache` is None without adapters.
    """

    def __init__(self, cache: LoraCache | None, options: ServerOptions):
        self._cache, self._options = cache, options
        self._numbers, self._updating = itertools.count(1), asyncio.Lock()
        self._by_name: dict[str, LoRARequest] = {}
        for name, path in options.loras().items():
            if cache is None:
                raise ConfigError(f"lora_modules={options.lora_modules!r} requires LLM(enable_lora=True)")
            self._by_name[name] = LoRARequest(name, next(self._numbers), path)
            cache.get(self._by_name[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def get(self, name: str | None) -> LoRARequest | None:
        return self._by_name.get(name or "")

    def has(self, lora: LoRARequest) -> bool:
        """Return whether an adapter's name still refers to it."""
        return self._by_name.get(lora.lora_name) is lora

    async def load(self, body: LoadAdapterBody) -> Response:
        """Load an adapter from its files, even if it is loaded already; running requests keep the old one."""
        name = body.lora_name
        lora = LoRARequest(name, next(self._numbers), body.lora_path)
        async with self._updating:
            cache = self._updatable()
            if name in self._options.served_model_name or (name in self._by_name and not body.load_inplace):
                raise ConfigError(f"lora_name={name!r} is taken; load_inplace=True replaces an adapter of this name")
            try:
                await asyncio.to_thread(cache.get, lora, fresh=True)
            except (CheckpointError, OSError) as error:
                raise ConfigError(f"lora_path={body.lora_path!r}: {error}") from error
            self._by_name[name] = lora
        return PlainTextResponse(f"loaded LoRA adapter {name!r}")

    async def unload(self, body: UnloadAdapterBody) -> Response:
        """Unload an adapter; running requests keep it."""
        async with self._updating:
            cache = self._updatable()
            if (lora := self._by_name.pop(body.lora_name, None)) is None:
                loaded = ", ".join(map(repr, self._by_name)) or "none"
                raise HTTPException(404, f"lora_name={body.lora_name[:100]!r}; loaded adapters: {loaded}")
            cache.forget(lora)
        return PlainTextResponse(f"unloaded LoRA adapter {body.lora_name!r}")

    def _updatable(self) -> LoraCache:
        if not self._options.allow_runtime_lora_updating or self._cache is None:
            raise HTTPException(403, "start the server with --allow-runtime-lora-updating")
        return self._cache
