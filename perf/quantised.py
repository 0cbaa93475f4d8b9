"""Measures quantised weights on a CPU: bfloat16, int8 and int4 on one grown model, interleaved.

    python perf/quantised.py --threads 1 --json out.json              # the embedded target grown to 0.5B
    python perf/quantised.py --grow 1B --modes eager                  # another size, without compiled passes
    python perf/quantised.py --activations --json out.json            # quality of int8 activations alone

Every repeat runs every engine once in turn, so that interference affects all of them. Reports tokens per second of
decoding (without prefill): median, min and max of the repeats; ratios are per repeat. Compares tree tokens with plain
decoding by the same engine. Quality is that of the quantised embedded target on held-out text (teacher-forced): the
share of positions with the same argmax as in bfloat16, and the mean KL(bfloat16 || quantised) in nats. --activations
compares SmolLM2 as stored (Q4_1), with activations in bfloat16 and in int8, with the same weights in float32.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import measuring
import torch

from treespec import LLM, SamplingParams
from treespec.bench.prompts import held_out_prompts
from treespec_kernels.attention.tree_batch import RequestRows
from treespec_weights import (
    ModelShape,
    default_folder,
    default_names,
    family_of,
    grow_checkpoint,
    grown_shape,
    parse_size,
    read_config,
)

FORMS = (None, "int8", "int4")
NODES = {"plain": "off", "auto": None}


def name_of(form: str | None) -> str:
    return form or "bfloat16"


def held_out(count: int) -> list[str]:
    """Return held-out texts, alternating their kinds."""
    entries = json.loads(measuring.HELDOUT.read_text())
    kinds: dict[str, list[str]] = {}
    for entry in entries:
        kinds.setdefault(entry["kind"], []).append(entry["text"])
    turns = [text for texts in zip(*kinds.values(), strict=False) for text in texts]
    return turns[:count]


def speed(folder: Path, compiled: bool, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the three engines, compiled or eager, and return their rows."""
    drafts = [name for name in default_names() if name.startswith("ssm-")]
    engines = {
        form: LLM(
            folder,
            drafts,
            device="cpu",
            dtype="bfloat16",
            quantization=form,
            compile=compiled,
            max_num_seqs=1,
            max_model_len=512,
        )
        for form in FORMS
    }
    texts, params = held_out(args.prompts), SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    rates: dict[tuple[str | None, str], list[float]] = {}
    tau: dict[tuple[str | None, str], float] = {}
    differing = dict.fromkeys(FORMS, 0)
    for repeat in range(args.repeats + 1):  # the first warms up
        for form, llm in engines.items():
            tokens = {}
            for nodes, spec in NODES.items():
                outputs = [llm.generate(text, params, spec=spec)[0] for text in texts]
                seconds = sum(output.metrics.seconds - output.metrics.ttft for output in outputs)
                tokens[nodes] = [output.outputs[0].token_ids for output in outputs]
                generated = sum(len(token_ids) for token_ids in tokens[nodes])
                tau[form, nodes] = generated / sum(output.metrics.target_passes for output in outputs)
                if repeat:
                    rates.setdefault((form, nodes), []).append((generated - len(texts)) / seconds)
            differing[form] += measuring.count_differing(tokens["plain"], tokens["auto"])[1]
    rows = []
    for (form, nodes), speeds in rates.items():
        base = rates[None, nodes]
        ratios = [ours / theirs for ours, theirs in zip(speeds, base, strict=True)]
        row = {
            "weights": name_of(form),
            "compile": compiled,
            "nodes": nodes,
            "tokens_per_second": statistics.median(speeds),
            "least": min(speeds),
            "largest": max(speeds),
            "over_bfloat16": statistics.median(ratios),
            "over_bfloat16_least": min(ratios),
            "over_bfloat16_largest": max(ratios),
            "acceptance_length": tau[form, nodes],
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
    texts = [tokenizer.encode(text)[:512] for text in held_out(args.texts)]
    return [agreement(engines[None], engines[form], texts) for form in FORMS[1:]]


def activations() -> list[dict[str, Any]]:
    """Measure the agreement of SmolLM2 as stored with its reading in float32, on its held-out instructions."""
    entries = json.loads(held_out_prompts(chat=True).read_text())
    options = {"drafts": [], "device": "cpu", "max_num_seqs": 1, "max_model_len": 1024, "compile": True}
    reference = LLM("smollm2", dtype="float32", **options)
    tokenizer = reference.get_tokenizer()
    texts = [tokenizer.encode(entry["prompt"])[:1000] for entry in entries]
    engines = [LLM("smollm2", dtype="bfloat16", activations=kind, **options) for kind in ("model", "int8")]
    return [agreement(reference, engine, texts) for engine in engines]


def agreement(reference: LLM, engine: LLM, texts: list[list[int]]) -> dict[str, Any]:
    """Compare the logits of two engines: share of positions with the same argmax, mean KL(reference || engine)."""
    num_same, divergence, count = 0, 0.0, 0
    for tokens in texts:
        p, q = logits_of(reference, tokens).log_softmax(-1), logits_of(engine, tokens).log_softmax(-1)
        num_same += int((p.argmax(-1) == q.argmax(-1)).sum())
        divergence += float((p.exp() * (p - q)).sum())
        count += len(tokens)
    frozen, base = engine.stats()["frozen"], reference.stats()["frozen"]["dtype"]
    row = {"weights": frozen["quantization"], "dtype": frozen["dtype"], "positions": count}
    row |= {"same_top_1": num_same / count, "kl_nats": divergence / count}
    print(
        f"{row['weights']}, {row['dtype']}: top-1 as in {base} at {num_same / count:.2%} of {count} "
        f"positions, KL {divergence / count:.5f} nats",
        flush=True,
    )
    return row


def main() -> None:
    parser = measuring.parser(__doc__, grow="0.5B", prompts=2, max_tokens=32, repeats=5, texts=24, threads=1)
    parser.add_argument("--folder", type=Path, help="folder of an existing grown model, or where to keep it")
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--activations", action="store_true", help="only measure the quality of int8 activations")
    args = parser.parse_args()
    if args.activations:
        measuring.write_json(args.json, {"setup": measuring.setup(args), "quality": activations()})
        return
    torch.set_num_threads(args.threads)
    source = default_folder("target")
    config = read_config(source)
    shape = grown_shape(ModelShape.from_hf(config, family_of(config, source), source), parse_size(args.grow))
    with tempfile.TemporaryDirectory(prefix="treespec-quantised-") as scratch:
        folder = args.folder or Path(scratch) / "target"
        if not (folder / "config.json").exists():
            grow_checkpoint(source, folder, shape, 0)
        rows = [row for mode in args.modes for row in speed(folder, mode == "compiled", args)]
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
