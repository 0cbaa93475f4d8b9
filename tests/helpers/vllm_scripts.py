"""Scripts that call what vLLM's offline examples call, written for these tests.

Each one imports from `vllm`; `ported` replaces these lines as docs/vllm.md says. `MODEL` is a folder, `DRAFT` another,
`LORA` an adapter's, `ARGV` the command line, `prompts` a few texts. A script that is served leaves `outputs`, `params`,
`prompts`, and `loras` if there are any, behind.
"""

import re
from typing import NamedTuple

# What docs/vllm.md says of import lines; the first that matches counts.
IMPORTS = (
    ("vllm.utils.argparse_utils", "treespec"),
    ("vllm.engine.arg_utils", "treespec"),
    ("vllm.engine.async_llm_engine", "treespec"),
    ("vllm.v1.engine.async_llm", "treespec"),
    ("vllm.v1.metrics.reader", "treespec.frontend.vllm_metrics"),
    ("vllm.distributed", "treespec.utils.memory"),
    ("vllm.lora.request", "treespec"),
    ("vllm", "treespec"),  # and vllm.sampling_params, vllm.inputs, vllm.outputs
)


class Script(NamedTuple):
    """What examples call, and their command line."""

    text: str
    argv: str = ""


def ported(text: str) -> str:
    """The script with its import lines changed, and nothing else."""

    def line(match: re.Match[str]) -> str:
        module = match[1]
        for old, new in IMPORTS:
            if module == old or module.startswith(f"{old}."):
                return f"from {new}{module.removeprefix(old)} import"
        raise AssertionError(module)

    return re.sub(r"^from (vllm\S*) import", line, text, flags=re.MULTILINE)


_PARSER = """
from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser(description="options of the engine")
parser = EngineArgs.add_cli_args(parser)
parser.set_defaults(model=MODEL)
"""
_PARAMS = (
    _PARSER
    + """
group = parser.add_argument_group("sampling")
for name, kind in (("--max-tokens", int), ("--temperature", float), ("--top-p", float), ("--top-k", int)):
    group.add_argument(name, type=kind)
options = vars(parser.parse_args(ARGV))
asked = {name: options.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}

llm = LLM(**options)
params = llm.get_default_sampling_params()
for name, value in asked.items():
    if value is not None:
        setattr(params, name, value)
"""
)

