"""Raw texts for pre-training drafts by next-token prediction."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from treespec.errors import ConfigError
from treespec.text.training_prompts import read_training_prompts
from treespec.training.draft_vocabulary import rows_of_tokens
from treespec.training.loop import StepLoss, mixed_precision

TEXT_SHARE = 0.9  # initial share of steps on texts
LESSONS_ONLY = 0.8  # completed fraction of the training after which no texts are used
WINDOW, ROWS = 256, 12  # tokens per window, windows per step
BATCH = 1024  # passages tokenised at once


def tokenize_texts(paths: Sequence[Path], tokenizer: Any) -> np.ndarray:
    """Return the tokens of all raw texts, int32 [tokens]. Raises ConfigError if they are shorter than a window."""
    passages = [entry.content for entry in read_training_prompts(paths, chat=True) if isinstance(entry.content, str)]
    token_arrays = [np.zeros(0, dtype=np.int32)]
    for start in range(0, len(passages), BATCH):
        encoded = tokenizer(passages[start : start + BATCH], add_special_tokens=False)["input_ids"]
        token_arrays.append(np.fromiter((token for ids in encoded for token in ids), dtype=np.int32))
    tokens = np.concatenate(token_arrays)
    if len(tokens) <= WINDOW:
        names = ", ".join(map(str, paths))
        raise ConfigError(f"--texts {names}: {len(tokens)} tokens of raw text; at least {WINDOW + 1} are needed")
    return tokens


class Texts:
    """Random selection of each step's text windows from int32 tokens. It depends only on the seed and the step."""

    def __init__(self, tokens: np.ndarray, target_ids: np.ndarray, target_size: int, seed: int, device: torch.device):
        self._rows = rows_of_tokens(target_ids, target_size).astype(np.int32)[tokens]
        self.other, self.seed, self.device = len(target_ids) - 1, seed, device

    def is_text_step(self, step: int, fraction: float) -> bool:
        """Return whether a step trains on texts, whose share falls linearly with the completed `fraction`."""
        share = TEXT_SHARE * max(1 - fraction / LESSONS_ONLY, 0.0)
        return bool(np.random.default_rng((self.seed, 6, step)).random() < share)

    def loss(self, model: Any, step: int) -> StepLoss:
        """Return the next-token cross-entropy on texts, over tokens in the draft's vocabulary."""
        starts = np.random.default_rng((self.seed, 5, step)).integers(len(self._rows) - WINDOW, size=ROWS)
        windows = torch.from_numpy(np.stack([self._rows[a : a + WINDOW + 1] for a in starts])).long().to(self.device)
        following = windows[:, 1:].flatten()
        in_vocabulary = (following != self.other).nonzero()[:, 0]
        with mixed_precision(self.device):
            hidden = model.get_decoder()(input_ids=windows[:, :-1], use_cache=False).last_hidden_state
            logits = model.get_output_embeddings()(hidden.flatten(0, 1)[in_vocabulary])[:, :-1].float()
        total = F.cross_entropy(logits, following[in_vocabulary], reduction="sum")
        return StepLoss(total / max(len(in_vocabulary), 1), len(in_vocabulary))
