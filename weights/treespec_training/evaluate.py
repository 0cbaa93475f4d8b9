"""Prompts from held-out packages, and the target's loss on their text. `treespec bench` decodes the prompts."""

import random
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from treespec_training.data import Document, Stream

PROMPT_TOKENS = (48, 160)
WINDOWS, WINDOW_TOKENS = 96, 512  # windows per kind of held-out text, and their length


def cut_prompts(documents: Sequence[Document], tokenizer: Tokenizer, count: int, seed: int) -> list[dict[str, str]]:
    """Cut `count` prompts of 48 to 160 tokens at line starts, spread evenly over (package, kind).

    The text of a prompt is whole lines of a held-out document, without the last line end.
    """
    groups: dict[tuple[str, str], list[Document]] = {}
    for document in documents:
        groups.setdefault((document.package, document.kind), []).append(document)
    rng = random.Random(seed)
    prompts: dict[str, dict[str, str]] = {}
    for attempt in range(50 * count):
        if len(prompts) == count or not groups:
            break
        (package, kind), members = list(groups.items())[attempt % len(groups)]
        lines = rng.choice(members).text.split("\n")
        start, num_tokens = rng.randrange(len(lines)), rng.randint(*PROMPT_TOKENS)
        end, length, text = start, 0, ""
        while end < len(lines) and length < num_tokens:
            end += 1
            text = "\n".join(lines[start:end])
            length = len(tokenizer.encode(text).ids)
        is_complete = end > start and lines[start].strip() and lines[end - 1].strip()
        if is_complete and PROMPT_TOKENS[0] <= length <= PROMPT_TOKENS[1] and len(text) < 700:
            prompts.setdefault(text, {"text": text, "package": package, "kind": kind})
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
