"""Compares tree decoding with plain decoding, and plain decoding with transformers: tokens and logits, bit for bit.

    python perf/identity.py                                     # everything, on the embedded models
    python perf/identity.py --prompts 16 --dtypes bfloat16 --batches 8 --out out.json
    python perf/identity.py --sampling --compile --out sampled.json    # sampled: see identity_sampled.py

For every dtype and batch size, decodes all prompts with trees (every subset of the drafts, one SSM per round, lookup,
all sources, automatic) and compares with plain decoding by the same engine. Counts differing tokens and logits of
accepted nodes that are not `torch.equal`. In float32, plain decoding is compared with transformers, teacher-forced.
With --sampling: compares coupled sampling with plain decoding of the same seeds, over settings, subsets of the drafts,
dtypes and batch sizes. Exits with 1 on any difference.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import identity_sampled as sampled
import measuring
import torch
from torch import Tensor
from tqdm import tqdm

from treespec import LLM, RequestOutput, RoundRecord, SamplingParams, SpecConfig
from treespec.bench.report import mismatches
from treespec.bench.run import commit
from treespec.engine.runner import Runner
from treespec_weights import default_folder, default_names

TIE = 1e-4  # maximum logit difference of a rounding tie, as a fraction of the row's RMS


class LogitRecorder:
    """Recorder of the logits of every emitted token, by request and position.

    Captured rounds do not expose logits, so they are not recorded.
    """

    def __init__(self, llm: LLM):
        self.rows: dict[tuple[str, int], Tensor] = {}
        self._last: dict[str, Tensor] = {}  # logits of each request's last tree, [num_nodes, vocab]
        runner: Runner = llm.engine.runner
        compute = runner.logits

        def logits(requests: Any, trees: Any) -> Tensor:
            result = compute(requests, trees)
            for request, rows in zip(requests, result.split([len(tree) for tree in trees]), strict=True):
                self._last[request.output_id] = rows
            return result

        runner.logits = logits  # type: ignore[method-assign]
        llm.add_round_observer(self._keep)

    def _keep(self, record: RoundRecord) -> None:
        rows = self._last.pop(record.request_id, None)
        if rows is not None:
            for depth, node in enumerate(record.path.tolist()):
                self.rows[record.request_id, len(record.context) + depth] = rows[node].clone()

    def take(self, outputs: list[RequestOutput]) -> list[Tensor]:
        """Return the logits of each output's tokens, [num tokens, vocab], and clear the records."""
        result = []
        for output in outputs:
            first = len(output.prompt_token_ids) - 1
            count = len(output.outputs[0].token_ids)
            result.append(torch.stack([self.rows[output.request_id, first + i] for i in range(count)]))
        self.rows.clear()
        return result


def read_prompts(count: int, llm: LLM) -> list[list[int]]:
    """Return held-out prompts as token ids, or random ids without a tokenizer."""
    tokenizer, vocab = llm.get_tokenizer(), llm.engine.runner.target.vocab_size
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, 160, (count,), generator=generator).tolist()
        return [torch.randint(1, vocab, (n,), generator=generator).tolist() for n in lengths]
    return [tokenizer.encode(text) for text in itertools.islice(itertools.cycle(measuring.alternating()), count)]


def modes(llm: LLM, nodes: int) -> dict[str, SpecConfig]:
    """Return the modes to compare with plain decoding."""
    subsets = sampled.subsets(llm)
    result = {",".join(subset): SpecConfig(nodes=nodes, sources=subset) for subset in subsets}
    if len(subsets) > 1:
        result["one a round"] = SpecConfig(nodes=nodes, sources=("ssm",), max_ssms=1)
    result["lookup"] = SpecConfig(nodes=nodes, sources=("lookup",))
    return result | {"everything": SpecConfig(nodes=nodes), "auto": SpecConfig()}


def differing_rows(logits: list[Tensor], tree_logits: list[Tensor]) -> int:
    """Count the logit rows that differ between two runs."""
    return sum(
        int((a[: len(b)] != b[: len(a)]).any(1).sum()) + abs(len(a) - len(b))
        for a, b in zip(logits, tree_logits, strict=True)
    )


