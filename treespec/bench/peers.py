"""transformers baselines on the same weights, prompts and dtype: plain, assisted and prompt lookup."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from treespec.bench.measure import Sample
from treespec.bench.modes import Peer
from treespec.errors import ModelError
from treespec.models.head_vocabulary import HeadVocabulary
from treespec_weights import as_folder
from treespec_weights.draft_vocabulary import expand_embedding, read_draft_vocabulary

_TRIES = 5  # tries: a disturbed run to the first token may take longer than a short full run


class Transformers:
    """A target and its SSMs in transformers, run greedily, without end token, and with the K of a peer."""

    def __init__(self, target: Path, drafts: Mapping[str, Path], device: torch.device, dtype: torch.dtype):
        self.device = device
        self._target = _load(target, device, dtype)
        self._drafts = {name: self._load_draft(folder, device, dtype) for name, folder in drafts.items()}
        self._passes = 0
        self._target.register_forward_pre_hook(self._count)

    def run(self, peer: Peer, max_tokens: int, prompts: Sequence[list[int]], seeds: Sequence[int] = ()) -> Sample:
        """Decode prompts as one left-padded batch, without `seeds`. Prefill is timed as a run to one token."""
        assert len(prompts) == 1 or not peer.batch_one_only, f"{peer.name} supports batch 1 only"
        options, num_further = self._options(peer), max_tokens - 1
        for _ in range(_TRIES):
            first_token_seconds, _ = self.generate(prompts, 1, options)
            self._passes = 0
            total, outputs = self.generate(prompts, max_tokens, options)
            if any(len(tokens) != max_tokens for tokens in outputs):
                raise ModelError(f"{peer.name} generated {list(map(len, outputs))} tokens instead of {max_tokens} each")
            if (decode := total - first_token_seconds) > 0:
                break
        else:
            raise ModelError(f"{peer.name}: one token took longer than {max_tokens} in {_TRIES} runs; raise max_tokens")
        return Sample(
            tokens=outputs,
            decode_seconds=decode,
            decoded=num_further * len(outputs),
            total_seconds=total,
            ttft=[first_token_seconds] * len(outputs),
            per_token=[decode / num_further] * len(outputs),
            passes=[self._passes] * len(outputs),
            rounds=self._passes,
        )

    def generate(
        self, prompts: Sequence[list[int]], max_tokens: int, options: dict[str, Any]
    ) -> tuple[float, list[list[int]]]:
        """Generate from a left-padded batch; return the seconds, and each prompt's new tokens."""
        rows = [torch.tensor(prompt, dtype=torch.int64, device=self.device) for prompt in prompts]
        ids = pad_sequence(rows, batch_first=True, padding_side="left")
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        with torch.inference_mode():
            start = time.perf_counter()
            result = self._target.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, **options
            )
            tokens = result[:, ids.shape[1] :].tolist()  # synchronises
            seconds = time.perf_counter() - start
        return seconds, tokens

    def _load_draft(self, folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
        draft, size = _load(folder, device, dtype), self._target.config.vocab_size
        target_ids = read_draft_vocabulary(folder, draft.config.vocab_size, size)
        if target_ids is not None:
            head = draft.get_output_embeddings()
            embed = expand_embedding(draft.get_input_embeddings().weight.detach(), target_ids, size)
            draft.set_input_embeddings(nn.Embedding.from_pretrained(embed))
            draft.set_output_embeddings(_ExpandedHead(head, HeadVocabulary(target_ids[target_ids >= 0], size, device)))
            draft.config.vocab_size = size
        return draft

    def _options(self, peer: Peer) -> dict[str, Any]:
        if peer.kind == "plain":
            return {}
        if peer.kind == "lookup":
            return {"prompt_lookup_num_tokens": peer.k}
        assert peer.draft is not None
        assistant = self._drafts[peer.draft]
        config = assistant.generation_config
        if peer.k is None:
            config.num_assistant_tokens = config.num_assistant_tokens_schedule = None
            config.assistant_confidence_threshold = None
        else:
            config.num_assistant_tokens, config.num_assistant_tokens_schedule = peer.k, "constant"
            config.assistant_confidence_threshold = 0.0
        return {"assistant_model": assistant}

    def _count(self, module: object, args: object) -> None:
        self._passes += 1


class _ExpandedHead(nn.Module):
    """LM head of a reduced vocabulary that returns logits over the target's; -inf for tokens without a row."""

    def __init__(self, head: nn.Module, vocabulary: HeadVocabulary):
        super().__init__()
        self.head, self.vocabulary = head, vocabulary

    def forward(self, hidden: Tensor) -> Tensor:
        return self.vocabulary.expand(self.head(hidden)[..., : len(self.vocabulary.tokens)], -torch.inf)


def _load(path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with as_folder(path, dtype) as folder:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device).eval()
    # A new generation config, because the model's may set sampling or penalties. Without an end token, all outputs have
    # the same length.
    model.generation_config = GenerationConfig(pad_token_id=0)
    model.config.eos_token_id = None
    return model
