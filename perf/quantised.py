"""Measures the agreement of quantised models with their references on a CPU.

    python perf/quantised.py --json out.json                  # the embedded target in int8 and int4
    python perf/quantised.py --activations --json out.json    # int8 activations

Reports the share of positions with the reference's argmax, and the mean KL(reference || quantised) in nats,
teacher-forced on held-out text. --activations compares SmolLM2 as stored (Q4_1), with activations in bfloat16 and int8,
with the weights in float32. `treespec bench --quantization int8` measures the speed.

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

from treespec import LLM
from treespec.bench.prompts import held_out_prompts
from treespec.text.prompt_files import read_prompts
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_weights.gguf.reader import read_gguf

Logits = Callable[[list[int]], torch.Tensor]  # function from a sequence to its logits, fp32 [len(tokens), vocab]

DOCS, SOURCES = ("architecture", "usage", "models", "exactness"), ("heapq", "textwrap", "csv", "fractions")


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
    options: dict[str, Any] = {"drafts": [], "device": "cpu", "dtype": "bfloat16", "max_num_seqs": 1, "compile": False}
    reference, *engines = (LLM(quantization=form, **options) for form in (None, "int8", "int4"))
    tokenizer = reference.get_tokenizer()
    texts = [tokenizer.encode(text)[:512] for text in measuring.alternating()[: args.texts]]
    return [engines_agreement(reference, engine, texts) for engine in engines]


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
    frozen, base = engine.stats()["frozen"], reference.stats()["frozen"]["dtype"]
    row = {"weights": frozen["quantization"], "dtype": frozen["dtype"]}
    row |= agreement(partial(logits_of, reference), partial(logits_of, engine), texts)
    _print_agreement(f"{row['weights']}, {row['dtype']}", base, row)
    return row


def _print_agreement(name: str, base: str, row: dict[str, Any]) -> None:
    agreement = f"{row['same_top_1']:.2%} of {row['positions']} positions, KL {row['kl_nats']:.6f} nats"
    print(f"{name}: top-1 as in {base} at {agreement}", flush=True)


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
    for name, open_logits in (("treespec, bfloat16", compiled_logits), ("llama.cpp", llama_cpp_logits)):
        row = {"model": file.metadata.get("general.name"), "types": types, "engine": name}
        row |= agreement(lambda tokens: stored[tuple(tokens)], open_logits(path, options), texts)
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
    parser = measuring.parser(__doc__, grows=False, texts=24, positions=256, threads=1)
    parser.add_argument("--activations", action="store_true", help="measure int8 activations instead")
    parser.add_argument("--gguf", nargs="+", type=Path, help="measure these files instead, on `--positions` per text")
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="requantise them to these types first, such as Q4_K")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = files_agreement(args) if args.gguf else activations() if args.activations else quality(args)
    measuring.write_json(args.json, {"setup": measuring.setup(args, "threads", "positions"), "agreement": rows})


if __name__ == "__main__":
    main()
