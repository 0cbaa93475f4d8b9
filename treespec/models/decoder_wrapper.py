"""Base of draft heads and block drafts: a wrapper of the decoder that holds their layers."""

from ctypes import CDLL

import torch
from torch import Tensor

from treespec.models.decoder import CompiledPasses, Decoder, Pass
from treespec.models.head_vocabulary import HeadVocabulary
from treespec.models.model_config import ModelConfig
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.cpu.decoder_cpu import PassEntries


class DecoderWrapper:
    """Wraps a decoder, with its interface but for `forward`.

    Args:
        decoder: holds the layers, and the vocabulary head unless `target` is given.
        target: the decoder whose vocabulary head is used instead; None for the own one.

    Attributes:
        vocabulary_head: the decoder whose vocabulary head is used.
    """

    block: int | None = None

    def __init__(self, decoder: Decoder, target: Decoder | None = None):
        self.decoder, self.vocabulary_head = decoder, decoder if target is None else target

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.dtype

    @property
    def backend(self) -> str:
        return self.decoder.backend

    @property
    def quantization(self) -> str | None:
        return self.decoder.quantization

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def head_vocabulary(self) -> HeadVocabulary | None:
        return self.decoder.head_vocabulary

    @property
    def growth(self) -> CDLL | None:
        return self.decoder.growth

    @property
    def compiled(self) -> CompiledPasses | None:
        return self.decoder.compiled

    @property
    def entries(self) -> PassEntries | None:
        """Entry points for the call that grows trees, or None."""
        return None

    def plan(self, requests: list[RequestRows], kv: Tensor) -> Pass:
        """Plan a pass, as `Decoder.plan`."""
        return self.decoder.plan(requests, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits of the target's vocabulary, [num_rows, vocab_size]."""
        return self.vocabulary_head.logits(hidden)

    def probs(self, hidden: Tensor) -> Tensor:
        """Return probabilities as `Decoder.probs`."""
        return self.vocabulary_head.probs(hidden)
