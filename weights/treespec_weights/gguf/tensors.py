"""Read tensors of GGUF files under their Hugging Face names.

Reverses changes of llama.cpp's converter, which permutes the rows of q and k of some architectures for interleaved
rotation, adds 1 to the norms of Gemma and Qwen 3.5, stores -exp(A_log), and drops or adds dimensions of 1. A layer for
multi-token prediction (MTP), which follows the others, has the names of `PredictorRules`.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from treespec_weights.blocks import FORMS, Blocks, common_form
from treespec_weights.dtypes import TORCH_DTYPES
from treespec_weights.errors import CheckpointError, Problem
from treespec_weights.gguf.config import FACTORS, PERMUTED, num_predictors, rules_of
from treespec_weights.gguf.reader import GgufFile, GgufTensor, gguf_package, read_gguf
from treespec_weights.quant_schemes import Form
from treespec_weights.rules import LAYER, PredictorRules

# GGUF name -> decoder parameters; families differ in those separated by |
_PARAMETERS = {
    "token_embd": "embed",
    "output_norm": "final_norm",
    "output": "lm_head",
    "attn_norm": "attn_norm",
    "attn_q": "q | q attn_gate",
    "attn_k": "k",
    "attn_v": "v",
    "attn_qkv": "q k v | mix_q mix_k mix_v",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "attn_output": "o",
    "attn_sinks": "sinks",
    "post_attention_norm": "attn_post_norm | mlp_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up | gate up",
    "ffn_down": "down",
    "post_ffw_norm": "mlp_post_norm",
    "attn_gate": "mix_gate",
    "ssm_a": "decay_log",
    "ssm_alpha": "decay",
    "ssm_ba": "beta decay",
    "ssm_beta": "beta",
    "ssm_conv1d": "conv_q conv_k conv_v | conv_v conv_k conv_q",
    "ssm_dt": "dt",  # bias of the time step
    "ssm_d": "skip",
    "ssm_in": "mix_gate mix_v mix_k mix_q decay",
    "ssm_norm": "mix_gain",
    "ssm_out": "mix_out",
    "shortconv.conv": "conv",
    "shortconv.in_proj": "mix",
    "shortconv.out_proj": "mix_out",
    "token_embd_norm": "final_norm",
    "ffn_gate_inp": "router",
    "exp_probs_b": "router_correction",
    "ffn_gate_inp_shexp": "shared.scale",
    "ffn_latent_down": "latent_in",
    "ffn_latent_up": "latent_out",
    "ffn_gate_inp.scale": "router_norm",
    "ffn_down_exps.scale": "expert_scales",
    "ffn_gate_up_exps": "experts.{e}.gate experts.{e}.up",
    "pre_ffw_norm_2": "experts_norm",
    "post_ffw_norm_1": "shared_post_norm",
    "post_ffw_norm_2": "experts_post_norm",
    "per_layer_token_embd": "input_embed",
    "per_layer_model_proj": "input_project",
    "per_layer_proj_norm": "input_norm",
    "inp_gate": "input_gate",
    "proj": "input_out",
    "post_norm": "input_norm",
    "layer_output_scale": "scalar",
    "nextn.eh_proj": "fc",
    "nextn.enorm": "embed_norm",
    "nextn.hnorm": "feature_norm",
    "nextn.shared_head_norm": "final_norm",
    **{f"ffn_{name}_exps": f"experts.{{e}}.{name}" for name in ("gate", "up", "down")},
    **{f"ffn_{name}_shexp": f"shared.{name}" for name in ("gate", "up", "down")},
}
_VECTORS = ("ssm_a", "ssm_d", "ssm_norm")  # stored with additional dimensions
_CONVOLUTIONS = ("ssm_conv1d", "shortconv.conv")
# parameter -> parameter whose product it is fused into
_PRODUCTS = {"k": "q", "v": "q", "up": "gate", "mix_gate": "mix_q", "decay": "beta"}
_NAME = re.compile(r"(blk\.(?P<layer>\d+)\.)?(?P<stem>.*?)(\.(?P<kind>weight|bias))?", re.DOTALL)  # matches any name


def hf_names(file: GgufFile) -> dict[str, str]:
    """Return the GGUF name of every tensor by Hugging Face name. Tensors unknown to the family keep their names."""
    family = rules_of(file)
    stored = (rule for rule in (*family.tensors, *family.alternatives) if not rule.layout.startswith("interleaved"))
    rules = {rule.params: rule.name for rule in stored}
    names, first = dict[str, str](), _first_predictor(file)
    predictor = None if first is None or family.predictor is None else family.predictor.after(first)
    for name in file.tensors:
        if name in FACTORS:
            continue
        layer, layer_rules = _layer(name), rules
        depth = -1 if first is None or not layer else int(layer) - first
        if depth >= 0:
            layer_rules = {} if predictor is None else _names_of_predictor(rules, predictor, depth)
        matches = [layer_rules[params] for params in _parameters(name) if params in layer_rules]
        if matches or depth < 0:  # other tensors of MTP layers are copies of embedding and head
            names[matches[0].replace("{i}", layer) if matches else name] = name
    return names


def _names_of_predictor(
    rules: Mapping[tuple[str, ...], str], predictor: PredictorRules, number: int
) -> dict[tuple[str, ...], str]:
    """Return the tensor names of an MTP layer by parameter, as `rules` does for other layers."""
    names = {params: name.replace(LAYER, predictor.layer_at(number)) for params, name in rules.items()}
    return names if number else names | {(f"layers.{{i}}.{param}",): name for name, param in predictor.tensors.items()}


def _first_predictor(file: GgufFile) -> int | None:
    """Return the index of the first layer for multi-token prediction, or None without one."""
    predictors, count = num_predictors(file), file.value("block_count")
    return count - predictors if predictors and type(count) is int else None


def _parsed(name: str) -> re.Match[str]:
    match = _NAME.fullmatch(name)
    assert match is not None, "the pattern matches any name"
    return match


def _layer(name: str) -> str:
    """Return the layer of a GGUF tensor, or "" if it belongs to none."""
    return _parsed(name)["layer"] or ""


def _stem(name: str) -> str:
    """Return a GGUF tensor's name without its layer, such as "attn_q"."""
    return _parsed(name)["stem"]


