"""Trains drafts for a target of another family and tokenizer with `treespec train`, and compares them with truncation.

    python perf/foreign_target.py --work FOLDER --target-minutes 15 --minutes 30 --json out.json

The target is a Qwen2 of about 6 M parameters with its own tokenizer, trained on documentation and source of installed
packages. Three SSMs of `treespec train` are compared with a truncated copy: the target's first layers, as many as an
SSM has, with its final norm and head. Reported are tokens per target pass on prompts of held-out packages at equal
nodes, with paired bootstrap 95 % intervals over prompts. A restart continues in the same folder.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import measuring
import numpy as np
import torch
from measuring import tau
from merge import difference
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "weights"))

from treespec import LLM, SamplingParams, SpecConfig, train_drafts
from treespec.training.loop import Budget, PauseRequest, StepLoss, train
from treespec_training import data, train_tokenizer
from treespec_training.evaluate import cut_prompts
from treespec_training.shapes import next_token_loss

KINDS = ("code", "prose")
SHAPE = {"hidden_size": 192, "num_hidden_layers": 12, "intermediate_size": 512, "num_attention_heads": 6}
VOCAB, WINDOW, STEP_WINDOWS, PEAK_RATE = 3072, 256, 12, 4e-3
PACKAGE_CAP = 400_000  # characters per package and kind
PROMPTS = 2000  # maximum prompts in the training data


def make_target(work: Path, minutes: float, seed: int) -> Path:
    """Train the target, and write it with prompts for training and measuring; return its folder."""
    folder = work / "target"
    if (folder / "config.json").exists():
        return folder
    documents = data.select(data.installed_documents(), KINDS, data.HELD_OUT, PACKAGE_CAP, seed)
    if not (work / "tokenizer.json").exists():
        work.mkdir(parents=True, exist_ok=True)
        train_tokenizer.train_tokenizer((d.text for d in documents[0]), VOCAB).save(str(work / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    for name, half, count in (("train", documents[0], PROMPTS), ("held", documents[1], 256)):
        prompts = cut_prompts(half, tokenizer, count, seed)
        lines = [json.dumps(asdict(prompt)) for prompt in prompts]
        (work / f"{name}.jsonl").write_text("\n".join(lines))
    for kind in KINDS:
        data.tokenize((d for d in documents[0] if d.kind == kind), tokenizer, work / f"{kind}.bin")
    streams = {kind: data.Stream(work / f"{kind}.bin") for kind in KINDS}
    mixture = data.Mixture(streams, data.SHARES, seed)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True, **SHAPE
    )
    config.bos_token_id = config.eos_token_id = config.pad_token_id = 0
    model = Qwen2ForCausalLM(config)

    def loss(model: nn.Module, step: int, done: float) -> StepLoss:
        windows = torch.from_numpy(mixture.windows(step, STEP_WINDOWS, WINDOW + 1))
        return StepLoss(next_token_loss(model, windows), windows[:, 1:].numel())

    train("target", model, loss, Budget(minutes), PEAK_RATE, work / "target.ckpt", PauseRequest())
    train_tokenizer.as_pretrained(tokenizer, 2048).save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def truncated(target: Path, layers: int, folder: Path) -> Path:
    """Write the target's first layers with its embedding, final norm and head; return the folder."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    model.config.layer_types = None
    model.save_pretrained(folder)
    return folder


def main() -> None:
    parser = measuring.parser(__doc__, grows=False, prompts=60, max_tokens=96, seed=0)
    parser.add_argument("--work", type=Path, required=True, help="folder of all results")
    parser.add_argument("--target-minutes", type=float, default=15)
    parser.add_argument("--minutes", type=float, default=30, help="time for `treespec train`")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32])
    args = parser.parse_args()
    target = make_target(args.work, args.target_minutes, args.seed)
    out = args.work / "drafts"
    if not (out / "report.json").exists():
        prompts = [args.work / "train.jsonl"]
        print(train_drafts(target, prompts, out, ssms=3, minutes=args.minutes, seed=args.seed, resume=out.exists()))
    ssms = [out / f"ssm-{i}" for i in (1, 2, 3)]
    layers = json.loads((ssms[0] / "config.json").read_text())["num_hidden_layers"]
    copy = truncated(target, layers, args.work / "truncated")
    llm = LLM(target, drafts=[*ssms, copy], max_num_seqs=8, max_model_len=512)
    lines = (args.work / "held.jsonl").read_text().splitlines()[: args.prompts]
    texts = [json.loads(line)["text"] for line in lines]
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    plain = [output.outputs[0].token_ids for output in llm.generate(texts, params, spec="off")]
    tokens = np.array([len(token_ids) for token_ids in plain])
    modes = {"three SSMs": ("ssm-1", "ssm-2", "ssm-3"), "truncated": ("truncated",)}
    modes |= {ssm.name: (ssm.name,) for ssm in ssms}
    rows, differing = [], 0
    for nodes in args.nodes:
        passes = {}
        for mode, sources in modes.items():
            outputs = llm.generate(texts, params, spec=SpecConfig(nodes=nodes, sources=sources))
            differing += sum(o.outputs[0].token_ids != token_ids for o, token_ids in zip(outputs, plain, strict=True))
            passes[mode] = np.array([output.metrics.target_passes for output in outputs])
        row = {"nodes": nodes, "tau": {mode: tau(tokens, counts) for mode, counts in passes.items()}}
        ours = passes.pop("three SSMs")
        margins = row["margins"] = {mode: difference(tokens, ours, counts) for mode, counts in passes.items()}
        rows.append(row)
        shown = ", ".join(f"{mode} {value:.3f}" for mode, value in row["tau"].items())
        low, high = margins["truncated"]
        print(f"{nodes:3} nodes: {shown}; three SSMs over truncated [{low:+.3f}, {high:+.3f}]", flush=True)
    print(f"outputs that differ: {differing}")
    setup = {"prompts": len(texts), "max_tokens": args.max_tokens, "layers": layers, "outputs_that_differ": differing}
    setup |= {"target_minutes": args.target_minutes, "minutes": args.minutes, "threads": llm.config.num_threads}
    measuring.write_json(args.json, {"setup": setup, "rows": rows})


if __name__ == "__main__":
    main()
