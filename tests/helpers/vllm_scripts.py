"""Scripts that call what vLLM's offline examples call, written for these tests.

Each one imports from `vllm`; `ported` replaces these lines as docs/vllm.md says. `MODEL` is a folder, `DRAFT` another,
`ARGV` the command line. A script that is served leaves `outputs`, `params` and the `prompts` behind.
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
    """What an example calls.

    Attributes:
        text: the script.
        argv: its command line.
        answer: the error that says what to do instead, as a regular expression; None where the script is served.
    """

    text: str
    argv: tuple[str, ...] = ()
    answer: str | None = None


def ported(text: str) -> str:
    """The script with its import lines changed, and nothing else."""

    def line(match: re.Match[str]) -> str:
        module = match[1]
        for old, new in IMPORTS:
            if module == old or module.startswith(f"{old}."):
                return f"from {new}{module.removeprefix(old)} import"
        raise AssertionError(module)

    return re.sub(r"^from (vllm\S*) import", line, text, flags=re.MULTILINE)


_PROMPTS = 'prompts = ["def add(", "import os", "class A:", "    return"]\n'
_PARSER = """
from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
parser = EngineArgs.add_cli_args(parser)
parser.set_defaults(model=MODEL, runner="pooling", enforce_eager=True)
llm = LLM(**vars(parser.parse_args(ARGV)))
"""
_OPTIONS_OF_PARAMS = """
from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser(description="options of the engine and of sampling")
EngineArgs.add_cli_args(parser)
parser.set_defaults(model=MODEL)
group = parser.add_argument_group("sampling")
group.add_argument("--max-tokens", type=int)
group.add_argument("--temperature", type=float)
group.add_argument("--top-p", type=float)
group.add_argument("--top-k", type=int)
options = vars(parser.parse_args(ARGV))
asked = {name: options.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}

llm = LLM(**options)
params = llm.get_default_sampling_params()
for name, value in asked.items():
    if value is not None:
        setattr(params, name, value)
"""
_STEPS = """
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
    if step == RESET:
        assert engine.reset_prefix_cache(reset_running_requests=True)
    results: list[RequestOutput] = engine.step()
    for result in results:
        if result.finished:
            print(result)
            ended[result.request_id] = result
    step += 1
outputs = [ended[key] for key in sorted(ended)]
"""

SERVED = {
    "basic": Script(
        _PROMPTS
        + """
from vllm import LLM, SamplingParams

params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8)
llm = LLM(model=MODEL)
outputs = llm.generate(prompts, params)
for output in outputs:
    print(f"{output.prompt!r} {output.outputs[0].text!r}")
"""
    ),
    "generate": Script(
        _OPTIONS_OF_PARAMS + _PROMPTS + "outputs = llm.generate(prompts, params)\n",
        ("--max-tokens", "6", "--temperature", "0.7", "--top_k=20", "--max_model_len", "200", "--enforce-eager"),
    ),
    "chat": Script(
        _OPTIONS_OF_PARAMS
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
        ("--max-tokens", "5", "--no-enable-prefix-caching", "--gpu-memory-utilization", "0.4"),
    ),
    "automatic_prefix_caching": Script(
        """
from vllm import LLM, SamplingParams

table = "| a | b |\\n" * 9
llm = LLM(model=MODEL, enable_prefix_caching=True)
params = SamplingParams(temperature=0, max_tokens=6)
prompts = [table + question for question in ("x = ", "y = ")]
outputs = [llm.generate(prompt, sampling_params=params)[0] for prompt in prompts]
"""
    ),
    "prefix_caching": Script(
        _PROMPTS
        + """
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