def _with_all_dimensions(name: str, entry: GgufTensor) -> GgufTensor:
    """Restore the dimensions of 1 that llama.cpp drops from a tensor's shape, and remove those that it adds.

    Weights of convolutions have the shape [channels, 1, kernel], and the gate of a shared expert [1, hidden_size].
    """
    stem, shape = _stem(name), entry.shape
    if stem in _VECTORS:
        return entry._replace(shape=(math.prod(shape),))
    if stem in _CONVOLUTIONS and len(shape) == 2:
        return entry._replace(shape=(shape[0], 1, shape[1]))
    return entry._replace(shape=(1, *shape)) if stem == "ffn_gate_inp_shexp" and len(shape) == 1 else entry


def _parameters(name: str) -> list[tuple[str, ...]]:
    """Return the decoder parameters that a GGUF tensor may hold, with "{i}" for the layer."""
    match = _parsed(name)
    prefix = "" if match["layer"] is None else "layers.{i}."
    suffix = "_bias" if match["kind"] == "bias" and match["stem"] != "exp_probs_b" else ""
    alternatives = _PARAMETERS[match["stem"]].split("|") if match["stem"] in _PARAMETERS else []
    return [tuple(f"{prefix}{param}{suffix}" for param in params.split()) for params in alternatives]


def block_types(file: GgufFile) -> dict[str, tuple[str, Form]]:
    """Return the block type and the form in memory of every matrix that stays quantised, by Hugging Face name.

    The matrices of a fused product have a common form, or all are dequantised. Embeddings are dequantised.
    """
    products: dict[tuple[str, str, str], dict[str, str]] = {}
    for hf_name, name in hf_names(file).items():
        layer, tensor = _layer(name), file.tensors[name]
        if layer and len(tensor.shape) >= 2 and (params := _parameters(name)):
            stem, _, param = params[-1][0].rpartition(".")
            products.setdefault((layer, stem, _PRODUCTS.get(param, param)), {})[hf_name] = tensor.type
    matrix_types: dict[str, tuple[str, Form]] = {}
    for types in products.values():
        if all(kind in FORMS for kind in types.values()):
            form = common_form(FORMS[kind] for kind in types.values())
            matrix_types |= {name: (kind, form) for name, kind in types.items()}
    return matrix_types


def describe_storage(path: Path, dtype: torch.dtype, in_blocks: bool = False) -> str:
    """Return a log line with the number of matrices by type and by the form in memory of a model in `dtype`.

    `in_blocks` tells whether matrices were loaded with `blocks`. MTP layers, which only a draft reads, are omitted.
    """
    file = read_gguf(path)
    forms, first = block_types(file), _first_predictor(file)
    counts: Counter[tuple[str, str]] = Counter()
    for hf_name, name in hf_names(file).items():
        kind, shape = file.tensors[name].type, file.tensors[name].shape
        if len(shape) >= 2 and (first is None or int(_layer(name) or 0) < first):
            _, form = forms.get(hf_name, (kind, None))
            held = str(dtype)[len("torch.") :] if form is None else f"int{form.bits} in groups of {form.group}"
            counts[kind, "in the file's blocks" if in_blocks and kind in FORMS else f"as {held}"] += 1
    descriptions = [
        f"{count} {kind} {'matrix' if count == 1 else 'matrices'} {held}" for (kind, held), count in counts.items()
    ]
    return f"{path.name}: holding {', '.join(descriptions)}"


