"""Measures treespec on a GPU: exactness, 8B passes, whole rounds, kernels. Ends with a table of targets.

    PYTHONPATH=.:kernels:weights python perf/gpu.py --seconds 400       # rows to perf/results/<device>/run-<time>.jsonl
    PYTHONPATH=.:kernels:weights python perf/gpu.py --only pass/        # rows whose names start so
    PYTHONPATH=.:kernels:weights python perf/gpu.py --dry-run           # two rows of each kind, tiny, on the CPU

Every row is stored and printed when it is measured. A failure becomes a row with an error (traceback in log.txt); if it
ends the process, another process continues. A section that exceeds its share of the time continues after the others.
Times are medians of replayed CUDA graphs with the 10th and 90th percentile. A floor is the time of copying as many
bytes: for a pass, one read of weights, K and V, and one write of the logits.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu_bench import Bench, Passes, spread
from processes import Figures, Section, Step, run, store
from torch import Tensor

from treespec import LLM, SamplingParams, SpecConfig
from treespec.bench.prompts import held_out_prompts
from treespec.bench.run import commit
from treespec.graphs.batch_round import BatchRound
from treespec.graphs.round_inputs import RoundInput, RoundLimits
from treespec.graphs.stack_passes import ModelStack
from treespec.models.model_config import ModelConfig
from treespec.text.prompt_files import read_prompts
from treespec.tree import TokenTree
from treespec_kernels.attention.tree_batch import PAGE_SIZE, RequestRows
from treespec_kernels.launch.graph_capture import GraphMemory
from treespec_kernels.launch.switches import VARIABLE, without
from treespec_kernels.linear.quantized import WeightForm
from treespec_kernels.ops import OPS, TUNABLE, cases_of
from treespec_kernels.ops.op import Case
from treespec_kernels.ops.shapes import KernelShape, Setting
from treespec_kernels.tuning.clock import Clock
from treespec_kernels.tuning.tuned import KernelConfigs, slug
from treespec_weights import LLAMA, ModelShape, default_folder, read_config
from treespec_weights.grow import grow_checkpoint, grown_shape
from treespec_weights.sizes import parse_size

H200_COPY = 4.31e12  # copy bandwidth of an H200 in bytes per second; the target of a plain pass refers to it
ROWS = (1, 8, 16, 32, 64)


# --- checks: untimed, several at once, longest first


def checks(bench: Bench) -> Iterator[Step]:
    yield "versions", 40, versions
    yield "check/generate", 100, check_generate
    yield "check/round of 1B", 100, check_round
    for off in ("", "pdl", "prefetch"):
        yield f"compile/8B{' without ' * bool(off)}{off}", 100, partial(compile_passes, off=off)
    for op in (*TUNABLE, *sorted(OPS.keys() - set(TUNABLE))):
        yield f"check/{op}", 80, partial(check_op, op=op)


def versions(bench: Bench) -> Figures:
    import triton

    query = "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    smi = "" if bench.dry else subprocess.getoutput(f"nvidia-smi {query} --format=csv,noheader")
    figures = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    return figures | {"gpu": smi, "commit": commit(), VARIABLE: os.environ.get(VARIABLE, "")} | copy_bandwidth(bench)


def copy_bandwidth(bench: Bench) -> Figures:
    """Measure the bytes per second read and written by a copy of 8 GB."""
    source = bench.random(1 << (12 if bench.dry else 32))
    target = torch.empty_like(source)
    figures = bench.timed(lambda: target.copy_(source), graph=False)
    return figures | {"bytes_per_second": 2 * source.nbytes / (1e-3 * figures["ms"])}


def cases(bench: Bench, op: str, model: ModelConfig, form: WeightForm | None = None, **loads: int) -> list[Case]:
    s = model.shape
    sizes = s.head_dim, s.num_heads, s.num_kv_heads, s.hidden_size, s.intermediate_size, s.vocab_size
    loads = {"requests": 1, "nodes": bench.nodes, "context": bench.context, "layers": s.num_layers} | loads
    shape = KernelShape(bench.dtype, *sizes, quantized=form)
    return [case for case in cases_of(op, Setting(shape, bench.device, **loads)) if case.weight]


def configuration(bench: Bench, case: Case) -> Any:
    """Return the configuration an engine would use."""
    default = case.default
    return default and KernelConfigs.load(bench.device).get(case.op, case.key, default)


def check_op(bench: Bench, op: str) -> Figures:
    """Compare an op with its reference, and its rows with each other, at the sizes of a 1B model."""
    form = WeightForm(8) if op == "quantized_row_linear" else None
    op_cases = cases(bench, op, bench.small, form, prefill=min(bench.prefill, 320))
    for case in op_cases:
        case.check(configuration(bench, case))
        case.release()
    return {"checked": len(op_cases)}


def check_generate(bench: Bench) -> Figures:
    """Compare trees of the embedded models with plain decoding; any difference is an error."""
    options = ["--device", bench.device.type, "--no-compile", "--max-tokens", "4" if bench.dry else "96"]
    return {"tokens": len(command("generate", "def add(a, b):", "--check", *options)["token_ids"])}


def command(*arguments: str, **environment: str) -> Any:
    """Run a treespec command and return its JSON output. Raises RuntimeError if it fails."""
    line = [sys.executable, "-m", "treespec", *arguments, "--json"]
    child = subprocess.run(
        line, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"} | environment
    )
    if child.returncode:
        raise RuntimeError(f"{arguments[0]} ended with {child.returncode}: {(child.stdout + child.stderr)[-2000:]}")
    return json.loads(child.stdout)


def check_round(bench: Bench) -> Figures:
    """Compare a captured tree pass's logits and a captured round's tokens with plain decoding."""
    depth, context = (2, 20) if bench.dry else (5, 700)
    passes = Passes.of(bench, bench.small, context + 4 * PAGE_SIZE)
    decoder, plain, choices = passes.decoder, [], [5]
    for step in range(depth + 1):
        plain.append(passes.tree(context + step, TokenTree.root(choices[-1]))()[0].clone())
        choices.append(int(decoder.best(plain[-1][None])[1]))
    tokens, parents, path = [5], [-1], [0]
    for token in choices[1:-1]:  # a wrong sibling before the right token
        tokens, parents = [*tokens, token - 1 if token else 1, token], [*parents, path[-1], path[-1]]
        path.append(len(tokens) - 1)
    count = 8 if bench.dry else 16
    for node in range(len(tokens), count):  # other children along the path
        tokens, parents = [*tokens, 30 + node], [*parents, path[node % depth]]
    probs = [0.9 - 0.02 * node for node in range(count)]
    tree, out = TokenTree.from_parents(tokens, parents, probs, "lookup"), torch.zeros(count, len(plain[0])).to(plain[0])
    launch = passes.tree(context, tree)
    replay = bench.capture(lambda: out.copy_(launch()))
    out.zero_()
    replay()
    differing = sum(not torch.equal(out[node], row) for node, row in zip(path, plain, strict=True))
    stack = ModelStack(decoder.kernels, decoder.tables, decoder.triton_attention, passes.pool)
    limits = RoundLimits(depth, (1, count), len(passes.pages), context + PAGE_SIZE)
    batch = BatchRound(1, limits, stack, [], None if bench.dry else GraphMemory.of(bench.device))
    drawing = 0.0, 0.0, 0, 0, np.zeros(0)
    round_input = RoundInput(context, [5], passes.pages, (), *drawing, depth, count, 0.0, context + PAGE_SIZE)
    for _ in range(2):  # second run: a replay
        batch.draft([round_input], depth, count, search=lambda: [tree])
        [result] = batch.verify()()
        if differing or result.tokens != choices[1:]:
            raise AssertionError(f"{differing} rows differ; the round gave {result.tokens}, not {choices[1:]}")
    return {"rows": len(path), "tokens": len(result.tokens)}


def compile_passes(bench: Bench, off: str) -> Figures:
    """Compile the kernels of 8B passes into Triton's cache, with one-layer passes."""
    s, kinds = bench.large.shape, (True,) if off else (True, False)
    model = bench.llama(1, s.hidden_size, s.intermediate_size, s.num_heads, s.num_kv_heads)
    for exact in kinds:
        passes = Passes.of(bench, model, 8 * (bench.context + PAGE_SIZE), exact)
        for rows, requests in ((1, 1), (3, 2)) if bench.dry else (*((rows, 1) for rows in ROWS), (32, 8)):
            with without(off):
                passes.tree(bench.context, rows, requests)()
    return {}


