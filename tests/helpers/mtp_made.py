"""Checkpoints of native families with a layer for multi-token prediction (MTP), in the published layouts."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.helpers.families import TYPICAL, fitting, make_model
from tests.helpers.models import VOCAB, new_folder

FILE = "model.safetensors"
QWEN = {
    "fc": "mtp.fc.weight",
    "embed_norm": "mtp.pre_fc_norm_embedding.weight",
    "feature_norm": "mtp.pre_fc_norm_hidden.weight",
    "final_norm": "mtp.norm.weight",
}
GLM = {"fc": "eh_proj.weight", "embed_norm": "enorm.weight", "feature_norm": "hnorm.weight"}
GLM = {own: f"model.layers.3.{name}" for own, name in (GLM | {"final_norm": "shared_head.norm.weight"}).items()}


class Layout(NamedTuple):
    """Where a family has its MTP layer, and which of its other layers it is like."""

    like: str
    layer: str
    names: dict[str, str]
    added: float  # what norms add to their weights


LAYOUTS = dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), Layout("model.layers.1.", "mtp.layers.0.", QWEN, 1.0))
LAYOUTS["glm4_moe"] = Layout("model.layers.2.", "model.layers.3.", GLM, 0.0)


def make_predictor(
    name: str, compiled: bool = False, dtype: torch.dtype = torch.float32, predicts: bool = False, **changes: Any
) -> Path:
    """A random model of three layers with a random MTP layer.

    `compiled`: with sizes that compiled passes take. `predicts`: of both, the layers add little to the embedding, so
    that the MTP layer often predicts what the model says.
    """
    case, layout = TYPICAL[name], LAYOUTS[name]
    changes = {"vocab_size": VOCAB} | (fitting(case) if compiled else {}) | changes
    changes |= {"mlp_only_layers": []} if name == "qwen3_next" else {}
    folder = make_model(new_folder(name) / "model", case, 3, dtype, **changes)
    tensors = load_file(folder / FILE)
    if predicts:
        outputs = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
        tensors = {own: tensor * 0.1 if own.endswith(outputs) else tensor for own, tensor in tensors.items()}
    else:
        tensors["lm_head.weight"] *= 0.3  # a sharper head multiplies differences of rounding
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for own, tensor in [*tensors.items()]:
        if own.startswith(layout.like):
            spread, centre = torch.std_mean(tensor.float()) if tensor.numel() > 1 else (1.0, 0.0)
            copy = tensor if predicts else (centre + spread * noise(*tensor.shape)).to(tensor.dtype)
            tensors[own.replace(layout.like, layout.layer)] = copy.clone()
    hidden = len(tensors["model.norm.weight"])
    parts = {part: 1.0 - layout.added + 0.2 * noise(hidden) for part in ("embed_norm", "feature_norm", "final_norm")}
    parts["fc"] = noise(hidden, 2 * hidden) * (2 * hidden) ** -0.5
    if predicts:
        parts["embed_norm"], parts["final_norm"] = (
            torch.full((hidden,), 1.0 - layout.added),
            tensors["model.norm.weight"],
        )
        parts["fc"] = torch.cat((torch.eye(hidden), 0.1 * parts["fc"][:, :hidden]), 1)
    tensors |= {layout.names[part]: tensor.to(dtype, copy=True) for part, tensor in parts.items()}
    if name == "glm4_moe":  # copies, which the published checkpoints hold
        tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / FILE, {"format": "pt"})
    return folder


def _open(folder: Path) -> Any:
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}  # grouped products take no float64
    return AutoModelForCausalLM.from_pretrained(folder, **options).double().eval()


class PredictorReference:
    """An MTP layer in float64: its norms and projection as they are defined, its layer by transformers' code.

    In float32, sums in the order of MKL's AVX-512 would change a probability by up to 9e-5.
    """

    def __init__(self, name: str, folder: Path):
        self.layout, tensors = LAYOUTS[name], load_file(folder / FILE)
        self.model = _open(folder)
        self.own = {part: tensors[stored].double() for part, stored in self.layout.names.items()}
        # A model whose layer has the place of one that is like it.
        layer = {own: tensor for own, tensor in tensors.items() if own.startswith(self.layout.layer)}
        moved = {own.replace(self.layout.layer, self.layout.like): tensor for own, tensor in layer.items()}
        other = new_folder("moved")
        kept = {own: tensor for own, tensor in tensors.items() if own not in layer and not own.startswith("mtp.")}
        names = kept.keys()
        save_file(kept | {own: tensor for own, tensor in moved.items() if own in names}, other / FILE, {"format": "pt"})
        (other / "config.json").write_text((folder / "config.json").read_text())
        self.layer = _open(other).model.layers[int(self.layout.like.split(".")[2])]

    def _norm(self, x: Tensor, part: str) -> Tensor:
        weight = self.own[part] + self.layout.added
        return F.rms_norm(x, weight.shape, weight, self.model.config.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, states: Tensor, context: list[int], drafted: list[int]) -> Tensor:
        """Logits after the last of some drafted tokens, by a pass over all pairs for each.

        `context` ends in the root; `states` are the model's after its final norm, of the tokens before the root.
        """
        tokens, embed = context[1:], self.model.get_input_embeddings()
        for token in [*drafted, None]:
            pairs = self._norm(embed(torch.tensor(tokens)), "embed_norm"), self._norm(states, "feature_norm")
            x, positions = (torch.cat(pairs, 1) @ self.own["fc"].T)[None], torch.arange(len(tokens))[None]
            mask = torch.full((1, 1, len(tokens), len(tokens)), -torch.inf, dtype=torch.float64).triu(1)
            rotation = self.model.model.rotary_emb(x, positions)
            out = self.layer(x, position_embeddings=rotation, attention_mask=mask, position_ids=positions)
            out = self._norm((out if isinstance(out, Tensor) else out[0])[0], "final_norm")
            if token is not None:
                states, tokens = torch.cat((states, out[-1:])), [*tokens, token]
        logits: Tensor = self.model.get_output_embeddings()(out[-1])
        return logits