class GgufTensors:
    """Tensors of a GGUF file by Hugging Face name, read as by safetensors' open files.

    Raises CheckpointError for an unsupported architecture, and for tensors of types that cannot be dequantised.

    Attributes: `file`, the header; `entries`, by Hugging Face name; `block_types`, of the tensors in blocks.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._names_in_file = hf_names(file)
        self.entries = {
            name: _with_all_dimensions(stored, file.tensors[stored]) for name, stored in self._names_in_file.items()
        }
        self.block_types = tuple(sorted({entry.type for entry in self.entries.values()} - TORCH_DTYPES.keys()))
        self._bytes = {name: np.memmap(file.path.parent / name, np.uint8, "c") for name in file.files}
        self._ggml = gguf_package(file.path)
        self._adds_one = rules_of(file).norm == "rms_plus_one"
        heads, kv_heads = (
            max(count, default=0) if isinstance(count := file.value(f"attention.{key}"), list) else count
            for key in ("head_count", "head_count_kv")  # per layer in hybrid models
        )
        self._permuted = {"attn_q": heads, "attn_k": kv_heads or heads} if file.architecture in PERMUTED else {}
        self._check_types()

    def stored(self, name: str) -> Tensor:
        """Return a tensor as stored: values, or uint8 [rows, bytes] with the blocks of each row."""
        entry = self.entries[name]
        data = torch.from_numpy(self._bytes[entry.file][entry.offset : entry.offset + entry.nbytes])
        if entry.type in TORCH_DTYPES:
            data = data.view(TORCH_DTYPES[entry.type]).reshape(entry.shape)
        else:
            data = data.reshape(*entry.shape[:-1], -1)
        heads = self._permuted.get(_stem(self._names_in_file[name]))
        if type(heads) is int and heads > 0 and len(data) % (2 * heads) == 0:  # else `ModelTensors` reports the shape
            # The converter moved rows [2, head_dim / 2] of a head to [head_dim / 2, 2]. A row's blocks stay together.
            permuted = data.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
            Blocks(entry.type, data, self._bytes[entry.file].base).release()  # drops the pages that were copied
            return permuted
        return data

    def blocks(self, name: str) -> Blocks:
        """Return a matrix of a block type in `FORMS`. Only rows that have to be permuted are read."""
        entry = self.entries[name]
        return Blocks(entry.type, self.stored(name), self._bytes[entry.file].base)

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor's values. Blocks are dequantised to float32."""
        kind, data = self.entries[name].type, self.stored(name)
        if kind in self.block_types:
            data = torch.from_numpy(self._ggml.quants.dequantize(data.numpy(), self._ggml.GGMLQuantizationType[kind]))
        stem = _stem(self._names_in_file[name])
        if stem == "ssm_a":
            return torch.log(-data.float())
        is_norm = name.endswith("norm.weight") or stem in ("nextn.enorm", "nextn.hnorm")
        adds_one = self._adds_one and is_norm and stem != "ssm_norm"
        return data.float() - 1.0 if adds_one else data

    def _check_types(self) -> None:
        """Raise CheckpointError with all tensors that the package gguf cannot dequantise."""
        problems = []
        for name, entry in self.entries.items():
            if entry.type in self.block_types and not _can_dequantize(self._ggml, entry.type):
                message = (
                    f"has type {entry.type}, which the package gguf cannot dequantise; requantise the file, such as "
                    "with llama-quantize to Q8_0, or update the package"
                )
                problems.append(Problem("dtype", repr(self._names_in_file[name]), message))
        if problems:
            raise CheckpointError(self.file.path, problems)


@functools.cache
def _can_dequantize(ggml: ModuleType, kind: str) -> bool:
    """Return whether the package gguf can dequantise a block type."""
    try:
        quant_type = ggml.GGMLQuantizationType[kind]
        ggml.quants.dequantize(np.zeros(ggml.GGML_QUANT_SIZES[quant_type][1], np.uint8), quant_type)
    except (KeyError, NotImplementedError):
        return False
    return True