# --- passes of an 8B shape: by number of rows, without each feature, and with cuBLAS


def passes(bench: Bench) -> Iterator[Step]:
    yield "copy", 30, copy_bandwidth
    for rows in ROWS:
        yield f"pass/rows {rows}", 60, partial(time_pass, rows=rows)
    yield "pass/8 x 32", 30, partial(time_pass, rows=32, requests=8)
    for rows in ROWS:
        for off in ("pdl", "prefetch"):
            yield f"pass/rows {rows} without {off}", 30, partial(time_pass, rows=rows, off=off)
        yield f"pass/rows {rows} without capture", 30, partial(time_pass, rows=rows, graph=False)
    yield "pass/8 x 32 without larger_tiles", 30, partial(time_pass, rows=32, requests=8, off="larger_tiles")
    for rows, requests in ((1, 1), (32, 1), (32, 8)):
        name = f"{requests} x {rows}" if requests > 1 else f"rows {rows}"
        yield f"pass/{name} with cuBLAS", 60, partial(time_pass, rows=rows, requests=requests, exact=False)


def time_pass(
    bench: Bench, rows: int, requests: int = 1, context: int = 0, off: str = "", graph: bool = True, **kind: bool
) -> Figures:
    """Time a pass over one tree per request, or over a prompt (`chain`), with one feature disabled.

    Raises ValueError for NaN, infinity, or bits that differ without the feature.
    """
    chain = kind.pop("chain", False)
    opened, context, s = bench.passes(**kind), context or bench.context, bench.large.shape
    rows, requests = (min(rows, bench.nodes), min(requests, bench.requests)) if bench.dry else (rows, requests)
    chunk = [RequestRows.chain(context, rows, opened.pages)], [1] * rows, 1
    launch = opened.launch(*chunk) if chain else opened.tree(context, rows, requests)
    logits = launch().clone()
    with without(off):
        if not bool(logits.isfinite().all()) or not torch.equal(launch(), logits):
            raise ValueError(f"the pass computes NaN, infinity, or other bits without {off or 'anything'}")
        figures = bench.timed(launch, graph=graph)
    kv = requests * (context + rows) * 2 * s.num_layers * s.num_kv_heads * s.head_dim
    numbers = s.num_parameters() - s.vocab_size * s.hidden_size + kv + len(logits) * s.vocab_size
    figures |= {"rows_per_second": 1e3 * requests * rows / figures["ms"]}
    return bench.floor(numbers * bench.dtype.itemsize, figures)


