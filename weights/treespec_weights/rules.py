"""Which checkpoint tensor holds which parameter of the decoder: one data declaration per family.

Adding a family means adding a `FamilyRules`; no code reads a family's name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from treespec_weights.errors import CheckpointConfigError, Problem, UnsupportedModelError
from treespec_weights.files import read_json

CONFIG = "config.json"
MAX_DIMENSION = 2**31 - 1
MAX_LAYERS = 10_000

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that fix the shape of every parameter of a decoder."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False  # the output head is the embedding
    attention_bias: bool = False  # on q, k, v
    o_bias: bool = False
    mlp_bias: bool = False  # on gate, up, down

    def parameters(self) -> dict[str, Shape]:
        """Decoder parameter name to shape, in order; a tied head is not a parameter of its own."""
        hidden, inter = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer: dict[str, Shape] = {"attn_norm": (hidden,), "q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden)}
        if self.attention_bias:
            layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
        layer |= {"o": (hidden, q)}
        if self.o_bias:
            layer |= {"o_bias": (hidden,)}
        layer |= {"mlp_norm": (hidden,), "gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
        if self.mlp_bias:
            layer |= {"gate_bias": (inter,), "up_bias": (inter,), "down_bias": (hidden,)}
        result: dict[str, Shape] = {"embed": (self.vocab_size, hidden)}
        for i in range(self.num_layers):
            result |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        result["final_norm"] = (hidden,)
        if not self.tied:
            result["lm_head"] = (self.vocab_size, hidden)
        return result

    def num_parameters(self) -> int:
        """The number of values in all parameters."""
        return sum(math.prod(shape) for shape in self.parameters().values())

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], rules: "FamilyRules | None" = None, folder: Path | str = "."
    ) -> "ModelShape":
        """Reads a parsed config.json (`read_config`) by the keys of its family; `folder` is for messages.

        Raises CheckpointConfigError with all missing, mistyped and contradictory keys, and UnsupportedModelError for
        a family or quantisation that is not covered.
        """
        rules = rules or family_of(config, folder)
        values: dict[str, Any] = dict(rules.constants)
        problems = []
        for name, key in rules.config_keys.items():
            value = config.get(key)
            if value is None:
                value = rules.defaults.get(name)
            if value is None and name not in _DERIVED:
                problems.append(Problem("config", repr(key), f"missing from {CONFIG}"))
            elif value is not None:
                message = _wrong_value(name, value)
                problems += [Problem("config", repr(key), message)] if message else []
            values[name] = value
        if not problems:
            _derive(values)
            problems = _contradictions(values, rules.config_keys)
        if problems:
            raise CheckpointConfigError(folder, list(dict.fromkeys(problems)))  # one key may feed two fields
        return cls(**values)


_DERIVED = ("num_kv_heads", "head_dim")
_FLAGS = tuple(f.name for f in fields(ModelShape) if f.type is bool)


def _wrong_value(name: str, value: object) -> str | None:
    if name in _FLAGS:
        return None if isinstance(value, bool) else f"{value!r} is not true or false"
    limit = MAX_LAYERS if name == "num_layers" else MAX_DIMENSION
    if type(value) is not int or not 1 <= value <= limit:
        return f"{value!r} is not a whole number from 1 to {limit}"
    return None


def _derive(values: dict[str, Any]) -> None:
    if values["num_kv_heads"] is None:
        values["num_kv_heads"] = values["num_heads"]
    if values["head_dim"] is None and values["hidden_size"] % values["num_heads"] == 0:
        values["head_dim"] = values["hidden_size"] // values["num_heads"]


def _contradictions(values: Mapping[str, Any], keys: Mapping[str, str]) -> list[Problem]:
    problems = []
    heads, kv_heads, hidden = values["num_heads"], values["num_kv_heads"], values["hidden_size"]
    if values["head_dim"] is None:
        message = f"{hidden} is not a multiple of {keys['num_heads']} {heads}, and there is no {keys['head_dim']!r}"
        problems.append(Problem("config", repr(keys["hidden_size"]), message))
    if heads % kv_heads:
        message = f"{heads} is not a multiple of {keys['num_kv_heads']} {kv_heads}"
        problems.append(Problem("config", repr(keys["num_heads"]), message))
    return problems


@dataclass(frozen=True)
class TensorRule:
    """One checkpoint tensor and the decoder parameters that it holds. `{i}` stands for the layer.

    A rule applies where the model has its parameters, so a bias needs no switch of its own. Layouts:
    "stacked": the parameters one below the other (`[q + k + v, hidden]`), also for one parameter alone;
    "per_head": stacked within each head (`[heads, (q, k, v), head_dim, hidden]`);
    "transposed": stacked, then transposed (`[in, out]`).
    """

    name: str
    params: tuple[str, ...]
    layout: Literal["stacked", "per_head", "transposed"] = "stacked"


@dataclass(frozen=True, kw_only=True)
class FamilyRules:
    """How a family's checkpoints spell the decoder: tensor names and config keys."""

    model_type: str  # of config.json
    tensors: tuple[TensorRule, ...]
    tied_copy: str  # the head's name; with a tied head it may be in the file, equal to the embedding
    ignored: tuple[str, ...] = ()  # derived buffers in old files
    config_keys: Mapping[str, str]  # ModelShape field -> key of config.json
    defaults: Mapping[str, bool] = field(default_factory=dict)  # where config.json may leave a key out
    constants: Mapping[str, bool] = field(default_factory=dict)  # what the family fixes without a key


