"""LLM: the Python API, with the names of vLLM's offline one."""

import inspect
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Unpack

import torch
from torch import nn

from treespec.adapter.trace import AdapterConfig
from treespec.config import SpecConfig
from treespec.drafters.calls import is_from_outside
from treespec.errors import ConfigError, RequestError, reject_unknown, show
from treespec.frontend.engine_args import translate_options
from treespec.frontend.generation_defaults import check_generation_config, default_sampling_params
from treespec.frontend.progress import Progress
from treespec.frontend.requests import Prompt, RequestFactory, as_list, log_refused, no_text
from treespec.frontend.round_loop import RoundLoop
from treespec.frontend.vllm_methods import VllmMethods
from treespec.frontend.vllm_options import CALLS, ENGINE, CallOptions, VllmEngineOptions, without_absent
from treespec.outputs import RequestOutput, StreamChunk
from treespec.request import Request
from treespec.round_record import ObserverHandle, RoundObserver
from treespec.sampling.grammar import Grammars
from treespec.sampling.param_values import checked
from treespec.sampling.sampler import SEED_BITS, new_seed
from treespec.sampling_params import SamplingParams
from treespec.scalars import plain
from treespec.startup.assemble import build
from treespec.startup.device import resolve_device
from treespec.startup.engine_options import EngineOptions
from treespec.startup.torch_state import on_device, own_passes
from treespec.text.chat import Message, conversations, streamed
from treespec.text.prompt_tokenizer import Tokenization, UserTokenizer, check_sentencepiece, load_tokenizer