# --- rounds of the embedded target grown to 8B, and plain decoding by a compiled Llama


def rounds(bench: Bench) -> Iterator[Step]:
    yield "round/plain", 120, partial(time_rounds, nodes=1)
    for nodes in (32, 16, 64):
        yield f"round/tree {nodes}", 40, partial(time_rounds, nodes=nodes)
    for off in ("", "captured_passes"):
        name = f"round/tree 32 step by step{' without ' * bool(off)}{off}"
        yield name, 40, partial(time_rounds, nodes=32, off=off, bad_words=["\u2603"])
    yield "round/tree 32 with cuBLAS", 80, partial(time_rounds, nodes=32, exact=False)
    yield "compiled/batch 1", 120, time_compiled


def open_llm(bench: Bench, exact: bool) -> LLM:
    """Open the target (grown unless in a dry run) with its three SSMs. Raises RuntimeError without captured rounds."""
    folder, source = bench.scratch / "8B", default_folder("target")
    if not bench.dry and not folder.exists():
        shape = grown_shape(ModelShape.from_hf(read_config(source), LLAMA, source), parse_size("8B"))
        grow_checkpoint(source, folder, shape, 0, bench.device)
    options: dict[str, Any] = {"compile": False, "max_model_len": 512} if bench.dry else {}
    options |= {"device": bench.device, "dtype": bench.dtype, "exact": exact, "max_num_seqs": 1}
    llm = LLM(source if bench.dry else folder, ["ssm-1", "ssm-2", "ssm-3"], SpecConfig(nodes=64), **options)
    if (mode := llm.stats()["frozen"]["rounds"]) != "on the device" and not bench.dry:
        raise RuntimeError(f"rounds run {mode}; see the log for the reason")
    return llm


