"""Measures the benefit of merging: acceptance of merged sources against each source alone, paired, by kind of text.

    python perf/merge.py                                     # held-out prompts, the embedded models
    python perf/merge.py --compare FOLDER --json out.json    # plus further drafts
    python perf/merge.py --model smollm2 --prompts 60 --max-tokens 128

Modes with equal numbers of nodes: every SSM alone; the three merged; the three with only the SSM of the largest weight
drafting per round (equal draft time); lookup alone; lookup and SSMs. All modes decode the same tokens (checked), so
target passes are comparable per prompt. Reports acceptance length (`tau`: tokens per target pass, bonus included) over
all prompts and over those with non-looping output (more than half of the 4-grams distinct), with paired bootstrap 95 %
intervals over prompts. `draft passes`: SSM forward passes over one level, per target pass.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import measuring
import numpy as np
import torch
from measuring import RESAMPLES, interval, tau

from treespec import LLM, SamplingParams, SpecConfig
from treespec.bench.prompts import choose, held_out_prompts
from treespec.bench.report import LOOPING, distinct_share
from treespec.startup.options import resolve_folders
from treespec.text.prompt_files import encode_prompt, has_chat_template, read_prompts


@contextmanager
def counting_passes(llm: LLM) -> Iterator[Counter[str]]:
    """Count the SSM passes of a run. Captured rounds are not counted, since they do not propose on the host."""
    total: Counter[str] = Counter()
    ssms, original = llm.engine.sources.ssms, llm.engine.sources.ssms.propose

    def propose(*args: Any) -> Any:
        trees = original(*args)
        total["passes"] += ssms.drafted.request_passes
        return trees

    ssms.propose = propose
    try:
        yield total
    finally:
        del ssms.propose


def difference(tokens: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> list[float]:
    """Return the paired bootstrap 95 % interval, over prompts, of the difference of acceptance lengths."""
    if not len(tokens):
        return [float("nan")] * 2
    picks = np.random.default_rng(0).integers(0, len(tokens), (RESAMPLES, len(tokens)))
    return interval(tau(tokens, ours, picks) - tau(tokens, theirs, picks))


def main() -> None:
    parser = measuring.parser(__doc__, grows=False, prompts=120, max_tokens=96, batch=8)
    parser.add_argument("--model", help="target; default: the embedded one")
    parser.add_argument("--draft", action="append", help="SSM of the target; repeatable. Default: as in LLM")
    parser.add_argument("--prompts-file", type=Path, help="default: held-out prompts of this repository")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", action="store_true", help="compiled passes")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--compare", type=Path, help="folder with further drafts as subfolders")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    ssms, folders = zip(*resolve_folders(args.model, args.draft), strict=True)
    others = sorted(folder for folder in args.compare.iterdir() if folder.is_dir()) if args.compare else []
    options = {"device": "cpu", "dtype": args.dtype, "max_num_seqs": args.batch, "compile": args.compile}
    llm = LLM(args.model, drafts=[*folders, *map(str, others)], max_model_len=1024, **options)
    tokenizer = llm.get_tokenizer()
    chat = has_chat_template(tokenizer)
    prompts = choose(read_prompts(args.prompts_file or held_out_prompts(chat), chat), args.prompts, seed=0)
    merged, one_ssm = (*ssms,), {"max_ssms": 1}
    modes: dict[str, dict[str, Any]] = {name: {"sources": (name,)} for name in [*ssms, *(f.name for f in others)]}
    modes |= {"SSMs merged": {"sources": merged}, "SSMs, one a round": {"sources": merged} | one_ssm}
    modes |= {"lookup": {"sources": ("lookup",)}, "SSMs and lookup": {"sources": (*merged, "lookup")}}
    modes |= {"SSMs and lookup, one a round": {"sources": (*merged, "lookup")} | one_ssm}
    texts = [{"prompt_token_ids": encode_prompt(tokenizer, prompt.content)} for prompt in prompts]
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, ignore_eos=True)
    plain = [output.outputs[0].token_ids for output in llm.generate(texts, params, spec="off")]
    kinds = np.array([prompt.kind for prompt in prompts])
    tokens = np.array([len(token_ids) for token_ids in plain])
    lively = np.array([distinct_share(token_ids) > LOOPING for token_ids in plain])
    by_kind = {kind: kinds == kind for kind in sorted(set(kinds.tolist()))}
    parts = {"not_looping": lively} | by_kind
    passes: dict[tuple[int, str], np.ndarray] = {}
    rows, differing = [], 0
    for nodes in args.nodes:
        for mode, options in modes.items():
            with counting_passes(llm) as counted:
                outputs = llm.generate(texts, params, spec=SpecConfig(nodes=nodes, **options))
            differing += sum(o.outputs[0].token_ids != token_ids for o, token_ids in zip(outputs, plain, strict=True))
            counts = passes[nodes, mode] = np.array([output.metrics.target_passes for output in outputs])
            unique = sum((Counter(output.metrics.accepted_only_by_source) for output in outputs), Counter[str]())
            row = {"nodes": nodes, "mode": mode, "tau": tau(tokens, counts)}
            row |= {f"tau_{name}": tau(tokens, counts, selection) for name, selection in parts.items()}
            row["draft_passes_per_round"] = counted["passes"] / int(counts.sum())
            row["accepted_only_by_source"] = dict(unique)
            rows.append(row)
            print(
                f"{nodes:3} {mode:30} tau {row['tau']:.3f}; "
                + ", ".join(f"{name.replace('_', ' ')} {row[f'tau_{name}']:.3f}" for name in parts)
                + f"; draft passes per round {row['draft_passes_per_round']:.2f}",
                flush=True,
            )
    claims = [claim for nodes in args.nodes for claim in compare(nodes, passes, tokens, by_kind, ssms)]
    for claim in claims:
        low, high = claim["interval"]
        print(
            f"{claim['nodes']:3} {claim['ours']} over {claim['theirs']}, {claim['over']}: "
            f"{claim['difference']:+.3f} [{low:+.3f}, {high:+.3f}], ratio {claim['ratio']:.3f}"
        )
    setup = {
        "prompts": len(texts),
        "kinds": {kind: int(selection.sum()) for kind, selection in by_kind.items()},
        "max_tokens": args.max_tokens,
        "not_looping": int(lively.sum()),
        "distinct_4grams": float(np.mean([distinct_share(token_ids) for token_ids in plain])),
        "batch": args.batch,
        "dtype": str(llm.config.dtype).removeprefix("torch."),
        "device": str(llm.config.device),
        "threads": llm.config.num_threads,
        "torch": torch.__version__,
        "outputs_that_differ": differing,
    }
    print(", ".join(f"{name} {value}" for name, value in setup.items()))
    measuring.write_json(args.json, {"setup": setup, "rows": rows, "claims": claims})


def compare(
    nodes: int,
    passes: dict[tuple[int, str], np.ndarray],
    tokens: np.ndarray,
    by_kind: dict[str, np.ndarray],
    ssms: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Compare merged modes with every single SSM, overall and by kind, and with and without lookup."""

    def claim(ours: str, theirs: str, over: str = "all", selection: np.ndarray | slice = slice(None)) -> dict[str, Any]:
        own_tokens, counts = tokens[selection], [passes[nodes, mode][selection] for mode in (ours, theirs)]
        a, b = (tau(own_tokens, each) for each in counts)
        names = {"nodes": nodes, "ours": ours, "theirs": theirs, "over": over}
        return names | {"difference": a - b, "ratio": a / b, "interval": difference(own_tokens, *counts)}

    singles = [mode for n, mode in passes if n == nodes and ("SSM" not in mode and mode != "lookup")]
    for ours in ("SSMs merged", "SSMs, one a round"):
        for single in singles:
            yield claim(ours, single)
        for kind, selection in by_kind.items():
            best = max(ssms, key=lambda name, s=selection: float(tau(tokens, passes[nodes, name], s)))
            yield claim(ours, best, f"{kind} (its best)", selection)
    for theirs in ("SSMs merged", "lookup"):
        yield claim("SSMs and lookup", theirs)


if __name__ == "__main__":
    main()