def against_transformers(model: Path, plain: list[RequestOutput], logits: list[Tensor]) -> dict[str, Any]:
    """Compare every token of plain decoding with transformers' argmax, teacher-forced in fp32."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total = agree = ties = 0
    divergence = 0.0
    for output, rows in tqdm(list(zip(plain, logits, strict=True)), desc="transformers", disable=None):
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        with torch.inference_mode():
            scores = reference(torch.tensor([tokens])).logits[0, len(output.prompt_token_ids) - 1 : -1]
        token_ids = torch.tensor(output.outputs[0].token_ids)
        gap = scores.max(-1).values - scores.gather(1, token_ids[:, None])[:, 0]
        agrees = scores.argmax(-1) == token_ids
        tied = ~agrees & (gap < TIE * scores.pow(2).mean(-1).sqrt())
        total, agree, ties = total + len(token_ids), agree + int(agrees.sum()), ties + int(tied.sum())
        kl = torch.nn.functional.kl_div(rows.log_softmax(-1), scores.log_softmax(-1), log_target=True, reduction="none")
        divergence = max(divergence, float(kl.sum(-1).max()))
    return {"tokens": total, "agree": agree, "rounding_ties": ties, "max_kl": divergence}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; default: the embedded target")
    parser.add_argument("--draft", action="append", help="a folder; repeatable; default: the embedded SSMs")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--max-depth", type=int, default=6, help="with --sampling: maximum tree depth")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's")
    parser.add_argument("--compile", action="store_true", help="LLM(compile=True)")
    parser.add_argument("--json", "--out", dest="out", type=Path, help="write the results to FILE")
    parser.add_argument("--sampling", action="store_true", help="compare sampled tokens; resumes --out")
    parser.add_argument("--settings", nargs="+", default=list(sampled.SETTINGS), choices=list(sampled.SETTINGS))
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        return sample(args) if args.sampling else greedy(args)
    except ValueError as error:
        parser.error(str(error))


def open_llm(args: argparse.Namespace, dtype: str, batch: int) -> LLM:
    drafts = args.draft or [name for name in default_names() if name.startswith("ssm-")]
    model = args.model or default_folder("target")
    return LLM(model, drafts=drafts, dtype=dtype, max_num_seqs=batch, compile=args.compile)


def sample(args: argparse.Namespace) -> int:
    """Compare coupled sampling with plain decoding."""
    names = ("model", "prompts", "max_tokens", "nodes", "max_depth", "dtypes", "batches", "compile")
    setup = {
        **{name: getattr(args, name) for name in names},
        "drafts": args.draft,
        "settings": {name: sampled.SETTINGS[name] for name in args.settings},
        "verification": "coupled",
        "first_seed": sampled.FIRST_SEED,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    document = sampled.run(
        lambda dtype: open_llm(args, dtype, sampled.PLAIN_BATCH),
        lambda llm: read_prompts(args.prompts, llm),
        setup,
        args.out,
    )
    print(sampled.describe(document))
    return int(document["totals"]["differing_tokens"] > 0)


def greedy(args: argparse.Namespace) -> int:
    """Compare trees with plain decoding, and plain decoding with transformers."""
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    results: list[dict[str, Any]] = []
    reference: dict[str, Any] | None = None
    print(
        f"{'dtype':9} {'batch':>5}  {'sources':24} {'tokens':>7} {'differ':>6} {'logit rows':>10} {'tau':>5} {'s':>6}"
    )
    for dtype, batch in itertools.product(args.dtypes, args.batches):
        llm = open_llm(args, dtype, batch)
        recorder = LogitRecorder(llm)
        prompts = read_prompts(args.prompts, llm)
        plain = llm.generate(prompts, params, spec="off")
        plain_tokens = [output.outputs[0].token_ids for output in plain]
        plain_logits = recorder.take(plain)
        if dtype == "float32" and reference is None:
            reference = against_transformers(llm.model_path, plain, plain_logits)
        for mode, spec in modes(llm, args.nodes).items():
            start = time.perf_counter()
            tree = llm.generate(prompts, params, spec=spec)
            seconds = time.perf_counter() - start
            tokens = mismatches([output.outputs[0].token_ids for output in tree], plain_tokens)
            rows = differing_rows(plain_logits, recorder.take(tree))
            llm.engine.check_integrity()
            passes = sum(output.metrics.target_passes for output in tree)
            total = sum(output.metrics.generated_tokens for output in tree)
            row = {"dtype": dtype, "batch": batch, "sources": mode, "tokens": total, "differing_tokens": tokens}
            row |= {"differing_logit_rows": rows, "acceptance_length": total / passes, "seconds": seconds}
            results.append(row)
            print(
                f"{dtype:9} {batch:5}  {mode:24} {total:7} {tokens:6} {rows:10} {total / passes:5.2f} {seconds:6.1f}",
                flush=True,
            )
    if reference is not None:
        print(f"plain against transformers, float32: {reference}")
    report = {"nodes": args.nodes, "threads": torch.get_num_threads(), "torch": torch.__version__}
    report |= {"compile": args.compile, "commit": commit()}
    report |= {"runs": results, "transformers": reference}
    measuring.write_json(args.out, report)
    bad = any(row["differing_tokens"] or row["differing_logit_rows"] for row in results)
    unexplained = reference is not None and reference["agree"] + reference["rounding_ties"] < reference["tokens"]
    return int(bad or unexplained)


if __name__ == "__main__":
    sys.exit(main())