def time_rounds(bench: Bench, nodes: int, exact: bool = True, off: str = "", **params: Any) -> Figures:
    """Time the parts of rounds: drafts, target pass, walk and commit, and the wait for the host (`gap_ms`)."""
    llm: LLM = bench.keep(exact, lambda: open_llm(bench, exact))
    prompts = [llm.get_tokenizer().encode(prompt.content) for prompt in read_prompts(held_out_prompts(chat=False))]
    prompts, count = prompts[:: len(prompts) // 6][: 1 if bench.dry else 6], 2 if bench.dry else 24
    shallow = {"max_depth": 2} if bench.dry else {}
    spec = "off" if nodes == 1 else SpecConfig(nodes=nodes, sources=("ssm",), **shallow)
    sampling = SamplingParams(max_tokens=400, ignore_eos=True, **params)
    seconds, records = [], []
    for prompt in prompts:
        with without(off), closing(llm.stream(prompt[: 16 if bench.dry else 64], sampling, spec=spec)) as stream:
            for _ in range(3):  # the first includes the prefill
                next(stream)
            with llm.add_round_observer(records.append):
                for _ in range(count):
                    began = time.perf_counter()
                    next(stream)
                    seconds.append(time.perf_counter() - began)
    tokens = sum(len(record.emitted) for record in records)
    figures = spread([1e3 * value for value in seconds]) | {"rounds": len(records)}
    figures |= {"tokens_per_second": tokens / sum(seconds), "tokens_per_pass": tokens / len(records)}
    draft = 1e3 * statistics.median(record.draft_seconds for record in records)
    verify = 1e3 * statistics.median(record.target_seconds for record in records)
    opened = Passes(llm.engine.runner.target, llm.engine.runner.cache.pools[0])
    target = bench.timed(opened.tree(128, nodes))["ms"]
    figures |= {"draft_ms": draft, "pass_ms": target, "walk_ms": verify - target}
    return figures | {"gap_ms": figures["ms"] - draft - verify, "rest_ms": figures["ms"] - draft - target}


def time_compiled(bench: Bench) -> Figures:
    """Time plain decoding with a static-cache torch Llama: layers compiled with max-autotune, one CUDA graph.

    Raises ValueError if compiled and eager layers differ by more than rounding.
    """
    bench.release()
    s, [rope] = bench.large.shape, bench.large.ropes
    kv_heads, dim, weights = s.num_kv_heads, s.head_dim, bench.weights(s)
    angles = bench.context * rope.inv_freq.to(bench.device)
    cos, sin = angles.cos(), angles.sin()
    position = torch.tensor([bench.context], device=bench.device)
    hidden = torch.arange(bench.context + PAGE_SIZE, device=bench.device) > position

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], None, 1e-5).to(x.dtype) * weight

    def rotated(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)

    def layer(x: Tensor, qkv: Tensor, o: Tensor, gate_up: Tensor, down: Tensor, norms: Any, kv: Tensor) -> Tensor:
        heads = F.linear(norm(x, norms[0]), qkv).view(-1, dim)
        q, k, v = heads.split([s.num_heads, kv_heads, kv_heads])
        kv[:, :, position] = torch.stack([rotated(k), v])[:, :, None]
        scores = (rotated(q).view(kv_heads, -1, dim) @ kv[0].mT).float() * dim**-0.5
        mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1).to(x.dtype) @ kv[1]
        x = x + F.linear(mixed.view(1, -1), o)
        gate, up = F.linear(norm(x, norms[1]), gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, down)

    layers = []
    for i in range(s.num_layers):
        params = {name: weights.pop(f"layers.{i}.{name}") for name in "attn_norm q k v o mlp_norm gate up down".split()}
        qkv, gate_up = torch.cat([params["q"], params["k"], params["v"]]), torch.cat([params["gate"], params["up"]])
        norms, kv = (params["attn_norm"], params["mlp_norm"]), bench.random(2, kv_heads, len(hidden), dim)
        layers.append((qkv, params["o"], gate_up, params["down"], norms, kv))

    def step(run: Callable[..., Tensor]) -> Tensor:
        x = F.embedding(position % 50, weights["embed"])
        for tensors in layers:
            x = run(x, *tensors)
        return F.linear(norm(x, weights["final_norm"]), weights["lm_head"])

    how: dict[str, Any] = {"backend": "eager"} if bench.dry else {"mode": "max-autotune-no-cudagraphs"}
    compiled, began = torch.compile(layer, fullgraph=True, dynamic=False, **how), time.perf_counter()
    logits, expected = step(compiled).float(), step(layer).float()
    seconds, error = time.perf_counter() - began, float((logits - expected).norm() / expected.norm())
    if not error < 0.3:  # bfloat16 rounding in 32 random layers; a wrong step exceeds 1
        raise ValueError(f"the compiled layers differ from the eager ones by {error:.1%}")
    return bench.timed(lambda: step(compiled)) | {"compile_seconds": seconds, "relative_error": error}