# By the rows of docs/vllm.md that they stand for.
SERVED = {
    "basic & metrics & reproducibility": Script(
        """
from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8)
first, second, other = ([each.outputs[0].token_ids for each in LLM(model=MODEL, seed=seed).generate(prompts, params)]
                        for seed in (7, 7, 8))
assert first == second != other
llm = LLM(model=MODEL, disable_log_stats=False)
outputs = llm.generate(prompts, params)
fields = {Counter: "value", Gauge: "value", Vector: "values", Histogram: "buckets"}
found = {metric.name: getattr(metric, fields[type(metric)]) for metric in llm.get_metrics()}
assert found["vllm:generation_tokens"] == sum(len(output.outputs[0].token_ids) for output in outputs)
assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
"""
    ),
    "generate & run_one_batch": Script(
        _PARAMS
        + """
params.min_tokens = 6
params.ignore_eos = True
outputs = llm.generate(prompts, params)
assert [len(output.outputs[0].token_ids) for output in outputs] == [6] * 4
""",
        "--max-tokens 6 --temperature 0.7 --top_k=20 --max_model_len 200 --enforce-eager --dtype float",
    ),
    "chat": Script(
        _PARAMS
        + """
said = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "y"},
    {"role": "user", "content": "def"},
]
one = llm.chat(said, params, use_tqdm=False)
several = llm.chat([said, said[:2]], params, use_tqdm=True)
other = llm.chat([said], params, use_tqdm=False, chat_template="{{ messages[-1].content }}")
outputs = [*one, *several, *other]
prompts = [output.prompt for output in outputs]
""",
        "--max-tokens 5 --no-enable-prefix-caching --gpu-memory-utilization 0.4",
    ),
    "multilora & lora_with_quantization": Script(
        """
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.lora.request import LoRARequest

args = EngineArgs(model=MODEL, enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2, max_num_seqs=256)
engine = LLMEngine.from_engine_args(args)
params = SamplingParams(temperature=0.0, max_tokens=6)
loras = [None, LoRARequest("sql", 1, LORA), LoRARequest("sql-again", lora_int_id=2, lora_path=LORA), None]
for number, (prompt, lora) in enumerate(zip(prompts, loras, strict=True)):
    engine.add_request(str(number), prompt, params, lora_request=lora)
finished = {}
while engine.has_unfinished_requests():
    finished |= {output.request_id: output for output in engine.step() if output.finished}
outputs = [finished[str(number)] for number in range(len(prompts))]
"""
    ),
    "automatic_prefix_caching & prefix_caching": Script(
        """
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

prompts = ["# the same beginning\\n" * 9 + prompt for prompt in prompts]
params = SamplingParams(temperature=0.0, max_tokens=5)
regular = LLM(model=MODEL, gpu_memory_utilization=0.4)
before = [output.outputs[0].text for output in regular.generate(prompts, params)]
del regular
cleanup_dist_env_and_memory()
cached = LLM(model=MODEL, enable_prefix_caching=True, gpu_memory_utilization=0.4)
cached.generate(prompts[0], sampling_params=params)
outputs = cached.generate(prompts, params)
assert [output.outputs[0].text for output in outputs] == before
"""
    ),
    "structured_outputs": Script(
        """
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

forms = [
    StructuredOutputsParams(choice=["Positive", "Negative"]),
    StructuredOutputsParams(regex=r"[a-z]{3}@[a-z]{2}\\.com\\n"),
    StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}),
    StructuredOutputsParams(grammar='root ::= "SELECT " column\\ncolumn ::= "col_1" | "col_2"\\n'),
]
prompts = ["feeling:", "mail:", "json:", "sql:"]
params = [SamplingParams(structured_outputs=form, max_tokens=40) for form in forms]
params[1].stop = ["\\n"]
llm = LLM(model=MODEL, max_model_len=100)
outputs = [llm.generate(prompt, sampling_params=one)[0] for prompt, one in zip(prompts, params)]
assert outputs[0].outputs[0].text in ("Positive", "Negative")
"""
    ),
    "llm_engine_example & reset_kv": Script(
        """
from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
parser = EngineArgs.add_cli_args(parser)
engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(ARGV)))
params = [
    SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=6),
    SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=9),
    SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1, max_tokens=7),
]
prompts = ["def add(", "import os", "class A:"]
waiting, ended, step = list(zip(prompts, params)), {}, 0
while waiting or engine.has_unfinished_requests():
    if waiting:
        engine.add_request(str(step), *waiting.pop(0))
    if step == 3:
        assert engine.reset_prefix_cache(reset_running_requests=True)
    results: list[RequestOutput] = engine.step()
    for result in results:
        if result.finished:
            print(result)
            ended[result.request_id] = result
    step += 1
outputs = [ended[key] for key in sorted(ended)]
""",
        "--model MODEL --max-num-seqs 2",
    ),
    "async_llm_streaming": Script(
        """
import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

prompts = ["def add(", "x = 1"]
params = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA)


async def stream_response(engine, prompt, request_id):
    pieces = []
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
        pieces += [completion.text for completion in output.outputs]
        if output.finished:
            break
    last = params.clone()
    last.output_kind = RequestOutputKind.FINAL_ONLY
    (whole,) = [output async for output in engine.generate(prompt, last, f"{request_id}-again")]
    assert whole.outputs[0].text == "".join(pieces)
    return whole


async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=MODEL, enforce_eager=True))
    try:
        return [await stream_response(engine, prompt, f"stream-{i}") for i, prompt in enumerate(prompts, 1)]
    finally:
        engine.shutdown()


outputs = asyncio.run(main())
"""
    ),
    "spec_decode": Script(
        """
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.metrics.reader import Counter

tokenizer = AutoTokenizer.from_pretrained(MODEL)
ids = [tokenizer.encode(text, add_special_tokens=False) for text in ("def add(", "import os")]
prompts = [TokensPrompt(prompt_token_ids=ids[0]), {"prompt_token_ids": ids[1], "multi_modal_data": None}]
for speculation in (
    {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 5, "prompt_lookup_min": 2},
    {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3, "enforce_eager": True},
):
    llm = LLM(
        model=MODEL, trust_remote_code=True, tensor_parallel_size=1, enable_chunked_prefill=True, enforce_eager=False,
        gpu_memory_utilization=0.9, speculative_config=speculation, disable_log_stats=False, max_model_len=200,
        limit_mm_per_prompt={"image": 5}, disable_chunked_mm_input=True, allowed_local_media_path="",
    )
    params = SamplingParams(temperature=0, max_tokens=12)
    outputs = llm.generate(prompts, sampling_params=params)
    totals = {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}
    drafts, accepted = (totals[f"vllm:spec_decode_num_{name}"] for name in ("drafts", "accepted_tokens"))
    assert 1 + accepted / drafts == llm.stats()["acceptance_length"]
assert llm.draft_names == ("ssm-1",)
"""
    ),
}


def _opened(arguments: str, call: str = "") -> Script:
    """A script that opens a model with these arguments, and then makes a call."""
    return Script(f"from vllm import LLM, SamplingParams\n\nllm = LLM(model=MODEL, {arguments})\n{call}\n")


_POOLING = _PARSER + "parser.set_defaults(runner='pooling')\nllm = LLM(**vars(parser.parse_args(ARGV)))\n"
_MISTRAL = "tokenizer_mode='mistral', config_format='mistral', load_format='mistral'"
_YARN = "hf_overrides={'rope_parameters': {'rope_type': 'yarn', 'factor': 4.0}}"
_IMAGE = """llm.generate({"prompt": "what is it?", "multi_modal_data": {"image": b""}}, SamplingParams(max_tokens=4))"""

# With the error, as a regular expression: what is not supported, and what to do instead.
ANSWERED = {
    "classify": (Script(_POOLING), "runner='pooling' .*transformers"),
    "embed": (Script(_POOLING + "llm.embed(['a'])", "--runner generate"), r"LLM\.embed .*AutoModel"),
    "simple_profiling": (
        _opened("profiler_config={'profiler': 'torch'}", "llm.start_profile()"),
        r"LLM\.start_profile .*; run the calls within torch",
    ),
    "chat_with_tools": (_opened(_MISTRAL), "config_format='mistral' .*; open a folder in Hugging Face's format"),
    "context_extension": (_opened(_YARN), r"hf_overrides=.*; change config\.json"),
    "logits_processor/custom": (
        _opened("logits_processors=[object]"),
        "give instances to the requests: SamplingParams",
    ),
    "prompt_embed": (_opened("enable_prompt_embeds=True"), "enable_prompt_embeds=True .*; prompts are text or"),
    "sharded_state": (_opened("load_format='sharded_state'"), "load_format='sharded_state' .*read from safetensors"),
    "sleep_mode": (_opened("seed=0", "llm.sleep(level=1)"), r"LLM\.sleep is not supported; delete the LLM"),
    "vision_language": (_opened("limit_mm_per_prompt={'image': 1}", _IMAGE), "multi_modal_data.*keys of a dict"),
}
