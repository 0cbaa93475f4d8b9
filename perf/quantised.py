"""Measures quantised weights on a CPU: bfloat16, int8 and int4 on one grown model, interleaved.

    python perf/quantised.py --threads 1 --json out.json              # the embedded target grown to 0.5B
    python perf/quantised.py --grow 1B --modes eager                  # another size, without compiled passes
    python perf/quantised.py --activations --json out.json            # quality of int8 activations alone

Every repeat runs every engine once in turn, so that interference affects all of them. Reports tokens per second of
decoding (without prefill): median, min and max of the repeats; ratios are per repeat. Compares tree tokens with plain
decoding by the same engine. Quality, measured on the quantised embedded target with held-out text: the share of
positions with the same argmax as in bfloat16, and the mean KL(bfloat16 || quantised) in nats, teacher-forced.
--activations compares SmolLM2 as stored (Q4_1), with activations in bfloat16 and int8, with the weights in float32.

    python perf/quantised.py --gguf A.gguf --threads 2 --json out.json
    python perf/quantised.py --gguf A.gguf --types Q4_0 Q6_K --threads 2    # made from A.gguf

compares compiled bfloat16 passes and llama.cpp (package llama-cpp-python) with eager float32 passes over the same
file's dequantised weights (4 bytes per parameter), on documentation of this repository and source of the standard
library. With --types, llama.cpp first requantises all matrices of the file to each type.
"""

import argparse
import importlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import measuring
import torch

from treespec import LLM, SamplingParams
from treespec.bench.grow import grown
from treespec.bench.options import Options
from treespec.bench.prompts import held_out_prompts
from treespec.text.prompt_files import read_prompts
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_weights.gguf.reader import read_gguf

Logits = Callable[[list[int]], torch.Tensor]  # function from a sequence to its logits, fp32 [len(tokens), vocab]

DOCS, SOURCES = ("architecture", "usage", "models", "exactness"), ("heapq", "textwrap", "csv", "fractions")
FORMS = (None, "int8", "int4")
NODES = {"plain": "off", "auto": None}