# --- kernels against copies and torch, prompts, batches, and tuned passes


def kernels(bench: Bench) -> Iterator[Step]:
    other_ops = ["tree_attention", *sorted(OPS.keys() - set(TUNABLE))]
    batch_load, context_load = {"requests": 8, "prefill": bench.prefill}, {"context": 16 * bench.context}
    yield from timed_cases(bench, "row_linear", **batch_load)
    yield from timed_cases(bench, "lm_head", **batch_load)
    yield from timed_cases(bench, "tree_attention", **context_load)
    yield "pass/rows 32 at 32k", 40, partial(time_pass, rows=32, context=(1 if bench.dry else 16) * bench.context)
    for exact, suffix in ((True, ""), (False, " with cuBLAS")):
        yield f"prefill/{bench.prefill}{suffix}", 60, partial(time_pass, rows=bench.prefill, chain=True, exact=exact)
    for requests, rows in ((1, 1), (4, 1), (16, 1), (64, 1), (4, 32), (16, 32), (64, 8)):
        yield f"pass/batch {requests} x {rows}", 40, partial(time_pass, rows=rows, requests=requests)
    yield "autotune/8B", 130, autotune
    for rows in ROWS:
        yield f"tuned/rows {rows}", 60, partial(time_pass, rows=rows, tuned=True)
    for op in other_ops:
        yield from timed_cases(bench, op)


def timed_cases(bench: Bench, op: str, **loads: int) -> Iterator[Step]:
    for case in cases(bench, op, bench.large, **loads):
        key = [f"{name} {value}" for name, value in case.key.items() if name not in ("dtype", "groups")]
        yield f"kernel/{op}, {', '.join(key)}, {case.load}", 40, partial(time_kernel, case=case)


def time_kernel(bench: Bench, case: Case) -> Figures:
    """Check a kernel and time it and torch's, rotating through copies of the inputs that together exceed the L2."""
    config = configuration(bench, case)
    case.check(config)
    copies = 1 if bench.dry else Clock(bench.device).copies(case.bytes)
    case.prepare(copies)
    figures = bench.timed(*(partial(case.run, config, i) for i in range(copies)), seconds=0.5)
    for name, baseline in case.entry.baselines.items():
        figures[f"{name} ms"] = bench.timed(*(partial(baseline, inputs) for inputs in case.inputs), seconds=0.5)["ms"]
    case.release()
    return bench.floor(case.bytes, figures)


