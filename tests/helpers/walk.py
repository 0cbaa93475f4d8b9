"""A tiny random model of every causal architecture of the installed transformers, and what treespec makes of it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.helpers.architectures import quick_start
from tests.helpers.exactness import differences, run
from tests.helpers.families import save_model
from tests.helpers.models import OracleDrafter, greedy, new_folder, random_prompts, randomize
from treespec import LLM, SpecConfig
from treespec.errors import CheckpointError, TreespecError

VOCAB = 97
SIZES = {  # of configs, by keys' names
    32: "hidden_size d_model n_embd dim embed_dim emb_dim word_embed_proj_dim embedding_size hidden_dim dim_model",
    48: "intermediate_size ffn_dim n_inner dim_ff d_ff dff ffn_hidden_size dense_intermediate_size d_inner mlp_dim "
    "shared_expert_intermediate_size encoder_ffn_dim decoder_ffn_dim intermediate_size_mlp expert_ffn_hidden_size",
    24: "moe_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size",
    16: "q_lora_rank kv_lora_rank o_lora_rank mamba_d_state ssm_state_size mamba_d_ssm",
    12: "v_head_dim",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim attention_head_dim kv_channels rotary_dim dim_head swa_head_dim "
    "index_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim hidden_size_per_layer_input mamba_d_head "
    "pronunciation_embed_dim shape_embed_dim",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_local_experts "
    "num_experts n_routed_experts moe_num_experts num_decoder_attention_heads mamba_n_heads mamba_num_heads "
    "zero_expert_num index_topk",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_key_value_heads "
    "num_experts_per_tok moe_topk moe_k num_kv_heads top_k_experts linear_num_key_heads linear_num_value_heads",
    1: "first_k_dense_replace n_group topk_group bos_token_id",
    0: "eos_token_id num_kv_shared_layers",
    3: "pad_token_id",
    17: "sliding_window local_attention_window_len attention_chunk_size",
    VOCAB: "vocab_size vocab_size_per_layer_input shape_vocab_size pronunciation_vocab_size "
    "encoder_hash_byte_group_vocab",
    256: "max_position_embeddings n_positions n_ctx max_seq_len seq_length",
}
_SIZE_OF = {key: size for size, keys in SIZES.items() for key in keys.split()}
_DOTS3 = {"num_key_value_heads": 4, "head_dim": 16}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_ROPES = {"full_attention": _ROPE, "sliding_attention": _ROPE}
OWN: dict[str, dict[str, Any]] = {  # what else a model_type needs
    "cohere_compass_text": {"rope_parameters": _ROPES},
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "dots3_note": _DOTS3,
    "dots3_note_text": _DOTS3,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "inkling_text": {"unpadded_vocab_size": VOCAB},
    "inkling2_text": {"unpadded_vocab_size": VOCAB},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCAB},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "zaya": {"num_experts_per_tok": 1},
    "mamba2": {"num_heads": 8},
    "bamba": {"mamba_d_head": 16},
    "granitemoehybrid": {"mamba_d_head": 16},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_head": 8},
    "nemotron_h": {"n_groups": 2},
}
TREES = SpecConfig(nodes=16)
DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- architectures: python -m tests.helpers.walk -->", "<!-- end of architectures -->"


# What a row of the table says, and what is in a refusal's message.
REFUSALS = {
    "it keeps a recurrent state": "recurrent state",
    "its attention is not behind transformers' attention interface": "attention interface",
    "its experts are not behind transformers' experts interface": "experts interface",
    "its attention takes more than keys, values, a window, a cap and sinks": "arguments to att|own mask|mask dep",
    "its layers have unequal numbers of heads": "layers must agree",
    "its logits depend on more than tokens and their positions": "logits differ|flattened|does not run|attends|=-1;",
    "transformers has no causal language model for its text config": "no causal language model",
}
NATIVE, ADAPTED, UNBUILT = (
    "native",
    "run by transformers' code",
    "not tested: transformers does not build it in a small size",
)


class Outcome(NamedTuple):
    """What becomes of an architecture: the row of the table, and what treespec or transformers says."""

    row: str
    message: str = ""

    @classmethod
    def refused(cls, message: str) -> "Outcome":
        reasons = [reason for reason, pattern in REFUSALS.items() if re.search(pattern, message)]
        assert reasons, f"a refusal without a known reason: {message}"
        return cls(f"refused: {reasons[0]}", message)


def tiny_config(model_type: str) -> Any:
    """transformers' default config with small sizes, and a layer of every kind."""
    make = CONFIG_MAPPING[model_type]
    small, own = _shrunk(make().to_dict()), OWN.get(model_type, {})
    return make(**small | {key: small[key] | value if key == "text_config" else value for key, value in own.items()})


