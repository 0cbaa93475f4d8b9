"""Compares tree decoding with plain decoding, and plain decoding with transformers: tokens and logits, bit for bit.

    python perf/identity.py                                     # everything, on the embedded models
    python perf/identity.py --prompts 16 --dtypes bfloat16 --batches 8 --out out.json
    python perf/identity.py --sampling --compile --out sampled.json

For every dtype and batch size, decodes all prompts plainly and with trees (every subset of the drafts, one SSM per
round, lookup, all sources, automatic), greedily or with the settings of --sampling, where a prompt has the same seed in
every run. Counts tokens that differ from plain decoding at the first batch size, and logits of accepted nodes that are
not `torch.equal` to those of plain decoding by the same engine. Greedy plain decoding in float32 is compared with
transformers, teacher-forced. Writes the results after every run, and exits with 1 on any difference.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
FIRST_SEED = 1000  # seed of prompt 0; each further prompt has the next seed
GREEDY: dict[str, dict[str, Any]] = {"greedy": {}}
SAMPLING: dict[str, dict[str, Any]] = {
    "T=0.7": {"temperature": 0.7},
    "T=1": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
}


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


def modes(llm: LLM, **options: Any) -> dict[str, SpecConfig]:
    """Return the modes to compare with plain decoding; `options` are those of their `SpecConfig`."""
    names = llm.engine.sources.ssms.names if llm.engine.sources.ssms else ()
    subsets = [subset for count in range(1, len(names) + 1) for subset in itertools.combinations(names, count)]
    result = {",".join(subset): SpecConfig(sources=subset, **options) for subset in subsets}
    if len(subsets) > 1:
        result["one a round"] = SpecConfig(sources=("ssm",), max_ssms=1, **options)
    result["lookup"] = SpecConfig(sources=("lookup",), **options)
    return result | {"everything": SpecConfig(**options), "auto": SpecConfig()}


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = measuring.parser(__doc__, grows=False, prompts=200, max_tokens=128, nodes=16, max_depth=16)
    parser.add_argument("--model", help="a folder; default: the embedded target")
    parser.add_argument("--draft", action="append", help="a folder; repeatable; default: the embedded SSMs")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's")
    parser.add_argument("--compile", action="store_true", help="LLM(compile=True)")
    parser.add_argument("--out", dest="json", type=Path, help="the same as --json")
    parser.add_argument("--sampling", action="store_true", help="compare sampled tokens instead of greedy ones")
    args = parser.parse_args(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    report = compare(args)
    bad = any(row["differing_tokens"] or row["differing_logit_rows"] for row in report["runs"])
    reference = report["transformers"]
    has_mismatch = reference is not None and reference["agree"] + reference["rounding_ties"] < reference["tokens"]
    return int(bad or has_mismatch)


def open_llm(args: argparse.Namespace, dtype: str, batch: int) -> LLM:
    drafts = args.draft or [name for name in default_names() if name.startswith("ssm-")]
    model = args.model or default_folder("target")
    return LLM(model, drafts=drafts, dtype=dtype, max_num_seqs=batch, compile=args.compile)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Run all comparisons; return the document, which is also written after every run."""
    report = measuring.setup(args, "nodes", "max_depth", "prompts", "max_tokens", "compile", commit=commit())
    runs: list[dict[str, Any]] = []
    report |= {"threads": torch.get_num_threads(), "runs": runs, "transformers": None}
    references: dict[tuple[str, str], list[list[int]]] = {}  # plain tokens by dtype and setting
    print(
        f"{'dtype':9} {'batch':>5} {'setting':10} {'sources':24} {'tokens':>7} {'differ':>6} {'logits':>6} {'tau':>5}"
    )
    for dtype, batch in itertools.product(args.dtypes, args.batches):
        llm = open_llm(args, dtype, batch)
        recorder, prompts = LogitRecorder(llm), read_prompts(args.prompts, llm)
        specs = {"plain": "off"} | modes(llm, nodes=args.nodes, max_depth=args.max_depth)
        for setting, options in (SAMPLING if args.sampling else GREEDY).items():
            shared_params = {"max_tokens": args.max_tokens, "ignore_eos": True} | options
            params = [SamplingParams(seed=FIRST_SEED + i, **shared_params) for i in range(len(prompts))]
            plain_logits: list[Tensor] = []
            for mode, spec in specs.items():
                start = time.perf_counter()
                outputs = llm.generate(prompts, params, spec=spec)
                seconds = time.perf_counter() - start
                llm.engine.check_integrity()
                tokens, logits = [output.outputs[0].token_ids for output in outputs], recorder.take(outputs)
                plain_logits = plain_logits or logits
                row = {"dtype": dtype, "batch": batch, "setting": setting, "sources": mode, "seconds": seconds}
                row |= {"tokens": sum(map(len, tokens))}
                row["differing_tokens"] = mismatches(tokens, references.setdefault((dtype, setting), tokens))
                row["differing_logit_rows"] = differing_rows(plain_logits, logits)
                row["acceptance_length"] = row["tokens"] / sum(output.metrics.target_passes for output in outputs)
                runs.append(row)
                line_format = "{dtype:9} {batch:5} {setting:10} {sources:24} {tokens:7} {differing_tokens:6} "
                print((line_format + "{differing_logit_rows:6} {acceptance_length:5.2f}").format(**row), flush=True)
                if report["transformers"] is None and (dtype, setting) == ("float32", "greedy"):
                    report["transformers"] = against_transformers(llm.model_path, outputs, logits)
                measuring.write_json(args.json, report)
    if report["transformers"] is not None:
        print(f"plain against transformers, float32: {report['transformers']}")
    return report


if __name__ == "__main__":
    sys.exit(main())
