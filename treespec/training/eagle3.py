"""EAGLE-3 draft heads (arXiv 2503.01840): the training module."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from treespec.errors import ModelError
from treespec.training.distillation import LessonBatch, Prediction
from treespec.training.loop import mixed_precision
from treespec.training.target_states import TargetStates

DEPTHS = 4  # consecutive drafted tokens per training step (training-time test)
NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")

Config = TypeVar("Config", bound=PreTrainedConfig)


def head_layers(num_layers: int) -> tuple[int, ...]:
    """Return the target layers that provide a head's inputs: EAGLE-3's default, for at least seven layers."""
    if num_layers >= 7:
        return 2, num_layers // 2, num_layers - 3
    return tuple(sorted({1, num_layers // 2, num_layers - 1}))


def head_config(target: PreTrainedConfig, kind: type[Config], num_layers: int, rows: int) -> Config:
    """Return a head's config: layers of a kind with the target's size, and `rows` tokens. Raises ModelError."""
    if missing := [name for name in NEEDED if getattr(target, name, None) is None]:
        raise ModelError(f"cannot train a draft head for {target.model_type}: its config has no {missing[0]}")
    if target.model_type.startswith("gemma"):
        raise ModelError(f"cannot train a draft head for {target.model_type}: its embeddings and norms are scaled")
    return kind(
        **{name: getattr(target, name) for name in (*NEEDED, "max_position_embeddings", "rope_parameters")},
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
        num_hidden_layers=num_layers,
        vocab_size=rows,
        tie_word_embeddings=False,
    )


class _PairAttention(nn.Module):
    """Attention of a head's layer: queries, keys and values are projections of an embedding and a feature."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(2 * config.hidden_size, heads * self.head_dim, bias=False)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], kv: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend from pairs at depth `len(kv)` below verified pairs, and append their keys and values to `kv`.

        Pair p at depth d attends to verified pairs up to p - d and to pairs p - d + 1 to p of depths 1 to d, like a
        tree node to its ancestors. `x` is [batch, pairs, 2 * hidden]; `kv` has the keys and values of shallower
        depths, [batch, heads, pairs, head_dim].
        """
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *rotation)
        shared = self.heads // self.kv_heads
        kv.append((k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)))
        depth, scale, pairs = len(kv) - 1, self.head_dim**-0.5, x.shape[1]
        above = [
            tuple(F.pad(tensor, (0, 0, depth - d, 0))[:, :, :pairs] for tensor in kv[d]) for d in range(1, depth + 1)
        ]
        keys, values = kv[0]
        hidden = torch.ones(pairs, pairs, dtype=torch.bool, device=x.device).triu(1 - depth)
        scores = [(q @ keys.transpose(2, 3)).float().masked_fill(hidden, -torch.inf)]
        scores += [(q * key).sum(3, keepdim=True).float() for key, _ in above]
        weights = (torch.cat(scores, 3) * scale).softmax(3).to(values.dtype)
        out = weights[..., :pairs] @ values
        for d, (_, value) in enumerate(above):
            out = out + weights[..., pairs + d : pairs + d + 1] * value
        attended: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return attended


class _PairLayer(nn.Module):
    """A head's decoder layer; its residual stream starts from the feature."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn, self.mlp = _PairAttention(config), LlamaMLP(config)

    def forward(
        self, embedded: Tensor, features: Tensor, rotation: tuple[Tensor, Tensor], kv: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(features)), 2)
        features = features + self.self_attn(x, rotation, kv)
        result: Tensor = features + self.mlp(self.post_attention_layernorm(features))
        return result


class Eagle3Module(nn.Module):
    """A draft head: a decoder layer over pairs of a token's embedding and the previous token's *feature*.

    The feature of a verified token is a projection of the target's hidden states; that of a drafted token is the
    layer's output. Parameter names follow SpecForge's checkpoints. The head reads `num_states` layers of the target and
    the target's frozen embeddings [vocab_size, hidden_size].
    """

    embed: Tensor
    decay = 0.8  # loss weight of a depth relative to the depth before it

    def __init__(self, config: LlamaConfig, embed: Tensor, num_states: int):
        super().__init__()
        hidden = config.hidden_size
        self.config = config
        self.register_buffer("embed", embed.detach(), persistent=False)
        self.fc = nn.Linear(num_states * embed.shape[1], hidden, bias=False)
        self.midlayer, self.norm = _PairLayer(config), LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)
        self._rotary = LlamaRotaryEmbedding(config)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def predict(self, batch: LessonBatch, states: TargetStates, seed: Sequence[int]) -> Iterator[Prediction]:
        """Yield the logits of a batch's targets after 0, 1, ... drafted tokens; `seed` is unused."""
        pairs = batch.positions[:, 1] - 1
        inputs = states.of(batch)[:, :-1]
        with mixed_precision(batch.inputs.device):
            for depth, hidden in enumerate(self(inputs, batch.tokens, DEPTHS)):
                targets = batch.select(pairs >= depth)
                rows, columns = targets.positions[:, 0], targets.positions[:, 1] - 1
                yield self.lm_head(hidden[rows, columns]).float(), targets

    def published_config(self, target: PreTrainedConfig) -> dict[str, Any]:
        """Return the config.json in SpecForge's layout."""
        names = {"architectures": ["LlamaForCausalLMEagle3"], "dtype": "bfloat16", "torch_dtype": "bfloat16"}
        sizes = {"vocab_size": int(target.vocab_size), "draft_vocab_size": self.config.vocab_size}
        layers = list(head_layers(target.num_hidden_layers))
        layer_field = {"eagle_aux_hidden_state_layer_ids": layers} if target.num_hidden_layers < 7 else {}
        return self.config.to_dict() | names | sizes | layer_field

    def forward(self, states: Tensor, tokens: Tensor, depths: int) -> Iterator[Tensor]:
        """Yield the normalised outputs [batch, pairs, hidden] of the pairs after 0, 1, ... drafted tokens.

        `states` are the target's at all tokens but the last, [batch, pairs, num_states * hidden]; `tokens` are int64
        [batch, pairs + 1].
        """
        embedded = F.embedding(tokens[:, 1:], self.embed)
        positions = torch.arange(states.shape[1], dtype=torch.int64, device=states.device)[None]
        rotation = self._rotary(embedded, positions)
        features, kv = self.fc(states.to(self.fc.weight.dtype)), list[tuple[Tensor, Tensor]]()
        for _ in range(depths):
            out = self.midlayer(embedded, features, rotation, kv)
            yield self.norm(out)
            features = F.pad(out, (0, 0, 1, 0))[:, :-1]


def make_head(target: Any, target_ids: np.ndarray, num_states: int) -> Eagle3Module:
    """Return an untrained float32 head with the target's final norm and LM head rows.

    Its feature is initialised to the last of the `num_states` states. `target_ids`: int64 [rows + 1].
    """
    config = head_config(target.config, LlamaConfig, 1, len(target_ids) - 1)
    head = Eagle3Module(config, target.get_input_embeddings().weight, num_states)
    token_ids = torch.from_numpy(target_ids[:-1]).to(head.embed.device)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        head.fc.weight.zero_()
        head.fc.weight[:, -config.hidden_size :].fill_diagonal_(1.0)
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[token_ids])
        head.norm.weight.copy_(target.get_decoder().norm.weight)
    return head
