"""Training of the byte-level BPE tokenizer shared by all embedded models."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from treespec_training.data import END_OF_TEXT


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a lossless byte-level BPE tokenizer: every byte is a token, id 0 is the end-of-text token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def as_pretrained(tokenizer: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """Wrap the tokenizer for `save_pretrained`, without adding special tokens to texts."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        add_prefix_space=False,
    )
