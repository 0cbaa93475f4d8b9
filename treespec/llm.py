"""LLM: the Python API, with the names of vLLM's offline API."""

import inspect
import os
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from tqdm import tqdm  # type: ignore[import-untyped]

from treespec.adapter.trace import AdapterConfig
from treespec.config.configs import SpecConfig
from treespec.config.engine_options import EngineOptions
from treespec.config.vllm_options import CALLS, MISSING_METHODS, CallOptions, check_absent
from treespec.engine.round_record import ObserverHandle, RoundObserver
from treespec.errors import ConfigError, UnsupportedError, reject_unknown, short_repr
from treespec.frontend.engine_args import EngineArgs
from treespec.frontend.generation_defaults import params_of, stated_params
from treespec.frontend.requests import Prompt, RequestFactory, UnreadSamples, as_list, log_rejected
from treespec.frontend.round_loop import RoundLoop
from treespec.frontend.vllm_metrics import Metric, as_metrics
from treespec.lora import Lora, LoRARequest
from treespec.outputs import RequestOutput, StreamChunk
from treespec.request import Request
from treespec.sampling.grammar import Grammars
from treespec.sampling.sampler import SEED_BITS, new_seed
from treespec.sampling_params import SamplingParams
from treespec.startup.build import build
from treespec.startup.options import resolve_device
from treespec.text.chat import ChatOptions, Message, conversations, streamed
from treespec.text.prompt_tokenizer import Tokenization, UserTokenizer, check_sentencepiece, load_tokenizer
from treespec.utils.options import built_from
from treespec.utils.scalars import to_python
from treespec.utils.torch_state import on_device, own_passes
from treespec_weights.documents import read_generation_config


