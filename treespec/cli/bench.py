"""`treespec bench`: measure the speed against plain decoding and transformers."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treespec.cli.group import Command, print_json, usage_error
from treespec.cli.options import Drafts, Json, Model, flags, parse_branching
from treespec.config.engine_options import EngineOptions
from treespec.utils.interrupts import raise_on_interrupt

if TYPE_CHECKING:
    from treespec.bench.options import Options
    from treespec.bench.progress import BenchProgress

_SEVERAL = ("--k-values", "--nodes", "--batch", "--combine", "--only", "--verification", "--data", "--texts")
PICTURES = (".png", ".svg", ".pdf")


class SeveralValues(Command):
    """Command with multi-value options: `--nodes 8 16` or `--nodes 8,16`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_flags(args))


def repeat_flags(args: Sequence[str]) -> list[str]:
    """Rewrite `--nodes 8 16` to `--nodes 8 --nodes 16` for multi-value options."""
    result: list[str] = []
    flag, first = None, False
    for arg in args:
        if arg.startswith("-"):
            flag = arg.partition("=")[0]
            flag, first = (flag, "=" not in arg) if flag in _SEVERAL else (None, False)
        elif flag is not None and not first:
            result.append(flag)
        else:
            first = False
        result.append(arg)
    return result


def _several(flag: str, default: str, text: str) -> Any:
    return typer.Option(flag, metavar="N...", help=f"{text} Several: {flag} {default}, or comma-separated.")


