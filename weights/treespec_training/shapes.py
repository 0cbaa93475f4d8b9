"""The embedded models, built with transformers, so that other libraries can load them."""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from treespec.training.loop import mixed_precision

TARGET = {
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TINY_TARGET = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
# Settings of `treespec train` for the drafts: narrow, because passes of a target of 10 M parameters are short, and with
# the target's token ids, so that other libraries can use them.
DRAFT = {"layers": 2, "hidden": 128, "vocabulary": 4096}
TINY_DRAFT = {"layers": 1, "vocabulary": 384, "max_tokens": 16}
MAX_LENGTH = 2048


def build(shape: dict[str, int], vocab_size: int, seed: int) -> LlamaForCausalLM:
    """Create a randomly initialised Llama with tied embeddings. Residual outputs are scaled down by depth (GPT-2)."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        **shape,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * config.num_hidden_layers) ** -0.5)
    return model


def next_token_loss(model: torch.nn.Module, windows: Tensor) -> Tensor:
    """Compute the mean cross-entropy in nats per token, in mixed precision. windows: int64 [batch, length + 1]."""
    with mixed_precision(windows.device):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def stack(shallow: LlamaForCausalLM, deep: LlamaForCausalLM) -> None:
    """Initialise a deep model by repeating the whole stack of a shallow one's layers (arXiv 2405.15319, G_direct).

    A shallow model learns common patterns at a fraction of the cost.
    """
    weights = shallow.state_dict()
    layers = shallow.config.num_hidden_layers
    for i in range(layers, deep.config.num_hidden_layers):
        prefix = f"model.layers.{i % layers}."
        for name in [name for name in weights if name.startswith(prefix)]:
            weights[name.replace(prefix, f"model.layers.{i}.")] = weights[name]
    deep.load_state_dict(weights)
