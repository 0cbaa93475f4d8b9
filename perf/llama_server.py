"""Compares treespec with llama.cpp on a GGUF file and a smaller model of its family as draft, on a CPU.

    python perf/llama_server.py --model A.gguf --draft B.gguf --server bin/llama-server --json out.json
    python perf/llama_server.py ... --llama plain: "cache:--spec-type ngram-cache" --questions 2    # other modes
    python perf/llama_server.py --model random.gguf --shape qwen3-moe --skip starts prompt --temperatures 0 ...
    python perf/llama_server.py --model folder --shape qwen3-moe --temperatures 0    # without llama.cpp, in bfloat16

Every question is answered by every mode in turn, so that interference affects all of them: greedily, then sampled with
a seed. Each mode of llama.cpp is its own server, which stays open; treespec's modes are calls of one engine with the
draft. Both get the same tokens (from treespec's chat template), and end answers at the end token. Reports by mode
tokens per second without prefill (over all tokens, and median, minimum and maximum over questions) and tokens per
target pass; the time from process start to the first token and its peak memory, with the files in the page cache; the
prompt speed; and pass times by number of rows, each with logits (`treespec autotune`; for llama.cpp by
llama-batched-bench, which must be next to the server). Fails if treespec's tokens differ between its modes. Nothing
else may run on the machine.
"""

import argparse
import json
import os
import random
import resource
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import measuring
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3MoeConfig

from treespec import LLM, SamplingParams, SpecConfig, TokenTree
from treespec_weights.gguf.reader import read_gguf

CODING = (
    "Write a Python function that merges two sorted lists without using sort, with type hints and a docstring.",
    "Write a Python class for a bank account with deposit, withdraw and transfer methods that validate their input.",
    "Explain what this function does and rewrite it with a list comprehension:\n\ndef f(rows):\n    result = []\n"
    "    for row in rows:\n        if row['active'] and row['score'] > 10:\n            result.append(row['name'])\n"
    "    return result",
    "Write a SQL query that returns the three best paid employees of every department, and explain it briefly.",
    "Find the bug and show the corrected code:\n\ndef average(values):\n    total = 0\n    for value in values:\n"
    "        total += value\n    return total / len(values)\n\nprint(average([]))",
    "Write pytest tests for a function slugify(title) that lowercases, trims and joins the words with hyphens.",
)
GENERAL = (
    "Why do leaves change colour in autumn?",
    "Write a polite email that asks a landlord to repair the heating.",
    "Suggest a plan for a weekend in Lisbon with two children.",
    "Tell a short story about a lighthouse keeper who finds a message in a bottle.",
    "What are the advantages and disadvantages of working from home?",
    "Explain to a ten-year-old how vaccines work.",
)
QUESTIONS = [question for pair in zip(CODING, GENERAL, strict=True) for question in pair]
WARMUP = "Which day comes after Monday?"
# Options of llama-server by mode; DRAFT is replaced by the draft's path.
LLAMA = {
    "plain": "",
    "draft": "--spec-type draft-simple -md DRAFT --spec-draft-n-max 8 --spec-draft-p-min 0.6",
    "ngram-simple": "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 4",
    "ngram-mod": "--spec-type ngram-mod --spec-ngram-mod-n-match 3 --spec-ngram-mod-n-min 0 --spec-ngram-mod-n-max 4",
}
COMMON = "-c 2048 -np 1 --no-ui --cache-ram 0 --offline"
# Without -pps, which llama.cpp rejects for models with sections of rotary positions
BENCH = "-npp 32 -ntg 16 -npl 1,8,16 -c 1024 --output-format jsonl"
SHAPES = {
    "qwen3.5-0.8b": Qwen3_5TextConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_value_heads=16,
        linear_num_key_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-moe": Qwen3MoeConfig(  # two layers of Qwen3-30B-A3B
        hidden_size=2048,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        vocab_size=32768,
    ),
}
PATIENCE = 120.0  # maximum seconds until a server is ready


class Answer(NamedTuple):
    """An answer's tokens, and the time of all but the first one."""

    tokens: list[int]
    seconds: float
    passes: int  # target passes, excluding prefill
    drafted: int  # drafted tokens verified in these passes

    @property
    def rate(self) -> float:
        """Tokens per second without prefill."""
        return (len(self.tokens) - 1) / self.seconds


