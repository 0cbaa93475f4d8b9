"""Evaluate models on held-out packages: loss, and how often drafts predict the target's next token."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from treespec import LLM, SamplingParams
from treespec.bench.report import distinct_share
from treespec.training.draft_vocabulary import rows_of_tokens
from treespec.training.student import open_model
from treespec_training.data import Document, Stream
from treespec_weights.draft_vocabulary import read_draft_vocabulary

PROMPT_TOKENS = (48, 160)
TOPS = (1, 2, 4)
WINDOWS, WINDOW_TOKENS = 96, 512  # windows per kind of held-out text, and their length


@dataclass(frozen=True)
class HeldOutPrompt:
    """A prompt: whole lines of a held-out document, without the last line end."""

    text: str
    package: str
    kind: str


def cut_prompts(documents: Sequence[Document], tokenizer: Tokenizer, count: int, seed: int) -> list[HeldOutPrompt]:
    """Cut `count` prompts of 48 to 160 tokens at line starts, spread evenly over (package, kind)."""
    groups: dict[tuple[str, str], list[Document]] = {}
    for document in documents:
        groups.setdefault((document.package, document.kind), []).append(document)
    rng = random.Random(seed)
    prompts: dict[str, HeldOutPrompt] = {}
    for attempt in range(50 * count):
        if len(prompts) == count or not groups:
            break
        (package, kind), members = list(groups.items())[attempt % len(groups)]
        lines = rng.choice(members).text.split("\n")
        start, wanted = rng.randrange(len(lines)), rng.randint(*PROMPT_TOKENS)
        end, length, text = start, 0, ""
        while end < len(lines) and length < wanted:
            end += 1
            text = "\n".join(lines[start:end])
            length = len(tokenizer.encode(text).ids)
        whole = end > start and lines[start].strip() and lines[end - 1].strip()
        if whole and PROMPT_TOKENS[0] <= length <= PROMPT_TOKENS[1] and len(text) < 700:
            prompts.setdefault(text, HeldOutPrompt(text, package, kind))
    return list(prompts.values())


@torch.inference_mode()
def held_out_losses(model: LlamaForCausalLM, streams: dict[str, Stream]) -> dict[str, float]:
    """Return the mean cross-entropy in nats per token by kind of text, over `WINDOWS` evenly spaced windows.

    Kinds with too little held-out text are skipped.
    """
    result, device = {}, next(model.parameters()).device
    for kind, stream in streams.items():
        if len(stream.tokens) <= 64:
            continue
        losses = []
        windows = stream.evenly_spaced(WINDOWS, min(WINDOW_TOKENS, len(stream.tokens) - 1))
        for batch in torch.from_numpy(windows).to(device).split(8):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            losses.append(F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="none"))
        result[kind] = round(torch.cat(losses).mean().item(), 4)
    return result


def greedy_continuations(target: Path, prompts: Sequence[list[int]], new_tokens: int, device: str) -> list[Tensor]:
    """Continue prompts greedily in float32, beyond end tokens. Returns int64 [prompt + new_tokens] for each."""
    llm = LLM(target, drafts=[], dtype="float32", device=device, max_num_seqs=64)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, spec="off")
    return [torch.tensor(output.prompt_token_ids + output.outputs[0].token_ids) for output in outputs]


@dataclass(frozen=True)
class RankedDraft:
    """A draft of `treespec train`."""

    model: LlamaForCausalLM
    rows: np.ndarray  # int64 [target's vocabulary], the draft row of each token
    num_tokens: int  # number of tokens that it can propose; unknown tokens have rows from `num_tokens` on


def open_draft(folder: Path, target_size: int) -> RankedDraft:
    """Open a draft in float32."""
    model = open_model(folder, torch.float32)
    target_ids = read_draft_vocabulary(folder, model.config.vocab_size, target_size)
    if target_ids is None:
        return RankedDraft(model, np.arange(target_size), target_size)
    return RankedDraft(model, rows_of_tokens(target_ids, target_size), len(target_ids) - 1)


@torch.inference_mode()
def ranks(draft: RankedDraft, sequences: Sequence[Tensor], prompt_lengths: Sequence[int]) -> list[Tensor]:
    """Rank every token of the continuations by the draft's probabilities, with teacher forcing.

    Returns int64 [new tokens] for each sequence; rank 0 is the most probable token, and tokens that the draft does not
    know come last.
    """
    rows, num_tokens = torch.from_numpy(draft.rows), draft.num_tokens
    results = []
    for sequence, length in zip(sequences, prompt_lengths, strict=True):
        ids = rows[sequence]
        logits = draft.model(input_ids=ids[None, :-1], use_cache=False).logits[0, length - 1 :, :num_tokens]
        targets = ids[length:, None]
        scores = logits.gather(-1, targets.clamp(max=num_tokens - 1))
        results.append(torch.where(targets[:, 0] < num_tokens, (logits > scores).sum(-1), num_tokens))
    return results


def agreement(ranks_per_draft: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Compute how often each draft, and any draft (`union`), has the target's token among its top 1, 2 and 4.

    `only` is the share of tokens that are the top 1 of this draft only.

    Args:
        ranks_per_draft: name -> int64 [positions], the same positions for every draft.
    """
    stacked = torch.stack(list(ranks_per_draft.values()))
    unique_hits = (stacked == 0) & ((stacked == 0).sum(0) == 1)
    rows = {**ranks_per_draft, "union": stacked.amin(0)}
    shares = {name: {f"top{top}": _share(rank < top) for top in TOPS} for name, rank in rows.items()}
    for name, hits in zip(ranks_per_draft, unique_hits, strict=True):
        shares[name]["only"] = _share(hits)
    return shares


def _share(hits: Tensor) -> float:
    return round(hits.float().mean().item(), 4)


def agreement_report(
    target: Path,
    drafts: dict[str, RankedDraft],
    prompts: Sequence[list[int]],
    kinds: Sequence[str],
    new_tokens: int,
    device: str,
) -> dict[str, object]:
    """Continue prompts greedily with the target in a folder, and rank its tokens with the drafts.

    Reports the agreement over all prompts and by kind of prompt.
    """
    sequences = greedy_continuations(target, prompts, new_tokens, device)
    lengths = [len(prompt) for prompt in prompts]
    distinct = [distinct_share(row[length:].tolist()) for row, length in zip(sequences, lengths, strict=True)]
    draft_ranks = {name: ranks(draft, sequences, lengths) for name, draft in drafts.items()}

    def over(indices: Sequence[int]) -> dict[str, dict[str, float]]:
        return agreement({name: torch.cat([rows[i] for i in indices]) for name, rows in draft_ranks.items()})

    by_kind = {kind: [i for i, prompt_kind in enumerate(kinds) if prompt_kind == kind] for kind in dict.fromkeys(kinds)}
    return {
        "agreement": over(range(len(prompts))),
        "agreement_by_kind": {kind: over(indices) for kind, indices in by_kind.items()},
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "distinct_4grams": round(statistics.mean(distinct), 4),  # low if greedy decoding loops
    }