class LLM:
    """A target model with its drafts: treespec's engine behind vLLM's offline API.

    Any number of threads may call `generate`, `chat`, `stream`, `abort` and `stats`. Rounds run one at a time and serve
    the requests of all threads; no token depends on which requests share a round. A round that raises ends all running
    requests with an error, and Ctrl-C aborts them. Passes compute in the model's dtype even under `torch.autocast`.

    The arguments are the fields of `EngineOptions`. vLLM's other names are among them: hints that change no token are
    ignored with a log line, others raise an error that names the alternative (docs/vllm.md).

    Attributes:
        end_token_ids: tokens of the model and its tokenizer that end outputs.

    Raises:
        ConfigError, ModelError, DraftError, CheckpointError, ExactnessError, KernelError: subclasses of ValueError.
        OSError: a folder does not exist.
    """

    @built_from(EngineOptions)
    def __init__(self, options: EngineOptions) -> None:
        options = options.translated()
        self.spec = SpecConfig.resolve(options.spec, SpecConfig())
        device = resolve_device(options.device)
        stated = stated_params(options.generation_config)
        tokenizer = None if options.tokenizer is None else UserTokenizer(load_tokenizer(options.tokenizer, ""))
        if tokenizer is None and isinstance(options.model, str | os.PathLike):
            check_sentencepiece(options.model)  # checked before the weights are loaded
        with own_passes(device), on_device(device):
            self._built = build(options)
        self._options: EngineOptions | None = options  # keeps models in memory alive; the engine holds no reference
        self.engine, self.config, self.loras = self._built.engine, self._built.config, self._built.loras
        # Shared by `AsyncLLM`, `LLMEngine`, the server and the transformers integration.
        self.rounds = RoundLoop(self.engine, self.config)
        target, logits_device = self._built.target, self.engine.runner.target.device
        if stated is None:
            in_memory = target.source.generation if isinstance(target, AdapterConfig) else None
            stated = params_of(read_generation_config(target.folder) if in_memory is None else in_memory, target.folder)
        self._default_params = stated
        if tokenizer is None and (stored := load_tokenizer(None, target.folder)) is not None:
            tokenizer = UserTokenizer(stored)
        self._tokenizer = None if tokenizer is None else tokenizer.base
        vocab_size, seed = target.shape.vocab_size, options.seed
        tokenizer_ends = () if tokenizer is None else tokenizer.eos_token_ids
        self.end_token_ids = ends = tuple(dict.fromkeys((*target.eos_token_ids, *tokenizer_ends)))
        self.request_factory = RequestFactory(
            tokenizer,
            vocab_size,
            ends,
            self.config.max_model_len,
            target.max_positions,
            logits_device,
            Grammars(self._tokenizer, vocab_size, ends, logits_device),
            kernel_noise=self.config.linear == "triton",
            library=self.engine.runner.target.growth,
            draw_seed=new_seed if seed is None else partial(random.Random(seed).getrandbits, SEED_BITS),
        )

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Build an engine from its arguments."""
        return cls(**{option.name: getattr(engine_args, option.name) for option in fields(engine_args)})

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Raise an error that names the alternative to a missing method of vLLM."""
            if name in MISSING_METHODS:
                raise UnsupportedError(f"LLM.{name} is not supported; {MISSING_METHODS[name]}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        spec: SpecConfig | str | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **vllm_options: Unpack[CallOptions],
    ) -> list[RequestOutput]:
        """Generate for every prompt; return the outputs in the order of the prompts.

        Args:
            prompts: a string, token ids (a list, an array or a tensor), {"prompt": text} or {"prompt_token_ids": ids},
                with an optional "prompt" for the record; or a list of these.
            sampling_params: one for all prompts, or a list; None uses `get_default_sampling_params()`.
            spec: overrides the engine's options for this call; "off" disables speculation.
            use_tqdm: show a progress bar of finished outputs; a callable replaces `tqdm.tqdm`.
            priority: lower values are served first, with `LLM(scheduling_policy="priority")`; one for all prompts, or a
                list.
            tokenization_kwargs: `truncate_prompt_tokens` is the number of last prompt tokens to keep, -1 for as many as
                fit into the context. `add_special_tokens` adds the tokenizer's special tokens to a text; truncation
                keeps them. `max_output_tokens` is the number of tokens that must fit after the prompt; without it, an
                output ends where the context does.
            lora_request: the adapter of all prompts, with `LLM(enable_lora=True)`, or a list of one or None per prompt.

        Raises:
            ConfigError: an unknown keyword, an unsupported vLLM keyword, or parameters of another type.
            RequestError, DraftError: all requests failed. If some succeed, the failed ones are returned with
                finish_reason "error" and `error`.
        """
        refuse_unknown(LLM.generate, vllm_options)
        return self._generate(
            as_list(prompts), use_tqdm, sampling_params, spec, tokenization_kwargs, priority, lora_request
        )

    def _generate(self, prompts: list[Any], use_tqdm: Any, *arguments: Any) -> list[RequestOutput]:
        """Generate for texts, token ids or conversations, with the arguments of `new_requests`."""
        if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
            raise ConfigError(f"use_tqdm={short_repr(use_tqdm)}; valid: True, False, or a replacement for tqdm.tqdm")
        with self.between_rounds():
            by_prompt = new_requests(self, prompts, *arguments)
            requests = [request for samples in by_prompt for request in samples]
            for request in requests:
                if request.finished:  # rejected
                    self.engine.stats.add_finished(request)
        valid = [request for request in requests if not request.finished]
        log_rejected(prompts, by_prompt)
        make_bar = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
        with make_bar(total=len(valid), desc="outputs") as bar:
            for _ in self.rounds.run(valid, only_finished=True):
                bar.update(1)
        with self.between_rounds():
            outputs = [self.request_factory.output(samples) for samples in by_prompt]
        if requests and all(request.finish_reason == "error" for request in requests):
            requests[0].raise_error()
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        spec: SpecConfig | str | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **vllm_options: Unpack[CallOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or several: apply the chat template, then `generate`.

        Args:
            messages: a list of {"role": ..., "content": ...}, or a list of such lists. As in OpenAI's API, a content
                may be a list of {"type": "text", "text": ...}, and the arguments of a tool call may be JSON text.
            sampling_params, spec, use_tqdm, priority, tokenization_kwargs, lora_request: as in `generate`.
            chat_template: replaces the tokenizer's (Jinja, as in transformers).
            add_generation_prompt: append the start of the assistant's answer.
            continue_final_message: continue the last message, which must be the assistant's; requires
                add_generation_prompt=False.
            tools: JSON schemas of functions, for the template.
            chat_template_kwargs: additional variables for the template, such as enable_thinking.

        Raises:
            ConfigError: an unknown keyword, no tokenizer or no template. RequestError: as in `generate`.
        """
        refuse_unknown(LLM.chat, vllm_options)
        options = ChatOptions(chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        prompts: list[Any] = [*conversations(self._tokenizer, messages, options)]
        return self._generate(prompts, use_tqdm, sampling_params, spec, tokenization_kwargs, priority, lora_request)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        spec: SpecConfig | str | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
        **vllm_options: Unpack[CallOptions],
    ) -> Generator[StreamChunk, None, None]:
        """Generate for one prompt or conversation and yield each round's new output. Leaving the loop ends the request.

        The texts of all chunks concatenate to the final text: incomplete characters and possible beginnings of stop
        strings are held back.

        Args:
            prompt: a prompt of `generate`, or the messages of a conversation, as in `chat`.
            sampling_params, spec, priority, tokenization_kwargs, lora_request: as in `generate`.
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs: as in `chat`,
                for a conversation.

        Raises:
            ConfigError: an unknown keyword, several prompts or conversations, or a conversation that `chat` rejects.
            RequestError: the request is invalid, or fails later.
        """
        refuse_unknown(LLM.stream, vllm_options)
        options = ChatOptions(chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        prompt = streamed(self._tokenizer, prompt, options)
        with self.between_rounds():
            samples = new_request(self, prompt, sampling_params, spec, tokenization_kwargs, priority, lora_request)
        unread = UnreadSamples(samples)
        for request in self.rounds.run(samples):
            if request not in unread:
                continue  # another thread's round ended it before its last chunk
            with self.rounds.turn():  # so that tokens and text are of the same round
                _, tokens, text = unread.take(request)
                # Several samples may end in one round; only the last chunk has the complete output.
                final = None if unread else self.request_factory.output(samples)
                chunk = StreamChunk(request.output_id, text, tokens, request.finish_reason, final, request.sample)
            if tokens or text or request not in unread:
                yield chunk

    def abort(self, request_id: str) -> None:
        """End a request, immediately or after the running round, from any thread. Unknown ids are ignored."""
        with self.between_rounds():
            self.rounds.end(self.engine.scheduler.find(request_id))

    def reset_suffix_cache(self) -> None:
        """Discard all earlier outputs from the sources "suffix" and "table"."""
        with self.between_rounds():
            scheduler = self.engine.scheduler
            preempted = [request for request in scheduler.waiting if request.num_preemptions]
            for source in self.engine.sources.others:
                source.forget([*scheduler.running, *preempted])

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, or None."""
        return self._tokenizer

    @property
    def model_path(self) -> Path:
        """The target's folder or GGUF file; for a model in memory, the folder that it names."""
        return self._built.target.folder

    @property
    def draft_names(self) -> tuple[str, ...]:
        """Names of the drafts for `SpecConfig.sources`, models first."""
        models = self._built.connections
        others = [source.name for source in self.engine.sources.others if source.name != "lookup"]
        return (*models, *(name for name in others if name not in models))

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the sampling parameters used for calls without any."""
        return self._default_params.clone()

    def stats(self) -> dict[str, Any]:
        """Return totals since the start, and under "frozen" the settings that determine bits."""
        with self.between_rounds():
            return self._built.stats()

    def get_metrics(self) -> list[Metric]:
        """Return the totals of `stats` as vLLM's metrics."""
        return as_metrics(self.engine)

    def check_sources(self, spec: SpecConfig) -> None:
        """Raise ConfigError if `spec.sources` names a source that this engine lacks."""
        models = tuple(self._built.connections)
        spec.check_sources(models, self._built.memory["suffix"] > 0, self.draft_names[len(models) :])

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Discard all cached prefixes; running requests keep theirs. Arguments and result are as in vLLM."""
        with self.between_rounds():
            if (prefixes := self.engine.cache.prefixes) is not None:
                prefixes.clear()
        return True

    def add_round_observer(self, observer: RoundObserver) -> ObserverHandle:
        """Call `observer(record)` with a `RoundRecord` for every request of every round.

        The call happens in the thread that runs the round, after the round's tokens are added and before the request
        ends. An observer that raises is removed and its traceback logged; requests are not affected.

        Returns:
            A handle: `handle.remove()` removes the observer, as does leaving `with llm.add_round_observer(...):`.

        Raises:
            ConfigError: the observer is not callable.
        """
        return self.engine.observers.add(observer)

    def between_rounds(self) -> AbstractContextManager[Any]:
        """Return a context in which no other thread runs a round or changes requests, and all counters are current."""
        return self.rounds.between()

    def release_models(self) -> None:
        """Drop the references to models in memory. Their owner keeps them alive; generating afterwards is an error."""
        self._options = None


def new_requests(
    llm: LLM,
    prompts: Sequence[Any],
    params: Any,
    spec: SpecConfig | str | dict[str, Any] | None,
    tokenization_kwargs: Mapping[str, Any] | None,
    priority: int | Sequence[int] | None,
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    *,
    stream: bool = False,
) -> list[list[Request]]:
    """Return each prompt's samples or, if it is invalid, a finished request with the error.

    Updates no counters, so that a thread may call it while another one runs a round.
    """
    params = llm._default_params if params is None else params
    if not isinstance(params, Sequence):
        params = [params] * len(prompts)
    if len(params) != len(prompts):
        raise ConfigError(f"{len(params)} sampling_params for {len(prompts)} prompts; pass one, or one per prompt")
    if wrong := [value for value in params if not isinstance(value, SamplingParams)]:
        raise ConfigError(f"sampling_params={wrong[0]!r}; valid: a SamplingParams, or a list of them")
    priority = to_python(0 if priority is None else priority)
    priorities = priority if isinstance(priority, Sequence) else [priority] * len(prompts)
    if len(priorities) != len(prompts) or not all(type(value) is int for value in priorities):
        raise ConfigError(
            f"priority={short_repr(priority)} for {len(prompts)} prompts; valid: an int, or a list with one per prompt"
        )
    if any(priorities) and llm.config.scheduling_policy != "priority":
        raise ConfigError(f'priority={short_repr(priority)} requires LLM(scheduling_policy="priority")')
    snapshots = {key: value.snapshot() for key, value in {id(value): value for value in params}.items()}
    resolved = SpecConfig.resolve(spec, llm.spec)
    llm.check_sources(resolved)
    slots = min(llm.config.max_tree_slots, llm.engine.runner.max_rows or llm.config.max_tree_slots)
    if resolved.max_nodes > slots:
        raise ConfigError(
            f"a tree of {resolved.max_nodes} nodes, but this engine keeps {slots} slots for one; pass the larger "
            "SpecConfig to LLM"
        )
    tokenization = Tokenization.resolve(tokenization_kwargs, llm.config.max_model_len)
    loras = _loras(llm, lora_request, len(prompts))
    by_prompt = [
        llm.request_factory.requests(prompt, snapshots[id(original)], resolved, stream, tokenization)
        for prompt, original in zip(prompts, params, strict=True)
    ]
    for samples, value, lora in zip(by_prompt, priorities, loras, strict=True):
        for sample in samples:
            sample.priority, sample.lora = value, lora
    return by_prompt


def new_request(llm: LLM, prompt: Any, *arguments: Any) -> list[Request]:
    """Return the samples of a prompt whose output is streamed; call it between rounds. Raises RequestError."""
    (samples,) = new_requests(llm, [prompt], *arguments, stream=True)
    if samples[0].finished:
        llm.engine.stats.add_finished(samples[0])
        samples[0].raise_error()
    return samples


def _loras(llm: LLM, asked: Any, count: int) -> list[Lora | None]:
    """Return the adapter of each of `count` prompts."""
    requests = [*asked] if isinstance(asked, Sequence) else [asked] * count
    if len(requests) != count or not all(isinstance(request, LoRARequest | None) for request in requests):
        raise ConfigError(
            f"lora_request={short_repr(asked)} for {count} prompts; valid: a LoRARequest, or a list of one, or None, "
            "for each"
        )
    if llm.loras is None and any(requests):
        raise ConfigError(f"lora_request={short_repr(asked)} requires LLM(enable_lora=True)")
    return [None if request is None or llm.loras is None else llm.loras.get(request) for request in requests]


def refuse_unknown(method: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Handle additional keywords of a method: vLLM's options, or unknown ones, suggesting the closest valid name."""
    check_absent(method.__name__, options, CALLS)
    reject_unknown(method.__name__, options.keys() - CALLS.keys(), list(inspect.signature(method).parameters)[1:-1])
