"""Measures target passes by number of rows: the cost of additional tree rows on this CPU.

    python perf/passes.py --model smollm2 --threads 2 --json out.json
    python perf/passes.py --model llama-1b --quantization int8 int4 --threads 2

Each model is measured as stored and in every `--quantization`; `llama-1b` has the shape of Llama 3.2 1B and random
weights. A pass scores a root and its children after 128 positions, up to the argmax of every row. Times are minima of
runs that alternate between the numbers of rows. Nothing else may run on the machine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory

import measuring
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from treespec import LLM, SamplingParams, SpecConfig
from treespec.request import Request
from treespec.startup.cost_measurement import least_seconds, star_pass

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 128
LLAMA_1B = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=True,
)


@contextmanager
def folder_of(model: str) -> Iterator[str]:
    """Yield a name that `LLM` accepts; `llama-1b` is written to a temporary folder."""
    if model != "llama-1b":
        yield model
        return
    with TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(LLAMA_1B, dtype=torch.bfloat16).save_pretrained(folder)
        yield folder


@torch.inference_mode()
def pass_seconds(llm: LLM, seconds: float) -> list[float]:
    """Return the seconds of a pass for each of `ROWS`, measured for about `seconds`."""
    runner, request = llm.engine.runner, Request([1] * (CONTEXT + 1), SamplingParams(), SpecConfig())
    request.pages = runner.cache.reserve(request.request_id, CONTEXT + ROWS[-1])
    request.context_len = CONTEXT
    runner.cache.scrub(request.pages)
    try:
        return least_seconds([partial(star_pass, runner, request, rows) for rows in ROWS], 3, seconds)
    finally:
        runner.cache.release(request.request_id, scrub=True)


def main() -> None:
    parser = measuring.parser(__doc__, grows=False, threads=2, seconds=10)
    parser.add_argument("--model", nargs="+", default=["smollm2"])
    parser.add_argument("--quantization", nargs="*", default=[], choices=["int8", "int4"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    passes = []
    for model in args.model:
        with folder_of(model) as folder:
            for form in (None, *args.quantization):
                llm = LLM(folder, [], quantization=form, device="cpu", max_num_seqs=1, max_model_len=512)
                times = [1000 * seconds for seconds in pass_seconds(llm, args.seconds)]
                ratios = [time / times[0] for time in times]
                passes.append({"model": model, "quantization": form, "ms": times})
                print(f"{model}, {form or 'as stored'}")
                for name, values in ("rows", ROWS), ("ms", times), ("of one row", ratios):
                    print(f"  {name:10}", *(f"{value:7.4g}" for value in values), flush=True)
                del llm
    setup = measuring.setup(args, "threads", "seconds", context=CONTEXT, rows=ROWS)
    measuring.write_json(args.json, {"setup": setup, "passes": passes})


if __name__ == "__main__":
    main()
