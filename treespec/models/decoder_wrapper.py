"""Base of draft heads and block drafts: a wrapper of the decoder that holds their layers."""

from torch import Tensor

from treespec.models.decoder import Decoder, Pass
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_kernels.cpu.decoder_cpu import PassEntries


class DecoderWrapper:
    """Wraps a decoder, with its interface but for `forward`.

    Args:
        decoder: holds the layers, and the vocabulary head unless `target` is given.
        target: the decoder whose vocabulary head is used instead; None for the own one.
    """

    block: int | None = None
    max_depth: int | None = None  # number of levels that it predicts; None for any number
    entries: PassEntries | None = None  # entry points for the call that grows trees
    plan_key: tuple[object, ...]

    def __init__(self, decoder: Decoder, target: Decoder | None = None):
        self.decoder, self.vocabulary_head = decoder, decoder if target is None else target
        self.config, self.vocab_size, self.head_vocabulary = decoder.config, decoder.vocab_size, decoder.head_vocabulary
        self.device, self.dtype, self.backend = decoder.device, decoder.dtype, decoder.backend
        self.quantization, self.growth, self.compiled = decoder.quantization, decoder.growth, decoder.compiled

    def plan(self, requests: list[RequestRows], kv: Tensor) -> Pass:
        """Plan a pass, as `Decoder.plan`."""
        return self.decoder.plan(requests, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits of the target's vocabulary, [num_rows, vocab_size]."""
        return self.vocabulary_head.logits(hidden)

    def probs(self, hidden: Tensor) -> Tensor:
        """Return probabilities as `Decoder.probs`."""
        return self.vocabulary_head.probs(hidden)
