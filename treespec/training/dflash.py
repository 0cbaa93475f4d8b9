"""DFlash drafts (arXiv 2602.06036): the training module."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, Qwen3Config
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from treespec.errors import ModelError
from treespec.training.distillation import LessonBatch, Prediction
from treespec.training.loop import mixed_precision

LAYERS = 2
BLOCK = 8  # rows of a block, including the root's
ROOTS = 24  # roots per lesson in a training step
EVALUATED_ROOTS = 48
NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")


def read_layers(num_layers: int) -> tuple[int, ...]:
    """Return the target layers whose inputs a draft reads: EAGLE-3's default, for at least seven layers."""
    if num_layers >= 7:
        return 2, num_layers // 2, num_layers - 3
    return tuple(sorted({1, num_layers // 2, num_layers - 1}))


def draft_config(target: PreTrainedConfig) -> Qwen3Config:
    """Return the config of layers with the target's size. Raises ModelError."""
    if missing := [name for name in NEEDED if getattr(target, name, None) is None]:
        raise ModelError(f"cannot train a DFlash draft for {target.model_type}: its config has no {missing[0]}")
    if target.model_type.startswith("gemma"):
        raise ModelError(f"cannot train a DFlash draft for {target.model_type}: its embeddings and norms are scaled")
    return Qwen3Config(
        **{name: getattr(target, name) for name in (*NEEDED, "max_position_embeddings", "rope_parameters")},
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
        num_hidden_layers=min(LAYERS, target.num_hidden_layers),
        vocab_size=target.vocab_size,
        tie_word_embeddings=False,
    )


class Roots(NamedTuple):
    positions: Tensor  # int64 [rows, roots], positions in the lesson; lessons with fewer roots repeat some
    first: Tensor  # int64 [rows], index of each row's first target in the batch
    counts: Tensor  # int64 [rows], number of each row's targets
    begins: Tensor  # int64 [rows], position of each row's first target

    def targets(self, depth: int) -> tuple[Tensor, Tensor]:
        """Return a mask of the roots with a target at this depth below them, bool [rows, roots], and its indices."""
        offsets = self.positions - self.begins[:, None] + depth - 1
        valid = offsets < self.counts[:, None]
        return valid, (self.first[:, None] + offsets)[valid]


def draw_roots(batch: LessonBatch, count: int, seed: Sequence[int]) -> Roots:
    """Draw up to `count` roots of each lesson of a batch."""
    generator, rows = np.random.default_rng(seed), batch.positions[:, 0].cpu().numpy()
    counts = np.bincount(rows, minlength=len(batch.tokens))
    first = np.concatenate(([0], np.cumsum(counts)[:-1]))
    begins = batch.positions[:, 1].cpu().numpy()[first]
    positions = [begin + np.sort(generator.permutation(n)[:count]) for begin, n in zip(begins, counts, strict=True)]
    padded = np.stack([np.resize(row, count) for row in positions])
    return Roots(*(torch.from_numpy(array).to(batch.tokens.device) for array in (padded, first, counts, begins)))


class _BlockAttention(qwen3.Qwen3Attention):
    """Attention of blocks to the committed tokens before their roots, and within each block in both directions."""

    def forward(self, x: Tensor, context: Tensor, rotations: tuple[Any, Any], visible: Tensor) -> Tensor:
        """Return the output of all blocks' rows, [batch, rows, hidden].

        `x` are the normalised rows; `context` the projected states of the lessons' tokens, [batch, length, hidden];
        `rotations` cosine and sine of the rows, and of tokens and rows; `visible` is bool [batch, 1, rows, length +
        rows].
        """
        context_and_rows = torch.cat((context, x), 1)
        q = self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2)
        k = self.k_norm(self._heads(self.k_proj(context_and_rows))).transpose(1, 2)
        v = self._heads(self.v_proj(context_and_rows)).transpose(1, 2)
        q, _ = qwen3.apply_rotary_pos_emb(q, q, *rotations[0])
        _, k = qwen3.apply_rotary_pos_emb(k, k, *rotations[1])
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, visible, enable_gqa=True)
        attended: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return attended

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.head_dim))