def autotune(bench: Bench) -> Figures:
    """Tune the 8B shape. The tuned file is stored with the results, so that other measurements keep the defaults."""
    bench.release()  # frees memory for the command
    options = ["--model", str(bench.large.folder), "--device", bench.device.type]
    options += ["--dtype", str(bench.dtype).removeprefix("torch."), "--ops"]
    environment = {}
    if bench.dry:
        environment = {"TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(bench.scratch)}
        options += ["tree_attention", "--nodes", "2", "--context", "20"]
    else:
        options += [",".join(TUNABLE), "--budget-seconds", "80"]
    before = KernelConfigs.load(bench.device).file
    tuned = command("autotune", *options, **environment)["kernels"]
    if Path(tuned["file"]).exists():
        (shutil.copy if before else shutil.move)(tuned["file"], bench.out / Path(tuned["file"]).name)
    entries = [result["entry"] for result in tuned["results"] if result["entry"]]
    times = {f"{entry['op']}, {load}": times for entry in entries for load, times in entry["loads"].items()}
    return {load: [timing["default_microseconds"], timing["microseconds"]] for load, timing in times.items()}


# --- targets


def table(rows: dict[str, Figures], dry: bool = False) -> list[str]:
    """Return the lines of the table of targets. Times of a dry run are meaningless."""

    def of(name: str, key: str = "ms") -> float:
        return rows.get(name, {}).get(key, float("nan"))

    checked = [row for name, row in rows.items() if name.startswith("check/")]
    plain, trees = of("pass/rows 1"), [rows.get(f"round/tree {nodes}", {}) for nodes in (16, 32, 64)]
    tree = max(trees, key=lambda row: row.get("tokens_per_second", 0.0))
    speed_up = tree.get("tokens_per_second", float("nan")) / of("round/plain", "tokens_per_second")
    exactness = [of(name) / of(f"{name} with cuBLAS") for name in ("round/tree 32", "pass/rows 32")]
    criteria = [
        ("failed checks", sum("error" in row for row in checked) if checked else float("nan"), "<=", 0),
        ("8B plain pass at 2k, ms", plain, "<=", 4.0 * H200_COPY / of("copy", "bytes_per_second")),
        ("32 rows over a plain pass", of("pass/rows 32") / plain, "<=", 1.08),
        ("round of 32 nodes but for drafts and target pass, ms", of("round/tree 32", "rest_ms"), "<=", 0.7),
        ("exact over exact=False, 32 nodes", exactness[exactness[0] != exactness[0]], "<=", 1.1),
        ("speed-up of trees over tokens per pass", speed_up / tree.get("tokens_per_pass", 1.0), ">=", 0.8),
        ("compiled Llama over a plain pass", of("compiled/batch 1") / plain, ">=", 1.0),
    ]
    lines = []
    for text, value, sign, bound in criteria:
        is_met = value <= bound if sign == "<=" else value >= bound
        is_measured = value == value and not (dry and bound)
        verdict = f"{value:.3f}  {'met' if is_met else 'MISSED'}" if is_measured else "not measured"
        lines.append(f"{text:54} {sign} {bound:<6.3g} {verdict}")
    return lines


# checks run concurrently, longest first; everything else is timed and runs alone
SECTIONS = (Section(checks, 60, 8), Section(passes, 120), Section(rounds, 100), Section(kernels, 1e9))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=400.0, help="limit of the whole run")
    parser.add_argument("--out", type=Path, help="folder of the results; default: perf/results/<device>")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="rows whose names start with NAME")
    parser.add_argument("--dry-run", action="store_true", help="two rows of each kind, tiny, on the CPU")
    args = parser.parse_args()
    if args.dry_run:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    name = "cpu" if args.dry_run else subprocess.getoutput("nvidia-smi --query-gpu=name --format=csv,noheader")
    out = args.out or (Path(tempfile.mkdtemp()) if args.dry_run else Path("perf/results", slug(name.splitlines()[0])))
    out.mkdir(parents=True, exist_ok=True)
    file = out.resolve() / f"run-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    memory = Path("/dev/shm")  # a disk may take a minute to write the 16 GB of a grown model
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > 20 << 30
    with tempfile.TemporaryDirectory(prefix="treespec-gpu-", dir=memory if has_room else None) as scratch:
        make = partial(Bench, file.parent, Path(scratch), args.dry_run)
        sections = [section._replace(processes=1) for section in SECTIONS] if args.dry_run else SECTIONS
        rows = run(sections, make, file, args.seconds, args.only, args.dry_run)
    lines = table(rows, args.dry_run)
    store(file, "targets", {"lines": lines})
    print("\n".join(["", *lines, str(file)]))
    return int(any("error" in row for name, row in rows.items() if name.startswith("check/")) or not rows)


if __name__ == "__main__":
    sys.exit(main())