class Noise:
    """A drafter whose guesses are random."""

    name = "noise"

    def propose(self, requests: Any, max_depths: Any) -> list[TokenTree]:
        guesses = [[request.tokens[-1]] for request in requests]
        for tokens, depth in zip(guesses, max_depths, strict=True):
            tokens += (random.randrange(1000) for _ in range(depth))
        chains = ((tokens, range(-1, len(tokens) - 1)) for tokens in guesses)
        return [TokenTree.from_parents(*chain, probs=0.8, source=self.name) for chain in chains]

    def commit(self, requests: Any, paths: Any) -> None:
        """Learn nothing."""

    def release(self, request: Any) -> None:
        """Hold nothing."""


class Server:
    def __init__(self, command: Sequence[str]):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self._began, self._url = time.perf_counter(), f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def wait(self) -> None:
        """Wait until the server is ready. Raises RuntimeError if it exits or times out."""
        while time.perf_counter() - self._began < PATIENCE:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self._url}/health"):
                    return
            except OSError:  # connection refused, or 503 while loading
                time.sleep(0.005)
        raise RuntimeError(f"llama-server did not start:  {shlex.join(self.process.args)}")  # type: ignore[arg-type]

    def complete(self, tokens: list[int], max_tokens: int, temperature: float = 0.0, seed: int = 0) -> Any:
        """Return the response to a prompt, without reusing the server's prompt cache."""
        body = {"prompt": tokens, "n_predict": max_tokens, "temperature": temperature, "seed": seed}
        body |= {"samplers": ["temperature"], "cache_prompt": False, "return_tokens": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/completion", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    def answer(self, tokens: list[int], max_tokens: int, temperature: float, seed: int) -> Answer:
        response = self.complete(tokens, max_tokens, temperature, seed)
        timings, count = response["timings"], response["timings"]["predicted_n"]
        passes = count - timings.get("draft_n_accepted", 0)  # each pass adds one token to the accepted ones
        return Answer(response["tokens"], timings["predicted_ms"] / 1000, passes, timings.get("draft_n", 0))

    def start(self) -> dict[str, float]:
        """Return the seconds from the process start to the first token, and the peak memory."""
        self.wait()
        self.complete([1], 1)
        return {"seconds": time.perf_counter() - self._began, "peak_mib": self.peak_mib}

    @property
    def peak_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024


@contextmanager
def served(command: Sequence[str]) -> Iterator[Server]:
    server = Server(command)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait()


def generated(command: Sequence[str], threads: int) -> dict[str, float]:
    """Run a command that generates one token; return its seconds and its peak memory."""
    began = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {process.returncode}")
    return {"seconds": time.perf_counter() - began, "peak_mib": usage.ru_maxrss / 1024}


def answer(llm: LLM, spec: Any, tokens: list[int], max_tokens: int, temperature: float, seed: int) -> Answer:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    decoded = measuring.decode(llm, [(tokens, params)], spec)
    seconds, drafted = (
        decoded.total("seconds") - decoded.total("ttft"),
        decoded.total("nodes_verified") - decoded.passes,
    )
    return Answer(decoded.tokens[0], seconds, decoded.passes, drafted)


def random_model(shape: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(SHAPES[shape], dtype=torch.bfloat16).eval()


def transformers_answers(shape: str) -> Callable[..., Answer]:
    """Return a function that answers with transformers' model of a shape, of random weights in bfloat16."""
    model = random_model(shape)

    def generate(tokens: list[int], count: int) -> tuple[list[int], float]:
        began = time.perf_counter()
        output_ids = model.generate(torch.tensor([tokens]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return output_ids[0, len(tokens) :].tolist(), time.perf_counter() - began

    def answer(tokens: list[int], max_tokens: int, *_: Any) -> Answer:
        (_, ttft), (output, seconds) = (generate(tokens, count) for count in (1, max_tokens))
        return Answer(output, seconds - ttft, max_tokens, 0)

    return answer


def starts(llama: Mapping[str, list[str]], args: argparse.Namespace) -> dict[str, Any]:
    """Measure process starts, interleaved, after one start to warm the page cache."""
    base = [sys.executable, "-m", "treespec", "generate", WARMUP, "--model", str(args.model), "--max-tokens", "1"]
    drafts = {"plain": ["--no-spec"], "draft": ["--draft", str(args.draft)]}
    engines: dict[str, Any] = {
        f"treespec {name}": partial(generated, [*base, *options], args.threads) for name, options in drafts.items()
    }

    def start(command: list[str]) -> dict[str, float]:
        with served(command) as server:
            return server.start()

    engines |= {f"llama.cpp {name}": partial(start, command) for name, command in llama.items() if name in drafts}
    runs = measuring.interleaved(engines, args.starts)
    rows = {
        engine: {key: measuring.spread([run[key] for run in measured]) for key in measured[0]}
        for engine, (_, *measured) in runs.items()
    }
    for engine, row in rows.items():
        print(
            f"{engine:20} first token after {row['seconds']['median']:.2f} s, {row['peak_mib']['median']:.0f} MiB",
            flush=True,
        )
    return rows


def rates(answers: Mapping[str, list[Answer]]) -> dict[str, Any]:
    """Print and return the figures of every mode; compare tokens with the plain mode of the same engine."""
    rows = {}
    for mode, runs in answers.items():
        engine = mode.split()[0]
        count, by_question = sum(len(run.tokens) for run in runs), [run.rate for run in runs]
        num_passes = sum(run.passes for run in runs)
        pairs = zip(runs, answers.get(f"{engine} plain", runs), strict=True)
        row = rows[mode] = {
            "tokens": count,
            "tokens_per_second": (count - len(runs)) / sum(run.seconds for run in runs),
            "by_question": measuring.spread(by_question) | {"all": by_question},
            "tokens_per_pass": count / num_passes,
            "drafted_per_pass": sum(run.drafted for run in runs) / num_passes,
            "answers_that_differ_from_plain": sum(run.tokens != plain.tokens for run, plain in pairs),
        }
        line = "{tokens_per_second:6.1f} tokens/s, {tokens_per_pass:.2f} a pass of {drafted_per_pass:.2f} drafted"
        print(
            f"  {mode:20} {line.format(**row)}, {row['answers_that_differ_from_plain']} of {len(runs)} answers differ"
        )
    return rows


def answers(llm: LLM, servers: Mapping[str, Server], args: argparse.Namespace) -> dict[str, Any]:
    """Answer all questions in all modes, by temperature."""
    specs = {"plain": "off", "lookup": SpecConfig(sources=("lookup",)), "auto": None}
    if args.draft is None:
        specs = {"plain": "off", "auto": SpecConfig(sources=(Noise.name,))}
    elif llm.draft_names:
        specs |= {"draft": SpecConfig(sources=llm.draft_names[:1])}
    modes: dict[str, Callable[..., Answer]] = {f"treespec {name}": partial(answer, llm, s) for name, s in specs.items()}
    modes |= {f"llama.cpp {name}": server.answer for name, server in servers.items()}
    modes |= {"transformers plain": transformers_answers(args.shape)} if args.shape else {}
    modes = {name: mode for name, mode in modes.items() if not args.only or name in args.only}
    if args.shape:
        warmup, *prompts = ([*range(i + 1, i + 65)] for i in range(args.questions + 1))
    else:
        one_token = SamplingParams(max_tokens=1)
        conversations = [[{"role": "user", "content": text}] for text in (WARMUP, *QUESTIONS[: args.questions])]
        warmup, *prompts = (output.prompt_token_ids for output in llm.chat(conversations, one_token))
    for mode in modes.values():
        mode(warmup, 16, 0.0, 0)
    result = {}
    for temperature in args.temperatures:
        runs: dict[str, list[Answer]] = {name: [] for name in modes}
        for seed, prompt in enumerate(prompts):
            for name in [*modes][:: -1 if seed % 2 else 1]:  # a machine that becomes slower affects all equally
                runs[name].append(modes[name](prompt, args.max_tokens, temperature, seed))
        print(f"temperature {temperature}", flush=True)
        result[str(temperature)] = rates(runs)
    return result


def prompts_per_second(llm: LLM, server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the speed of reading a prompt of `args.prompt` tokens, from its start to the first token."""
    text = Path(__file__).read_text()
    tokens = llm.get_tokenizer().encode(text)[: args.prompt]
    one_token = SamplingParams(max_tokens=1)
    engines: dict[str, Callable[[], float]] = {
        "treespec": lambda: measuring.decode(llm, [(tokens, one_token)], "off").total("ttft"),
        "llama.cpp": lambda: server.complete(tokens, 1)["timings"]["prompt_ms"] / 1000,
    }
    runs = measuring.interleaved(engines, args.starts)
    rows = {engine: measuring.spread([len(tokens) / seconds for seconds in run[1:]]) for engine, run in runs.items()}
    for engine, row in rows.items():
        print(f"{engine:20} reads {len(tokens)} tokens at {row['median']:.0f} tokens/s", flush=True)
    return rows | {"tokens": len(tokens)}


def passes(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a pass by number of rows."""

    def output_of(*command: object) -> str:
        return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout

    tune = sys.executable, "-m", "treespec", "autotune", "--json", "--device", "cpu", "--seconds", args.seconds
    [curve] = json.loads(output_of(*tune, "--model", args.model, "--threads", args.threads))["curves"]
    treespec_seconds = dict(zip(curve["rows"], curve["verify_seconds"], strict=True))
    batched = args.server.with_name("llama-batched-bench")
    output = output_of(batched, "-m", args.model, "-t", args.threads, *BENCH.split())
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    llama_seconds = {line["pl"]: line["t_tg"] / line["tg"] for line in lines}
    rows = {
        "treespec": {str(count): 1000 * treespec_seconds[count] for count in llama_seconds},
        "llama.cpp": {str(count): 1000 * seconds for count, seconds in llama_seconds.items()},
    }
    for engine, times in rows.items():
        print(f"{engine:20} pass of", ", ".join(f"{count} rows {ms:.1f} ms" for count, ms in times.items()), flush=True)
    return rows


def main() -> None:
    parser = measuring.parser(
        __doc__, grows=False, threads=2, questions=12, max_tokens=128, prompt=512, starts=3, seconds=10
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="with --shape, also a folder, written if it is missing"
    )
    parser.add_argument("--draft", type=Path, help="without one, random guesses are the draft of nodes='auto'")
    parser.add_argument("--shape", choices=SHAPES, help="of a model with random weights, also run by transformers")
    parser.add_argument("--server", type=Path, help="llama-server; without one, only the answers are measured")
    parser.add_argument("--llama", nargs="+", metavar="NAME:OPTIONS", help="modes of llama.cpp; replaces the default")
    parser.add_argument("--only", nargs="+", metavar="MODE", help="modes to answer in, such as 'treespec auto'")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7])
    parser.add_argument("--skip", nargs="+", default=[], choices=("starts", "prompt", "passes"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.shape and not args.model.exists():
        random_model(args.shape).save_pretrained(args.model)
    options = dict(mode.split(":", 1) for mode in args.llama or ())
    options = options or (LLAMA if args.draft else {"plain": ""})
    files = [args.model] if args.draft is None else [args.model, args.draft]
    base = [str(args.server), "-m", str(args.model), "-t", str(args.threads), *COMMON.split()]
    commands = {name: [*base, *shlex.split(text.replace("DRAFT", str(args.draft)))] for name, text in options.items()}
    if args.server is None:
        commands, args.skip = {}, ["starts", "prompt", "passes"]
    document: dict[str, Any] = {"setup": measuring.setup(args, "threads", "questions", "max_tokens", "starts")}
    document["setup"] |= {"models": [*map(_name, files)], "llama.cpp": options, "common": COMMON}
    if "starts" not in args.skip:
        document["starts"] = starts(commands, args)
    with ExitStack() as stack:
        servers = {name: stack.enter_context(served(command)) for name, command in commands.items()}
        for server in servers.values():
            server.wait()
        llm = LLM(args.model, files[1:] or [Noise()], device="cpu", max_num_seqs=1, max_model_len=1024)
        if "prompt" not in args.skip:
            document["prompt"] = prompts_per_second(llm, next(iter(servers.values())), args)
        document["answers"] = answers(llm, servers, args)
        document["peak_mib"] = {f"llama.cpp {name}": server.peak_mib for name, server in servers.items()}
        document["memory"] = llm.stats()["memory"]
        document["peak_mib"]["treespec"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if "passes" not in args.skip:
        document["passes"] = passes(args)
    measuring.write_json(args.json, document)
    differing = {
        mode: row["answers_that_differ_from_plain"]
        for rows in document["answers"].values()
        for mode, row in rows.items()
        if mode.startswith("treespec")
    }
    assert not any(differing.values()), f"answers differ from plain decoding: {differing}"


def _name(path: Path) -> str:
    if path.is_dir():
        return path.name
    file = read_gguf(path)
    return f"{file.metadata.get('general.name', 'unnamed')}, {path.stat().st_size / 2**20:.0f} MiB"


if __name__ == "__main__":
    main()