class _BlockLayer(nn.Module):
    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            qwen3.Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )
        self.self_attn, self.mlp = _BlockAttention(config, 0), qwen3.Qwen3MLP(config)

    def forward(self, x: Tensor, context: Tensor, rotations: tuple[Any, Any], visible: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rotations, visible)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class DFlashModule(nn.Module):
    """A DFlash draft with its own head over a reduced vocabulary. Parameter names follow speculators.

    It reads the states of `num_states` target layers and the target's frozen embeddings [vocab_size, hidden_size].
    """

    embed: Tensor
    decay = math.exp(-1 / 4)  # loss weight of a depth relative to the depth before it

    def __init__(self, config: Qwen3Config, embed: Tensor, num_states: int, mask_token: int, rows: int):
        super().__init__()
        self.config, self.mask_token = config, mask_token
        self.register_buffer("embed", embed.detach(), persistent=False)
        self.fc = nn.Linear(num_states * embed.shape[1], config.hidden_size, bias=False)
        self.hidden_norm, self.norm = (qwen3.Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2))
        self.layers = nn.ModuleList(_BlockLayer(config) for _ in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(config.hidden_size, rows, bias=False)
        self._rotary = qwen3.Qwen3RotaryEmbedding(config)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def predict(self, batch: LessonBatch, seed: Sequence[int]) -> Iterator[Prediction]:
        """Yield the logits of a batch's targets at depths 1, 2, ... below drawn roots."""
        assert batch.read_states is not None
        roots = draw_roots(batch, ROOTS if self.training else EVALUATED_ROOTS, seed)
        with mixed_precision(batch.inputs.device):
            hidden = self(batch.read_states(), batch.tokens, roots.positions)
        for depth in range(1, BLOCK):
            valid, index = roots.targets(depth)
            with mixed_precision(batch.inputs.device):
                logits = self.lm_head(hidden[:, :, depth][valid]).float()
            yield logits, batch.select(index)

    def write(self, folder: Path, target_ids: np.ndarray, target: PreTrainedConfig) -> None:
        """Write the draft in speculators' layout, in bfloat16. `target_ids`: int64 [rows + 1]."""
        rows, size = torch.from_numpy(target_ids[:-1]), int(target.vocab_size)
        tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in self.state_dict().items()}
        tensors["d2t"] = rows - torch.arange(len(rows), dtype=torch.int64, device="cpu")
        tensors["t2d"] = torch.zeros(size, dtype=torch.bool, device="cpu").index_fill_(0, rows, True)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        config = {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dflash",
            "dtype": "bfloat16",
            "transformer_layer_config": self.config.to_dict(),
            "aux_hidden_state_layer_ids": list(read_layers(target.num_hidden_layers)),
            "draft_vocab_size": self.lm_head.out_features,
            "block_size": BLOCK,
            "mask_token_id": self.mask_token,
            "sample_from_anchor": False,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")

    def forward(self, states: Tensor, tokens: Tensor, roots: Tensor) -> Tensor:
        """Return the normalised outputs of blocks below some roots, [batch, roots, BLOCK, hidden].

        Args: target states [batch, length, num_states * hidden]; tokens and positions of the roots, int64 [batch,
        length] and [batch, roots].
        """
        (batch, length), count = tokens.shape, roots.shape[1]
        context = self.hidden_norm(self.fc(states.to(self.fc.weight.dtype)))
        ids = torch.full((batch, count, BLOCK), self.mask_token, dtype=torch.int64, device=tokens.device)
        ids[:, :, 0] = tokens.gather(1, roots)
        steps = torch.arange(BLOCK, dtype=torch.int64, device=tokens.device)
        positions = torch.arange(length, dtype=torch.int64, device=tokens.device)
        row_positions = (roots[:, :, None] + steps).flatten(1)
        before_root = positions[None, None] < roots[:, :, None].expand(-1, -1, BLOCK).reshape(batch, -1, 1)
        block = torch.arange(count, dtype=torch.int64, device=tokens.device).repeat_interleave(BLOCK)
        same_block = (block[:, None] == block[None]).expand(batch, -1, -1)
        visible = torch.cat((before_root, same_block), 2)[:, None]
        x = F.embedding(ids.flatten(1), self.embed).to(context.dtype)
        key_positions = torch.cat((positions.expand(batch, -1), row_positions), 1)
        rotations = self._rotary(x, row_positions), self._rotary(x, key_positions)
        for layer in self.layers:
            x = layer(x, context, rotations, visible)
        normed: Tensor = self.norm(x)
        return normed.view(batch, count, BLOCK, -1)


def make_dflash(target: Any, target_ids: np.ndarray, num_states: int) -> DFlashModule:
    """Return a float32 draft initialised from the target's last layers. `target_ids`: int64 [rows + 1].

    It starts by projecting the last state that it reads, so its first layer's keys and values are nearly the target's.
    """
    config = draft_config(target.config)
    decoder, vocab = target.get_decoder(), torch.from_numpy(target_ids[:-1])
    draft = DFlashModule(config, target.get_input_embeddings().weight, num_states, mask_token_of(target), len(vocab))
    with torch.no_grad():
        nn.init.zeros_(draft.fc.weight)[:, -config.hidden_size :].fill_diagonal_(1.0)
        draft.lm_head.weight.copy_(target.get_output_embeddings().weight[vocab.to(draft.embed.device)])
        draft.norm.weight.copy_(decoder.norm.weight)
        last_layers = decoder.layers[-len(draft.layers) :]
        draft.hidden_norm.weight.copy_(last_layers[0].input_layernorm.weight)
        draft_layer: Any
        for draft_layer, layer in zip(draft.layers, last_layers, strict=True):
            draft_layer.load_state_dict(layer.state_dict(), strict=False)
            if hasattr(layer.self_attn, "q_norm"):
                continue
            student, teacher, gain = draft_layer.self_attn, layer.self_attn, layer.input_layernorm.weight.float()
            for norm, projection in ((student.q_norm, teacher.q_proj), (student.k_norm, teacher.k_proj)):
                # Expected size of this projection of normalised rows; the head norm would otherwise remove it.
                norm.weight.fill_(float((projection.weight.float() * gain).square().sum(1).mean().sqrt()))
    return draft


def mask_token_of(target: Any) -> int:
    """Return the mask token: the target's padding token, else its end token, else token 0."""
    config = target.config
    for token in (config.pad_token_id, config.eos_token_id):
        if isinstance(token, int) and 0 <= token < config.vocab_size:
            return token
    return 0