prompts = ["# the same beginning\\n" + prompt for prompt in prompts]
params = SamplingParams(temperature=0.0, max_tokens=5)
regular = LLM(model=MODEL, gpu_memory_utilization=0.4)
before = [output.outputs[0].text for output in regular.generate(prompts, params)]
del regular
cleanup_dist_env_and_memory()
cached = LLM(model=MODEL, enable_prefix_caching=True, gpu_memory_utilization=0.4)
cached.generate(prompts[0], params)
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
    "llm_engine_example": Script("RESET = None\n" + _STEPS, ("--model", "MODEL", "--max-num-seqs", "2")),
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
    "reset_kv": Script("RESET = 3\n" + _STEPS, ("--model", "MODEL")),
    "run_one_batch": Script(
        """
from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
EngineArgs.add_cli_args(parser)
parser.set_defaults(model=MODEL)
parser.add_argument("--batch-size", type=int, default=1)
options = vars(parser.parse_args(ARGV))
size = options.pop("batch_size")
llm = LLM(**options)
params = llm.get_default_sampling_params()
params.max_tokens = 7
params.min_tokens = 7
params.ignore_eos = True
prompts = ["x = 1"] * size
outputs = llm.generate(prompts, params)
assert [len(output.outputs[0].token_ids) for output in outputs] == [7] * size
""",
        ("--batch-size", "3", "--dtype", "float"),
    ),
    "metrics": Script(
        _PROMPTS
        + """
from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector

params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8)
llm = LLM(model=MODEL, disable_log_stats=False)
outputs = llm.generate(prompts, params)
found = {}
for metric in llm.get_metrics():
    if isinstance(metric, Gauge | Counter):
        found[metric.name] = metric.value
    elif isinstance(metric, Vector):
        found[metric.name] = metric.values
    elif isinstance(metric, Histogram):
        found[metric.name] = (metric.sum, metric.count, metric.buckets)
assert found["vllm:generation_tokens"] == sum(len(output.outputs[0].token_ids) for output in outputs)
assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
"""
    ),
    "reproducibility": Script(
        _PROMPTS
        + """
from vllm import LLM, SamplingParams

params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8)
first, second = ([each.outputs[0].token_ids for each in LLM(model=MODEL, seed=7).generate(prompts, params)]
                 for _ in range(2))
assert first == second
outputs = LLM(model=MODEL, seed=8).generate(prompts, params)
assert [each.outputs[0].token_ids for each in outputs] != first
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
    "qwen_1m": Script(
        """
from vllm import LLM, SamplingParams

params = SamplingParams(
    temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, detokenize=True, max_tokens=6,
)
llm = LLM(
    model=MODEL, max_model_len=300, tensor_parallel_size=1, enforce_eager=True, enable_chunked_prefill=True,
    max_num_batched_tokens=131072, dtype="float", swap_space=8, block_size=32, cpu_offload_gb=0,
)
prompts = ["x = 1\\n" * 40]
outputs = llm.generate(prompts, params)
print(len(outputs[0].prompt_token_ids))
"""
    ),
}


def _opening(arguments: str, then: str = "") -> str:
    """A script that opens a model with these arguments, and calls a method of it."""
    return f"from vllm import LLM, SamplingParams\n\nllm = LLM(model=MODEL, {arguments})\n{then}\n"


def _engine(arguments: str) -> str:
    return (
        f"from vllm import EngineArgs, LLMEngine\n\nLLMEngine.from_engine_args(EngineArgs(model=MODEL, {arguments}))\n"
    )


_GENERATES = ("--runner", "generate")
_IMAGE = """llm.generate({"prompt": "what is it?", "multi_modal_data": {"image": b""}}, SamplingParams(max_tokens=4))"""
ANSWERED = {
    "classify": Script(_PARSER + "llm.classify(['a'])\n", answer="runner='pooling' is not supported; .*transformers"),
    "embed": Script(_PARSER + "llm.embed(['a'])\n", _GENERATES, r"LLM\.embed is not supported; .*AutoModel"),
    "score": Script(_PARSER + "llm.score('a', ['b'])\n", _GENERATES, r"LLM\.score is not supported; .*CrossEncoder"),
    "reward": Script(
        _PARSER + "llm.encode(['a'], pooling_task='token_classify')\n",
        _GENERATES,
        r"LLM\.encode is not supported; .*AutoModel",
    ),
    "simple_profiling": Script(
        _opening("profiler_config={'profiler': 'torch', 'torch_profiler_dir': 'x'}", "llm.start_profile()"),
        answer=r"LLM\.start_profile is not supported; run the calls within torch\.profiler\.profile\(\)",
    ),
    "chat_with_tools": Script(
        _opening("tokenizer_mode='mistral', config_format='mistral', load_format='mistral'"),
        answer="config_format='mistral' is not supported; open a folder in Hugging Face's format",
    ),
    "spec_decode, EAGLE": Script(
        _opening("speculative_config={'method': 'eagle', 'model': DRAFT, 'num_speculative_tokens': 2}"),
        answer=r"speculative_config=.*'eagle'.* is not supported; use drafts=\[\.\.\.\]",
    ),
    "context_extension": Script(
        _opening("hf_overrides={'rope_parameters': {'rope_type': 'yarn', 'factor': 4.0}}"),
        answer=r"hf_overrides=.* is not supported; change config\.json",
    ),
    "logits_processor/custom": Script(
        _opening("logits_processors=[object]"),
        answer=r"logits_processors=.*; give instances to the requests: SamplingParams\(logits_processors=\[\.\.\.\]\)",
    ),
    "multilora": Script(
        _engine("enable_lora=True, max_loras=1, max_lora_rank=8, max_num_seqs=2"),
        answer=r"enable_lora=True is not supported; merge the adapter into the model",
    ),
    "lora_with_quantization": Script(
        _engine("quantization='awq'"),
        answer="quantization='awq': leave it out; a checkpoint's own quantisation is read from its config",
    ),
    "prompt_embed": Script(
        _opening("enable_prompt_embeds=True"),
        answer="enable_prompt_embeds=True is not supported; prompts are text or token ids",
    ),
    "data_parallel": Script(
        _opening("tensor_parallel_size=2"),
        answer="tensor_parallel_size=2 is not supported; a model runs on one device here",
    ),
    "sharded_state": Script(
        _opening("load_format='sharded_state'"),
        answer="load_format='sharded_state' is not supported; weights are read from safetensors",
    ),
    "sleep_mode": Script(
        _opening("seed=0", "llm.sleep(level=1)"),
        answer=r"LLM\.sleep is not supported; delete the LLM to free its memory",
    ),
    "vision_language": Script(
        _opening("limit_mm_per_prompt={'image': 1}", _IMAGE),
        answer="multi_modal_data.*keys of a dict: 'prompt' and 'prompt_token_ids'",
    ),
}