@flags(EngineOptions, "device", "dtype", "compile", "quantization")
def bench(
    model: Model = None,
    draft: Drafts = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="JSONL of Spec-Bench (turns), HumanEval (prompt) or plain (prompt, text). Default: held-out "
            "instructions for chat models, held-out texts for others.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, metavar="N", help="Number of prompts.")] = 12,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, metavar="N", help="Tokens per prompt.")] = 128,
    k_values: Annotated[
        list[str] | None, _several("--k-values", "3 5 7", "Drafted tokens per round, of chains and transformers.")
    ] = None,
    nodes: Annotated[list[str] | None, _several("--nodes", "8 16 32", "Rows of the target pass. Default: 16.")] = None,
    combine: Annotated[
        list[str] | None,
        typer.Option(
            "--combine",
            metavar="A+B...",
            help="Also measure these sets of sources, such as head+lookup, in trees of each size and in auto.",
        ),
    ] = None,
    batch: Annotated[
        list[str] | None, _several("--batch", "1 2 4 8", "Batch size; all batches are full. Default: 1.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="T",
            help="Sample, with new seeds per repeat, the same for all modes; skips transformers. Default: 0, greedy; "
            "0.8 with --verification.",
        ),
    ] = None,
    verification: Annotated[
        list[str] | None,
        typer.Option(
            "--verification",
            metavar="RULE...",
            help="Compare verification rules on a fixed tree instead: coupled, naive, rejection, traversal, or all.",
        ),
    ] = None,
    branching: Annotated[
        str | None,
        typer.Option(
            "--branching",
            metavar="A,B,C",
            help="Children of that tree by depth, such as 3,2,1. Default: derived from --nodes.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, metavar="N", help="Runs per mode.")] = 3,
    warmup: Annotated[int, typer.Option("--warmup", min=0, metavar="N", help="Uncounted warm-up batches.")] = 1,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="MODE...", help="Modes by name or pattern, such as 'tree-*'.")
    ] = None,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Skip transformers.")] = False,
    grow: Annotated[
        str | None,
        typer.Option(
            "--grow",
            metavar="SIZE",
            help="Grow the target to about SIZE parameters, such as 120M or 0.5B, with the same function: "
            "costs of the larger model, tokens of the target.",
        ),
    ] = None,
    grow_vocab: Annotated[
        int | None, typer.Option("--grow-vocab", metavar="N", help="Grow the vocabulary of target and drafts, too.")
    ] = None,
    keep: Annotated[Path | None, typer.Option("--keep", metavar="DIR", help="Keep the grown models in DIR.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, metavar="N", help="Default: torch's.")] = None,
    seed: Annotated[
        int,
        typer.Option("--seed", metavar="S", help="RNG seed of prompt selection, sampling and grown weights."),
    ] = 0,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="URL",
            help="Instead, send the prompts to this OpenAI-compatible server and measure latency and throughput, as "
            "vLLM's bench serve. The key is $OPENAI_API_KEY.",
        ),
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(
            "--request-rate", metavar="R", help="With --server: Poisson arrivals per second. Default: all at once."
        ),
    ] = None,
    max_concurrency: Annotated[
        int | None,
        typer.Option("--max-concurrency", metavar="N", min=1, help="With --server: requests in flight."),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Print the time of a round by part.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="F", help="Plot speed-up and acceptance by depth: .png, .svg or .pdf."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the JSON to FILE.")] = None,
    as_json: Json = False,
    **engine: Any,
) -> None:
    """Benchmark plain decoding, chains, trees and transformers in one run.

    All modes use the same weights, prompts and dtype; every batch is decoded by every mode in turn. Prefill is reported
    separately. With --verification: compares verification rules at a temperature, on a fixed tree drafted by SSMs only.
    """
    if server is not None:
        others = {
            "--draft": draft,
            "--k-values": k_values,
            "--nodes": nodes,
            "--combine": combine,
            "--batch": batch,
            "--verification": verification,
            "--only": only,
            "--grow": grow,
            "--plot": plot,
            "--threads": threads,
        }
        if refused := [flag for flag, value in others.items() if value is not None]:
            raise usage_error(f"{', '.join(refused)}: the server decides on it; drop it, or drop --server")
        rate = math.inf if request_rate is None else request_rate
        if not rate > 0:
            raise usage_error(f"--request-rate {request_rate}: valid: requests per second, above 0")
        load = {
            "url": server,
            "model": model,
            "prompts": prompts,
            "num_prompts": samples,
            "max_tokens": max_tokens,
            "temperature": temperature or 0.0,
            "request_rate": rate,
            "max_concurrency": max_concurrency,
            "seed": seed,
        }
        _bench_server(load, out, as_json)
        return
    if (request_rate, max_concurrency) != (None, None):
        raise usage_error("--request-rate and --max-concurrency go with --server URL")
    if branching is not None and (not verification or nodes):
        raise usage_error("--branching needs --verification and replaces --nodes")
    if (grow_vocab, keep) != (None, None) and grow is None:
        raise usage_error("--grow-vocab and --keep go with --grow SIZE")
    for path in (plot, out, keep):
        if path is not None and not path.absolute().parent.is_dir():
            raise usage_error(f"{path}: there is no folder {path.absolute().parent}")
    if plot is not None:
        _check_plot(plot)
    sizes: dict[str, Any] = {
        "k_values": integers("--k-values", k_values, (3, 5, 7)),
        "nodes": integers("--nodes", nodes, (16,), least=2),
        "batches": integers("--batch", batch, (1,)),
    }
    from treespec.bench.options import Options
    from treespec.bench.rule_comparison import TEMPERATURE, parse_rules

    raise_on_interrupt()
    rules = parse_rules(verification or ())
    options = Options(
        model=model,
        drafts=draft,
        prompts=prompts,
        samples=samples,
        max_tokens=max_tokens,
        **sizes,
        combinations=tuple(name for value in combine or () for name in value.split(",")),
        temperature=temperature if temperature is not None else TEMPERATURE if rules else 0.0,
        verification=rules,
        branching=None if branching is None else parse_branching(branching),
        repeats=repeats,
        warmup=warmup,
        peers=not no_peers,
        only=tuple(name for value in only or () for name in value.split(",")),
        seed=seed,
        **engine,
    )
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    document = _measure(options, grow, grow_vocab, keep)
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        from treespec.bench.plot import draw

        draw(document, plot)
    if as_json:
        print_json(document)
        return
    from treespec.bench.text import body, header

    typer.echo(f"{header(document)}\n\n{body(document, profile)}")


def _bench_server(load: dict[str, Any], out: Path | None, as_json: bool) -> None:
    try:
        from treespec.bench.server import Load, bench_server, table
    except ModuleNotFoundError as error:
        raise usage_error(
            f"--server needs the package {error.name}; install treespec with its extra: [serve]"
        ) from error
    raise_on_interrupt()
    document = bench_server(Load(**load))
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print_json(document) if as_json else typer.echo(table(document))


def integers(flag: str, values: Sequence[str] | None, default: tuple[int, ...], least: int = 1) -> tuple[int, ...]:
    """Parse unique whole numbers, separated by spaces or commas."""
    words = [word for value in values or () for word in value.split(",") if word]
    for word in words:
        if not word.isdecimal() or int(word) < least:
            raise usage_error(f"{flag} {word}: valid: whole numbers from {least}, such as 3 5 7")
    return tuple(dict.fromkeys(map(int, words))) or default


def _check_plot(path: Path) -> None:
    if path.suffix not in PICTURES:
        raise usage_error(f"--plot {path}: valid: files that end with {', '.join(PICTURES)}")
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise usage_error("--plot needs matplotlib; pip install treespec[perf]")


def _measure(options: "Options", grow: str | None, vocab: int | None, keep: Path | None) -> dict[str, Any]:
    from treespec.bench.run import bench as measure

    with ExitStack() as folders, _progress() as progress:
        if grow is None:
            return measure(options, None, progress)
        from treespec.bench.grow import grown

        progress.stage("growing the model")
        options, how = folders.enter_context(grown(options, grow, vocab, keep))
        return measure(options, how, progress)


PARTS = 20  # number of progress lines if stderr is not a terminal


@contextmanager
def _progress() -> Iterator["BenchProgress"]:
    """Show progress on stderr: a bar on a terminal, otherwise one line per twentieth of the runs."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    from treespec.bench.progress import BenchProgress, Plan, duration

    shows_bar = sys.stderr.isatty()

    class Shown(BenchProgress):
        expected = False  # whether the expected duration was printed
        twentieth = 0

        def stage(self, text: str) -> None:
            bar.clear()
            print(f"{text} ...", file=sys.stderr, flush=True)

        def began(self, plan: Plan) -> None:
            bar.total = plan.total
            runs = f"{plan.num_modes} modes, {plan.total} runs"
            self.stage(f"measuring {runs}; the duration is estimated after one run of each mode")

        def ran(self, plan: Plan) -> None:
            bar.update(plan.num_done - bar.n)
            twentieth = plan.num_done * PARTS // plan.total
            if plan.is_measured and not self.expected:
                self.expected = True
                bar.clear()
                remaining = f"the remaining {plan.total - plan.num_done} runs"
                print(
                    f"expected duration: about {duration(plan.seconds_left)} for {remaining}",
                    file=sys.stderr,
                    flush=True,
                )
            elif self.expected and twentieth > self.twentieth and not shows_bar:
                eta = f", about {duration(plan.seconds_left)} left" if plan.num_done < plan.total else ""
                print(f"{plan.num_done} of {plan.total} runs done{eta}", file=sys.stderr, flush=True)
            self.twentieth = twentieth

    with tqdm(desc="measuring", unit="run", leave=False, disable=not shows_bar) as bar:
        yield Shown()