class LLM(VllmMethods):
    """A target with its drafts, ready to generate.

    Any number of threads may call `generate`, `chat`, `stream`, `abort` and `stats`. One round of the engine runs at a
    time, for the requests of all of them, and no token depends on that; a call that fails in the middle of a round ends
    the others' running requests with an error, and Ctrl-C there aborts them. `torch.autocast` changes nothing: passes
    compute in the model's dtype.

    Args:
        model: a Hugging Face folder or hub id, or a transformers model in memory; None is the embedded target.
        drafts: folders, hub ids, transformers models or `Drafter` objects. None means the embedded SSMs with the
            embedded target, and none with any other; [] means none. A draft may have another tokenizer than the model:
            its guesses are then translated, or it writes text; `stats()` says how each is connected.
        spec: how to speculate; calls may override it.
        tokenizer: a folder, or an object with `encode(text)` and `decode(ids)`, such as transformers' and tokenizers'
            have; None is the model folder's own. Without one, prompts and outputs are token ids and `text` is None.
            Its `eos_token_id` ends an output as the model's own end tokens do.
        device: "auto" (this thread's GPU where there is one), "cpu", "cuda", or one of several, such as "cuda:1".
        dtype: "auto" (the checkpoint's; float32 on a CPU without bf16 instructions), a name ("half" and "float" are
            float16 and float32), or a torch dtype.
        exact: refuse to run where trees would not have the bits of plain decoding. False lets a GPU take the vendor's
            matrix products, and trees masked by bits.
        max_num_seqs: requests decoded at once.
        max_model_len: positions of the longest request; None = the smaller of the model's and what half of the free
            memory holds for `max_num_seqs` requests.
        attention: an implementation of tree attention by name ("cpu-packed", "cpu-gathered", "triton"); "auto" picks.
        prefill_chunk: prompt rows computed in one step.
        linear: an implementation of linear layers by name ("onednn", "torch", "triton"); "auto" picks.
        cuda_graphs: run rounds on a GPU from captured graphs; False launches every kernel by itself.
        compile: run passes on a CPU through code that this machine's C++ compiler builds at the first use (seconds) and
            that is kept in the user's cache folder, under the same proof as the rest. "auto" does so where it can:
            float32 and bfloat16, `attention` and `linear` at "auto", a compiler, a family that it covers; the log says
            why not. True refuses to go without.
        generation_config: where the parameters of a call without any come from: "auto" (the model's
            generation_config.json, or what a model in memory has), "treespec" (the defaults of `SamplingParams`),
            "vllm" (vLLM's: temperature 1, 16 tokens), or a folder.
        backend: "native" is treespec's own decoder; "transformers" runs transformers' own code of any architecture
            whose attention can be replaced, slower; "auto" takes it, for each model, where no native family fits.
        quantization: "int8" (a scale for every output) or "int4" (one for 128, 64 or 32 inputs) quantises the weights
            of the target's layers while loading; activations, embedding, norms and head stay as they are. None keeps
            the checkpoint's own: quantised ones (compressed-tensors, GPTQ, AWQ, fp8) are read as they are.
            The name of the checkpoint's own method means the same as None.
        suffix_tokens: how many tokens are remembered, of outputs and the last ones of their prompts, up to the next
            power of two, 64 bytes each (several hundred without a C++ compiler): what was written once is then guessed
            where another request seems to write it again (the source "suffix"). 0: none, as a prompt that is decoded a
            second time would otherwise say nothing of the speed of new ones. What others wrote changes no token (or,
            under "rejection" and "traversal", no token's probability), but how soon it comes.
        seed: of the seeds that sampled requests without one are given: the same calls in the same order then give the
            same tokens. None gives others in every engine.
        vllm_options: vLLM's other names. Hints that change no token are ignored with a line in the log, what cannot be
            served is refused with what to do instead; docs/vllm.md lists them.

    Raises:
        ConfigError, ModelError, DraftError, CheckpointError, ExactnessError, KernelError: all of them ValueErrors.
        OSError: a folder that is not there.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module | None = None,
        drafts: Sequence[Any] | None = None,
        spec: SpecConfig | str | None = None,
        tokenizer: Any = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        exact: bool = True,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        attention: str = "auto",
        prefill_chunk: int = 512,
        compile: bool | str = "auto",
        linear: str = "auto",
        cuda_graphs: bool = True,
        generation_config: str | os.PathLike[str] = "auto",
        backend: str = "auto",
        quantization: str | None = None,
        suffix_tokens: int = 0,
        seed: int | None = None,
        **vllm_options: Unpack[VllmEngineOptions],
    ):
        eager, speculation = vllm_options.pop("enforce_eager", None), vllm_options.pop("speculative_config", None)
        unknown = without_absent("LLM", vllm_options, ENGINE)
        reject_unknown("LLM", unknown, list(inspect.signature(LLM).parameters)[:-1])
        options = EngineOptions(
            model=model,
            drafts=drafts,
            spec=spec,
            device=device,
            dtype=dtype,
            exact=exact,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            attention=attention,
            prefill_chunk=prefill_chunk,
            compile=compile,
            linear=linear,
            cuda_graphs=cuda_graphs,
            backend=backend,
            quantization=quantization,
            suffix_tokens=suffix_tokens,
        )
        options = translate_options(options, eager, speculation)
        seed = checked("seed", plain(seed))
        self.spec = SpecConfig.resolve(spec, SpecConfig())
        where = resolve_device(device)
        check_generation_config(generation_config)
        spoken = None if tokenizer is None else UserTokenizer(load_tokenizer(tokenizer, ""))
        if tokenizer is None and isinstance(model, str | os.PathLike):
            check_sentencepiece(model)  # before the weights are loaded
        with own_passes(where), on_device(where):
            self._built = build(options)
        self._kept: Any = options  # keeps models in memory alive, which the engine itself does not
        self.engine, self.config = self._built.engine, self._built.config
        self._rounds = RoundLoop(self.engine, self.config)
        target = self._built.target
        given = target.source.generation if isinstance(target, AdapterConfig) else None
        self._default_params = default_sampling_params(generation_config, target.folder, given)
        if spoken is None and (found := load_tokenizer(None, target.folder)) is not None:
            spoken = UserTokenizer(found)
        self._tokenizer = None if spoken is None else spoken.own
        ends = (*target.eos_token_ids, *(() if spoken is None else spoken.eos_token_ids))
        vocab_size, device = target.shape.vocab_size, self.engine.runner.target.device
        ends = tuple(dict.fromkeys(ends))
        self._request_factory = RequestFactory(
            spoken,
            vocab_size,
            ends,
            self.config.max_model_len,
            target.max_positions,
            device,
            Grammars(self._tokenizer, vocab_size, ends, device),
            kernel_noise=self.config.linear == "triton",
            draw_seed=new_seed if seed is None else partial(random.Random(seed).getrandbits, SEED_BITS),
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        spec: SpecConfig | str | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **vllm_options: Unpack[CallOptions],
    ) -> list[RequestOutput]:
        """Generate for every prompt; results in the order of the prompts.

        Args:
            prompts: a string, token ids (a list, an array or a tensor), {"prompt": text} or {"prompt_token_ids": ids},
                where "prompt" may stand beside the ids for the record; or a list of such.
            sampling_params: for all prompts, or one each; None = `get_default_sampling_params()`.
            spec: overrides the engine's for this call; "off" is plain decoding.
            use_tqdm: show how many outputs are finished; a callable takes the place of `tqdm.tqdm`.
            tokenization_kwargs: `truncate_prompt_tokens`: use the last so many tokens of a prompt, -1 = as many as the
                context holds. `add_special_tokens`: whether a text gets the tokenizer's special tokens around it, which
                truncation then keeps.

        Raises:
            ConfigError: an unknown keyword, one of vLLM's that is not supported, or parameters of another kind.
            RequestError, DraftError: no request could be served. Where others of the batch could, the bad ones come
                back with finish_reason "error" and `error`.
        """
        refuse_unknown(LLM.generate, vllm_options)
        return self._generate(as_list(prompts), sampling_params, spec, use_tqdm, tokenization_kwargs)

    def _generate(
        self,
        prompts: list[Any],
        params: Any,
        spec: SpecConfig | str | None,
        use_tqdm: Any,
        tokenization: Mapping[str, Any] | None,
    ) -> list[RequestOutput]:
        """For each prompt, text, token ids or a conversation."""
        if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
            raise ConfigError(f"use_tqdm={show(use_tqdm)}; valid: True, False, or what takes the place of tqdm.tqdm")
        with self.between_rounds():
            entries = self._requests(prompts, params, spec, tokenization)
        log_refused(prompts, entries)
        requests = [request for entry in entries if isinstance(entry, list) for request in entry]
        with Progress(use_tqdm, len(requests)) as progress:
            for request in self._rounds.run(requests):
                progress.update(int(request.finished))
        with self.between_rounds():
            outputs = [self._request_factory.output(entry) if isinstance(entry, list) else entry for entry in entries]
        if outputs and all(one.finish_reason == "error" for output in outputs for one in output.outputs):
            raise next((r.exception for r in requests if r.failure is not None), RequestError(outputs[0].error))
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
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **vllm_options: Unpack[CallOptions],
    ) -> list[RequestOutput]:
        """Answer a conversation, or several: `generate` behind the tokenizer's chat template.

        Args:
            messages: a list of {"role": ..., "content": ...}, or a list of such lists. As in OpenAI's API a content may
                be a list of {"type": "text", "text": ...}, and the arguments of a tool call a JSON text.
            sampling_params, spec, use_tqdm, tokenization_kwargs: as of `generate`.
            chat_template: in place of the tokenizer's own (Jinja, as transformers has it).
            add_generation_prompt: begin the assistant's answer.
            continue_final_message: go on with the last message, which is the assistant's; needs
                add_generation_prompt=False.
            tools: functions that the template may describe, as JSON schemas.
            chat_template_kwargs: further variables of the template, such as enable_thinking.

        Raises:
            ConfigError: an unknown keyword, no tokenizer or no template. RequestError: as of `generate`.
        """
        refuse_unknown(LLM.chat, vllm_options)
        prompts = conversations(
            self._tokenizer,
            messages,
            chat_template,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
        )
        return self._generate(list(prompts), sampling_params, spec, use_tqdm, tokenization_kwargs)

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
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **vllm_options: Unpack[CallOptions],
    ) -> Iterator[StreamChunk]:
        """Generate for one prompt or one conversation and yield what each round added. Leaving the loop ends the
        request.

        The chunks' texts concatenate to the final text: partial characters and beginnings of stop strings are held
        back.

        Args:
            prompt: a prompt of `generate`, or the messages of a conversation as `chat` takes them.
            sampling_params, spec, tokenization_kwargs: as of `generate`.
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs: as of `chat`,
                for a conversation.

        Raises:
            ConfigError: an unknown keyword, several prompts or conversations, or a conversation that `chat` refuses.
            RequestError: before the first chunk, or where the request fails on the way.
        """
        refuse_unknown(LLM.stream, vllm_options)
        prompt = streamed(
            self._tokenizer,
            prompt,
            chat_template,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
        )
        with self.between_rounds():
            samples = self._requests([prompt], sampling_params, spec, tokenization_kwargs, stream=True)[0]
        if isinstance(samples, RequestOutput):
            raise RequestError(samples.error)
        emitted, open_samples = [0] * len(samples), set(samples)
        for request in self._rounds.run(samples):
            if request not in open_samples:
                continue  # another thread's round ended it before its last chunk was made
            with self.between_rounds():  # no round of another thread may come between tokens and text
                tokens = request.output_token_ids[emitted[request.sample] :]
                emitted[request.sample] += len(tokens)
                if request.error is not None:
                    raise request.exception
                if request.finished and request.detokenizer is not None:
                    request.detokenizer.flush()
                text = no_text(request.params)
                if request.detokenizer is not None:
                    text = request.detokenizer.release(request.finished)
                if request.finished:
                    open_samples.remove(request)
                # Several may end in one round, and only the last chunk has them all.
                final = None if open_samples else self._request_factory.output(samples)
                chunk = StreamChunk(request.output_id, text, tokens, request.finish_reason, final, request.sample)
            if tokens or text or request not in open_samples:
                yield chunk

    def abort(self, request_id: str) -> None:
        """End a request and free its slot, wherever it stands. An unknown or finished one is left alone.

        From any thread: between two rounds it ends at once, in the middle of one when that is over.
        """
        with self.between_rounds():
            self._rounds.end(self.engine.scheduler.find(request_id))

    def reset_suffix_cache(self) -> None:
        """Forget what was written so far: later outputs are drafted as if nothing had been."""
        with self.between_rounds():
            if self.engine.lookup is not None:
                self.engine.lookup.forget(self.engine.scheduler.running)

    def get_tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self._tokenizer

    @property
    def draft_names(self) -> tuple[str, ...]:
        """The drafts, models first, as `SpecConfig.sources` may name them."""
        own = (drafter.name for drafter in self.engine.drafters if is_from_outside(drafter))
        return (*self._built.connections, *own)

    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of what a call without parameters uses."""
        return self._default_params.clone()

    def stats(self) -> dict[str, Any]:
        """Totals since the start, and what is frozen for bit equality."""
        with self.between_rounds():
            return self._built.stats()

    def check_sources(self, spec: SpecConfig) -> None:
        """Raise ConfigError where `spec.sources` names a source that this engine lacks."""
        models = tuple(self._built.connections)
        spec.check_sources(models, self._built.memory["suffix"] > 0, self.draft_names[len(models) :])

    def add_round_observer(self, observer: RoundObserver) -> ObserverHandle:
        """Have `observer(record)` called with a `RoundRecord` for every request of every round, on every device.

        It is called in the thread that runs the round, after the round's tokens were added and before the request
        ends. Rounds on a GPU read their trees back for it, in one copy more; without an observer nothing is read. An
        observer that raises is removed, and the log says so with its traceback; requests are not affected.

        Returns:
            A handle: `handle.remove()` ends the calls, as does the end of `with llm.add_round_observer(...):`.

        Raises:
            ConfigError: the observer cannot be called.
        """
        return self.engine.observers.add(observer)

    def between_rounds(self) -> AbstractContextManager[Any]:
        """Within it no round runs in another thread, so requests stay as they are."""
        return self._rounds.lock

    def release_models(self) -> None:
        """Leave it to their owner to keep models in memory alive; generating after they have gone is an error."""
        self._kept = None

    def _requests(
        self,
        prompts: list[Any],
        params: Any,
        spec: SpecConfig | str | None,
        tokenization: Mapping[str, Any] | None,
        stream: bool = False,
    ) -> list[list[Request] | RequestOutput]:
        """By prompt: its samples, or, where it is bad, its finished output with the error."""
        if params is None:
            params = self._default_params
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ConfigError(f"{len(each)} sampling_params for {len(prompts)} prompts; give one, or one for each")
        for one in each:
            if not isinstance(one, SamplingParams):
                raise ConfigError(f"sampling_params={one!r}; valid: a SamplingParams, or a list of them")
        snapshots = {key: one.snapshot() for key, one in {id(one): one for one in each}.items()}
        each = [snapshots[id(one)] for one in each]
        resolved = SpecConfig.resolve(spec, self.spec)
        self.check_sources(resolved)
        slots = min(self.config.max_tree_slots, self.engine.runner.max_rows or self.config.max_tree_slots)
        if resolved.max_nodes > slots:
            raise ConfigError(
                f"a tree of {resolved.max_nodes} nodes, but this engine keeps {slots} slots for one; give the larger "
                "SpecConfig to LLM"
            )
        how, make = Tokenization.resolve(tokenization, self.config.max_model_len), self._request_factory.requests
        entries = [make(prompt, one, resolved, stream, how) for prompt, one in zip(prompts, each, strict=True)]
        self.engine.stats.add_refused(sum(isinstance(entry, RequestOutput) for entry in entries))
        return entries


def refuse_unknown(method: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Say what to do instead of vLLM's options that are not there, and name the nearest of a method's keywords."""
    given = without_absent(method.__name__, given, CALLS)
    reject_unknown(method.__name__, given, list(inspect.signature(method).parameters)[1:-1])