def speed(target: Options, compiled: bool, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the three engines, compiled or eager, and return their rows."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "compile": compiled}
    options |= {"max_num_seqs": 1, "max_model_len": 512}
    engines = {form: LLM(target.model, target.drafts, quantization=form, **options) for form in FORMS}
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    jobs = [(text, params) for text in measuring.alternating()[: args.prompts]]
    ways = {
        (form, nodes): partial(measuring.decode, llm, jobs, spec)
        for form, llm in engines.items()
        for nodes, spec in NODES.items()
    }
    runs = measuring.interleaved(ways, args.repeats)
    differing = {form: int(measuring.count_differing(runs[form, "plain"], runs[form, "auto"])[1]) for form in FORMS}
    speeds = {way: [run.tokens_per_second for run in measured[1:]] for way, measured in runs.items()}
    rows = []
    for form, nodes in ways:
        rate = measuring.spread(speeds[form, nodes])
        pairs = zip(speeds[form, nodes], speeds[None, nodes], strict=True)
        ratio = measuring.spread([ours / theirs for ours, theirs in pairs])
        newest = runs[form, nodes][-1]
        row = {
            "weights": form or "bfloat16",
            "compile": compiled,
            "nodes": nodes,
            "tokens_per_second": rate.pop("median"),
            **rate,
            "over_bfloat16": ratio.pop("median"),
            **{f"over_bfloat16_{name}": value for name, value in ratio.items()},
            "acceptance_length": sum(map(len, newest.tokens)) / newest.passes,
            "outputs_tokens_that_differ": differing[form],
            "weight_bytes": engines[form].stats()["memory"]["target_weights"],
        }
        rows.append(row)
        print(
            f"{'compiled' if compiled else 'eager':8} {row['weights']:8} {nodes:5} {row['tokens_per_second']:7.2f} "
            f"tokens/s [{row['least']:.2f}, {row['largest']:.2f}], x{row['over_bfloat16']:.2f} "
            f"[{row['over_bfloat16_least']:.2f}, {row['over_bfloat16_largest']:.2f}] of bfloat16, tau "
            f"{row['acceptance_length']:.2f}, {row['weight_bytes'] / 2**20:.0f} MiB",
            flush=True,
        )
    assert not any(differing.values()), f"trees differ from plain decoding: {differing}"
    return rows


@torch.inference_mode()
def logits_of(llm: LLM, tokens: list[int]) -> torch.Tensor:
    """Return the logits of a sequence, fp32 [len(tokens), vocab]."""
    cache, target = llm.engine.runner.cache, llm.engine.runner.target
    pages = cache.reserve("quality", len(tokens))
    try:
        rows = target.plan([RequestRows.chain(0, len(tokens), pages)], cache.pools[0])
        hidden = target.forward(torch.tensor(tokens), rows, cache.pools[0])
        return target.logits(hidden[: len(tokens)]).float()
    finally:
        cache.release("quality", scrub=True)


def quality(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the agreement of the quantised embedded target with bfloat16."""
    engines = {
        form: LLM(drafts=[], device="cpu", dtype="bfloat16", quantization=form, max_num_seqs=1, compile=False)
        for form in FORMS
    }
    tokenizer = engines[None].get_tokenizer()
    texts = [tokenizer.encode(text)[:512] for text in measuring.alternating()[: args.texts]]
    return [engines_agreement(engines[None], engines[form], texts) for form in FORMS[1:]]


def activations() -> list[dict[str, Any]]:
    """Measure the agreement of SmolLM2 as stored with SmolLM2 in float32, on its held-out instructions."""
    options = {"drafts": [], "device": "cpu", "max_num_seqs": 1, "max_model_len": 1024, "compile": True}
    reference = LLM("smollm2", dtype="float32", **options)
    tokenizer = reference.get_tokenizer()
    messages = [prompt.content for prompt in read_prompts(held_out_prompts(chat=True))]
    texts = [tokenizer.encode(message)[:1000] for message in messages]
    engines = [LLM("smollm2", dtype="bfloat16", activations=kind, **options) for kind in ("model", "int8")]
    return [engines_agreement(reference, engine, texts) for engine in engines]


def agreement(reference: Logits, logits: Logits, texts: Sequence[list[int]]) -> dict[str, Any]:
    """Compare the logits of two engines: share of positions with the same argmax, mean KL(reference || other)."""
    num_same, divergence, count = 0, 0.0, 0
    for tokens in texts:
        p, q = reference(tokens).log_softmax(-1), logits(tokens).log_softmax(-1)
        num_same += int((p.argmax(-1) == q.argmax(-1)).sum())
        divergence += sum(float((p[i].exp() * (p[i] - q[i])).sum()) for i in range(len(p)))
        count += len(tokens)
    return {"positions": count, "same_top_1": num_same / count, "kl_nats": divergence / count}


def engines_agreement(reference: LLM, engine: LLM, texts: Sequence[list[int]]) -> dict[str, Any]:
    """Compare two engines of treespec."""
    frozen, base = engine.stats()["frozen"], reference.stats()["frozen"]["dtype"]
    row = {"weights": frozen["quantization"], "dtype": frozen["dtype"]}
    row |= agreement(partial(logits_of, reference), partial(logits_of, engine), texts)
    _print_agreement(f"{row['weights']}, {row['dtype']}", base, row)
    return row


def _print_agreement(name: str, base: str, row: dict[str, Any]) -> None:
    shown = f"{row['same_top_1']:.2%} of {row['positions']} positions, KL {row['kl_nats']:.6f} nats"
    print(f"{name}: top-1 as in {base} at {shown}", flush=True)


def files_agreement(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare compiled bfloat16 passes and llama.cpp with eager float32, on GGUF files or on requantised ones."""
    rows = []
    for file in args.gguf:
        for kind in args.types or [None]:
            with TemporaryDirectory() as folder:
                path = file if kind is None else requantized(file, kind, Path(folder) / "model.gguf")
                rows += file_agreement(path, args)
    return rows


def file_agreement(path: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare the implementations on one file, with one model in memory at a time."""
    options: dict[str, Any] = {"drafts": [], "spec": "off", "device": "cpu", "max_num_seqs": 1, "max_model_len": 512}
    llm = LLM(path, dtype="float32", compile=False, **options)
    paths = [Path(__file__).parents[1] / "docs" / f"{name}.md" for name in DOCS]
    contents = [path.read_text() for path in paths]
    contents += [inspect.getsource(importlib.import_module(name)) for name in SOURCES]
    texts = [llm.get_tokenizer().encode(text)[: args.positions] for text in contents]
    stored = {tuple(tokens): logits_of(llm, tokens) for tokens in texts}
    del llm
    file = read_gguf(path)
    types = sorted({tensor.type for tensor in file.tensors.values() if len(tensor.shape) == 2})
    rows = []
    for name, opened in (("treespec, bfloat16", compiled_logits), ("llama.cpp", llama_cpp_logits)):
        row = {"model": file.metadata.get("general.name"), "types": types, "engine": name}
        row |= agreement(lambda tokens: stored[tuple(tokens)], opened(path, options), texts)
        rows.append(row)
        _print_agreement(f"{' '.join(types)}, {name}", "float32", row)
    return rows


def compiled_logits(path: Path, options: dict[str, Any]) -> Logits:
    return partial(logits_of, LLM(path, dtype="bfloat16", compile=True, **options))


def llama_cpp_logits(path: Path, options: dict[str, Any]) -> Logits:
    from llama_cpp import Llama

    length, threads = options["max_model_len"], torch.get_num_threads()
    llama = Llama(str(path), n_ctx=length, n_threads=threads, n_threads_batch=threads, logits_all=True, verbose=False)

    def logits(tokens: list[int]) -> torch.Tensor:
        llama.reset()
        llama.eval(tokens)
        return torch.from_numpy(llama.scores[: len(tokens)].copy())

    return logits


def requantized(file: Path, kind: str, out: Path) -> Path:
    """Requantise all matrices of a file whose inputs the block size divides; return `out`."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    names = (f"LLAMA_FTYPE_MOSTLY_{kind}{suffix}" for suffix in ("", "_S", "_MOE"))
    params.ftype = next(getattr(llama_cpp, name) for name in names if hasattr(llama_cpp, name))
    params.allow_requantize = params.pure = True
    if llama_cpp.llama_model_quantize(str(file).encode(), str(out).encode(), params):
        raise RuntimeError(f"llama.cpp cannot requantise {file} to {kind}")
    return out


def main() -> None:
    parser = measuring.parser(__doc__, grow="0.5B", prompts=2, max_tokens=32, repeats=5, texts=24, threads=1)
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--activations", action="store_true", help="only measure the quality of int8 activations")
    parser.add_argument("--gguf", nargs="+", type=Path, help="only measure the quality of these files")
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="requantise them to these types first, such as Q4_K")
    parser.add_argument("--positions", type=int, default=256, help="positions per text, for the 8 texts of --gguf")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.gguf:
        setup = measuring.setup(args, "threads", "positions")
        measuring.write_json(args.json, {"setup": setup, "agreement": files_agreement(args)})
        return
    if args.activations:
        measuring.write_json(args.json, {"setup": measuring.setup(args), "quality": activations()})
        return
    with grown(Options(device="cpu"), args.grow, None, None) as (target, summary):
        rows = [row for mode in args.modes for row in speed(target, mode == "compiled", args)]
    shape = summary.shape
    setup = measuring.setup(args, "threads", "prompts", "max_tokens", "repeats") | {
        "parameters": shape.num_parameters(),
        "layers": shape.num_layers,
        "hidden": shape.hidden_size,
        "mlp": shape.intermediate_size,
    }
    document = {"setup": setup, "speed": rows, "quality": quality(args) if args.texts else []}
    measuring.write_json(args.json, document)


if __name__ == "__main__":
    main()
