"""Recognise and load assistants of Gemma 4: drafts whose layers attend to the K/V of the target's layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treespec_weights.draft_tensors import DraftOptions, DraftTensors, OutputForm, config_error
from treespec_weights.errors import CheckpointError
from treespec_weights.families import family_of
from treespec_weights.layouts import with_defaults
from treespec_weights.rules import FamilyRules, ModelShape


@dataclass(frozen=True)
class AssistantForm(OutputForm):
    """Description of an assistant, read from its published folder."""

    folder: Path
    config: dict[str, Any]  # config of its layers, as if they had their own K/V
    rules: FamilyRules
    target_hidden: int  # hidden size of the target
    centroids: int  # number of equal groups of tokens; 0 if the head scores all tokens
    top_centroids: int  # number of groups that it scores

    @property
    def name(self) -> str:
        return "Gemma 4 assistant"

    def describe(self, layers: Sequence[int]) -> str:
        return f"{super().describe(layers)} and the K/V of its last layers"


class AssistantWeights(NamedTuple):
    """Weights of an assistant, in the compute dtype."""

    decoder: dict[str, Tensor]  # decoder parameters by name
    before: Tensor  # projection of an embedding and a state of the target, [hidden, 2 * target_hidden]
    after: Tensor  # projection of its output to a state of the target, [target_hidden, hidden]
    centroids: Tensor | None  # [centroids, hidden]
    groups: Tensor | None  # tokens by centroid, int64 [centroids, tokens of each]

    @property
    def num_parameters(self) -> int:
        """Number of parameters that a pass reads; the embedding is also the head."""
        return sum(tensor.numel() for tensor in (*self.decoder.values(), self.before, self.after))


def assistant_form(folder: Path, raw: Mapping[str, Any]) -> AssistantForm:
    """Return the form of an assistant. Raises CheckpointConfigError for an invalid config."""
    outer = with_defaults(folder, {key: value for key, value in raw.items() if key != "architectures"})
    config = {"dtype": outer.get("dtype"), **outer["text_config"]} | {"num_kv_shared_layers": 0}
    config |= {"tie_word_embeddings": True, "final_logit_softcapping": None, "model_type": config["model_type"]}
    ordered, vocab = outer.get("use_ordered_embeddings"), config["vocab_size"]
    centroids, top = (outer["num_centroids"], outer["centroid_intermediate_top_k"]) if ordered else (0, 0)
    if centroids and (vocab % centroids or not 1 <= top <= centroids):
        raise config_error(folder, "num_centroids", f"{top} of {centroids} centroids of {vocab} tokens")
    return AssistantForm(folder, config, family_of(config, folder), int(outer["backbone_hidden_size"]), centroids, top)


def load_assistant(
    form: AssistantForm,
    shape: ModelShape,  # shape of its layers, which have no K/V of their own
    options: DraftOptions,
) -> AssistantWeights:
    """Load an assistant of a target with the vocabulary size of `shape`.

    Raises CheckpointError if it belongs to another target or its tensors do not match its config.
    """
    target_hidden, dtype, device, kept = options
    if form.target_hidden != target_hidden:
        message = f"{form.target_hidden}, the target has {target_hidden}; use the assistant of this target"
        raise CheckpointError.of(form.folder, "config", "backbone_hidden_size", message)
    tensors, hidden, size = DraftTensors(form.folder, dtype, device), shape.hidden_size, shape.vocab_size
    decoder = tensors.take_layers(shape, form.rules, ())
    decoder["embed"] = tensors.take("embed_tokens.weight", size, hidden)  # the head; inputs use the target's embedding
    pre_projection = tensors.take("pre_projection.weight", hidden, 2 * target_hidden)
    post_projection = tensors.take("post_projection.weight", target_hidden, hidden)
    centroids = groups = None
    if form.centroids:
        centroids = tensors.take("masked_embedding.centroids.weight", form.centroids, hidden)
        order = tensors.raw("masked_embedding.token_ordering")
        if order is None or not torch.equal(order.long().sort().values, torch.arange(size, device=order.device)):
            message = f"missing, or not an order of the {size} tokens"
            raise CheckpointError.of(form.folder, "value", "masked_embedding.token_ordering", message)
        groups = order.long().view(form.centroids, -1).to(device)
    tensors.check()
    if kept is not None:
        decoder["embed"] = decoder["embed"][torch.from_numpy(kept)]
    return AssistantWeights(decoder, pre_projection, post_projection, centroids, groups)