def _shrunk(config: Mapping[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_config"):
            small[key] = _shrunk(value)
        elif key in _SIZE_OF and not isinstance(value, bool | list | dict | str | float):
            small[key] = _SIZE_OF[key]
    if small.keys() & {"kv_lora_rank"}:
        small["num_key_value_heads"] = 4
        small.pop("head_dim", None)
    named = ("layer_types", "mlp_layer_types", "no_rope_layers")
    lists = {key: config[key] for key in named if isinstance(config.get(key), list) and config[key]}
    if lists:
        kinds = {key: list(dict.fromkeys(value)) for key, value in lists.items()}
        small["num_hidden_layers"] = count = max(2, *map(len, kinds.values()))
        small |= {key: [value[min(i, len(value) - 1)] for i in range(count)] for key, value in kinds.items()}
    return small


def outcome_of(model_type: str) -> Outcome:
    """Build the architecture, and compare its tokens in trees with transformers' and with plain decoding.

    Raises AssertionError if they differ, and whatever else goes wrong.
    """
    try:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(model_type)).eval()
    except Exception as error:
        return Outcome(UNBUILT, f"{type(error).__name__}: {error}")
    with torch.no_grad():
        randomize(model, gain=1.5, head_gain=1.5)
    folder = new_folder(model_type)
    save_model(model, folder)
    del model
    oracle = OracleDrafter([], 5, vocab=VOCAB)
    try:
        with quick_start():
            llm = LLM(folder, drafts=[oracle], device="cpu", max_model_len=128, compile=False)
    except (TreespecError, CheckpointError) as error:
        return Outcome.refused(str(error))
    prompts = random_prompts([5, 60], vocab=VOCAB)
    plain = run(llm, prompts, greedy(8))
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        for prompt, sequence in zip(prompts, plain.sequences, strict=True):
            logits = model(torch.tensor([sequence]), use_cache=False).logits[0]
            best = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
            assert best == sequence[len(prompt) :], f"{model_type}: not the tokens of transformers"
    oracle.truths = plain.sequences
    tree = run(llm, prompts, greedy(8), TREES)
    assert not (found := differences(plain, tree)), (model_type, found[:5])
    return Outcome(NATIVE if llm.engine.runner.target.backend == "native" else ADAPTED)


def documented() -> dict[str, str]:
    """Return the row of each architecture in the table of docs/models.md."""
    table = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    return {name.strip(" `"): row.strip() for row, names in rows[1:] for name in names.split(",")}


def write_table(rows: Mapping[str, str]) -> None:
    """Replace the table in docs/models.md."""
    order = [NATIVE, ADAPTED, *(f"refused: {reason}" for reason in REFUSALS), UNBUILT]
    lines = ["| | `model_type` |", "|---|---|"]
    for row in order:
        if names := sorted(name for name, found in rows.items() if found == row):
            lines.append(f"| {row} | {', '.join(f'`{name}`' for name in names)} |")
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text(before + BEGIN + "\n\n" + "\n".join(lines) + "\n\n" + END + rest.partition(END)[2])


if __name__ == "__main__":  # python -m tests.helpers.walk: rewrite the table
    write_table({name: outcome_of(name).row for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES})