def _alone(pairs: Mapping[str, str]) -> tuple[TensorRule, ...]:
    return tuple(TensorRule(name, (param,)) for name, param in pairs.items())


LLAMA = FamilyRules(
    model_type="llama",
    tensors=_alone(
        {
            "model.embed_tokens.weight": "embed",
            "model.layers.{i}.input_layernorm.weight": "layers.{i}.attn_norm",
            "model.layers.{i}.self_attn.q_proj.weight": "layers.{i}.q",
            "model.layers.{i}.self_attn.k_proj.weight": "layers.{i}.k",
            "model.layers.{i}.self_attn.v_proj.weight": "layers.{i}.v",
            "model.layers.{i}.self_attn.o_proj.weight": "layers.{i}.o",
            "model.layers.{i}.self_attn.q_proj.bias": "layers.{i}.q_bias",
            "model.layers.{i}.self_attn.k_proj.bias": "layers.{i}.k_bias",
            "model.layers.{i}.self_attn.v_proj.bias": "layers.{i}.v_bias",
            "model.layers.{i}.self_attn.o_proj.bias": "layers.{i}.o_bias",
            "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.mlp_norm",
            "model.layers.{i}.mlp.gate_proj.weight": "layers.{i}.gate",
            "model.layers.{i}.mlp.up_proj.weight": "layers.{i}.up",
            "model.layers.{i}.mlp.down_proj.weight": "layers.{i}.down",
            "model.layers.{i}.mlp.gate_proj.bias": "layers.{i}.gate_bias",
            "model.layers.{i}.mlp.up_proj.bias": "layers.{i}.up_bias",
            "model.layers.{i}.mlp.down_proj.bias": "layers.{i}.down_bias",
            "model.norm.weight": "final_norm",
            "lm_head.weight": "lm_head",
        }
    ),
    tied_copy="lm_head.weight",
    ignored=("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
    config_keys={
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "vocab_size": "vocab_size",
        "tied": "tie_word_embeddings",
        "attention_bias": "attention_bias",
        "o_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
    },
    defaults={"tied": False, "attention_bias": False, "o_bias": False, "mlp_bias": False},
)

FAMILIES = {rules.model_type: rules for rules in (LLAMA,)}


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a folder (a result of `resolve_folder`).

    Raises CheckpointError where it cannot be read, CheckpointConfigError where it is not a JSON object.
    """
    config = read_json(folder, CONFIG)
    if not isinstance(config, dict):
        raise CheckpointConfigError(
            folder, [Problem("config", repr(CONFIG), f"a JSON {type(config).__name__}, not an object")]
        )
    return config


def family_of(config: Mapping[str, Any], folder: Path | str = ".") -> FamilyRules:
    """The rules for `config["model_type"]`. Raises UnsupportedModelError, also for quantised checkpoints."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        message = f"{model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
        raise UnsupportedModelError(folder, [Problem("config", "'model_type'", message)])
    if config.get("quantization_config") is not None:
        message = "quantised checkpoints are not supported yet; use one in bfloat16, float16 or float32"
        raise UnsupportedModelError(folder, [Problem("config", "'quantization_config'", message)])
    return FAMILIES[model_type]
