"""Train the embedded default models: `python weights/train_default.py`.

Stages: text of installed packages -> tokenizer -> target -> lessons (the target's probabilities on text and on its own
continuations) -> ssm-1, ssm-2, ssm-3 -> evaluation on held-out packages and export. Ctrl-C pauses without loss of
progress; `--resume` continues. Training time is set in minutes per stage, over which the learning rate is annealed.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import chain
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))

from treespec import LLM
from treespec.training import loop as train
from treespec.training.files import write_json
from treespec_training import data, distill, evaluate, rendered
from treespec_training import shapes as models
from treespec_training import train_tokenizer as tokenizer
from treespec_training.export import export, rounded, write_folder

# The drafts' shares of the kinds of text: each draft specialises in one kind.
DRAFTS = {
    "ssm-1": {"code": 0.8, "prose": 0.1, "data": 0.1},
    "ssm-2": {"code": 0.1, "prose": 0.8, "data": 0.1},
    "ssm-3": {"code": 0.1, "prose": 0.1, "data": 0.8},
}
# Baseline drafts, trained on all kinds equally: one of a draft's size, one with the layers of all three drafts.
COMPARED = {"generalist": 1, "triple": len(DRAFTS)}
PEAK_RATE = {"target": 4e-3, "draft": 3e-3}
SHALLOW = 0.3  # fraction of the target's schedule trained with a third of its layers
SHORT_WINDOWS = 0.8  # fraction of the target's schedule on half-length windows, for a quarter more tokens per second
SHALLOW_WINDOWS = 500_000_000  # offset that separates the shallow model's windows from the deep model's


@dataclass(frozen=True)
class Settings:
    """Settings that must not change when a run is resumed; stored as `settings.json` in the work folder."""

    kinds: list[str]
    held_out: list[str]
    text_roots: list[str]
    package_cap: int
    seed: int
    tiny: bool

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the vocabulary."""
        return 384 if self.tiny else 4096

    @property
    def lessons_per_step(self) -> int:
        """Lessons per training step of a draft."""
        return 4 if self.tiny else 8

    @property
    def window(self) -> int:
        """Tokens per training window of the target."""
        return 64 if self.tiny else 512

    def shape(self, name: str) -> dict[str, int]:
        """Return the configuration of a model. "shallow" is the target with a third of its layers."""
        target, draft = (models.TINY_TARGET, models.TINY_DRAFT) if self.tiny else (models.TARGET, models.DRAFT)
        if name == "shallow":
            target = target | {"num_hidden_layers": max(target["num_hidden_layers"] // 3, 1)}
        attention = models.TINY_ATTENTION if self.tiny else models.ATTENTION
        draft = draft | {"num_hidden_layers": COMPARED.get(name, 1) * draft["num_hidden_layers"]}
        return (target if name in ("target", "shallow") else draft) | attention

    def shares_of(self, name: str) -> list[float]:
        """Return a draft's shares of the kinds of text in use."""
        return [DRAFTS[name][kind] if name in DRAFTS else 1.0 for kind in self.kinds]


class Build:
    """A run in a work folder.

    Every stage stores its result there, and returns at once if the result exists.
    """

    def __init__(self, args: argparse.Namespace, settings: Settings) -> None:
        self.args, self.settings, self.work = args, settings, args.work
        self.pause = train.PauseRequest()
        name = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(name)
        self.progress: dict[str, train.Progress] = {}

    def run(self) -> None:
        """Run all stages in order."""
        with self.pause.listening():
            self.text()
            tokens = self.tokens()
            drafts: list[LlamaForCausalLM] = []
            target = self.target(tokens)
            text, continued = self.lessons(target, tokens)
            for index, name in enumerate(DRAFTS):
                drafts.append(self.draft(name, index, target, drafts, text, continued))
            self.finish(target, dict(zip(DRAFTS, drafts, strict=True)))
            if self.args.compare:
                for index, name in enumerate(COMPARED, start=len(DRAFTS)):
                    model = self.draft(name, index, target, [], text, continued)
                    write_folder(self.work / "compare" / name, model, self.tokenizer)

    def text(self) -> None:
        """Collect and split the text: `train.jsonl`, `heldout.jsonl`."""
        if (self.work / "heldout.jsonl").exists():
            return
        s = self.settings
        roots = [Path(root) for root in s.text_roots]
        documents = data.folder_documents(roots) if roots else data.installed_documents()
        halves = data.select(documents, ("code", *s.kinds), s.held_out, s.package_cap, s.seed)
        # Render after the split, so that duplicates of held-out files are not rendered.
        everything = (chain.from_iterable((d, *rendered.rendered(d)) for d in half) for half in halves)
        training, held_out = ([d for d in half if d.kind in s.kinds] for half in everything)
        if not training or not held_out:
            raise ValueError(f"{len(training)} training and {len(held_out)} held-out documents; both are needed")
        data.write_documents(training, self.work / "train.jsonl")
        data.write_documents(held_out, self.work / "heldout.jsonl")
        print(f"text: {len(training)} documents, {len(held_out)} held out", flush=True)

    def tokens(self) -> data.Mixture:
        """Train the tokenizer, then tokenise every kind of text in both halves: `<half>-<kind>.bin`."""
        file = self.work / "tokenizer.json"
        if not file.exists():
            texts = (document.text for document in data.read_documents(self.work / "train.jsonl"))
            tokenizer.train_tokenizer(texts, self.settings.vocab_size).save(str(file))
        self.tokenizer = Tokenizer.from_file(str(file))
        for half in ("train", "heldout"):
            for kind in self.settings.kinds:
                path = self.work / f"{half}-{kind}.bin"
                if not path.exists():
                    documents = (d for d in data.read_documents(self.work / f"{half}.jsonl") if d.kind == kind)
                    count = data.tokenize(documents, self.tokenizer, path)
                    print(f"tokens: {half} {kind} {count:,}", flush=True)
                self.pause.check()
        streams = {kind: data.Stream(self.work / f"train-{kind}.bin") for kind in self.settings.kinds}
        return data.Mixture(streams, data.SHARES, self.settings.seed)

    def target(self, text: data.Mixture) -> LlamaForCausalLM:
        """Train the target, first with a third of its layers: `shallow.pt`, `target.pt`."""
        s = self.settings
        loss = torch.compile(models.next_token_loss) if self.args.compile else models.next_token_loss

        def loss_of(first: int) -> train.LossFunction:
            def compute(model: torch.nn.Module, step: int, done: float) -> train.StepLoss:
                length = s.window // 2 if done < SHORT_WINDOWS else s.window
                cut, _ = text.windows(first + step, max(self.args.batch_tokens // length, 1), length + 1)
                windows = torch.from_numpy(cut).to(self.device)
                return train.StepLoss(loss(model, windows), windows[:, 1:].numel())

            return compute

        def build(name: str) -> LlamaForCausalLM:
            return models.build(s.shape(name), s.vocab_size, s.seed).to(self.device)

        minutes, rate = self.args.target_minutes, PEAK_RATE["target"]
        model = build("target")
        if (self.work / "target.pt").exists():
            self.progress["shallow"] = train.read_progress(self.work / "shallow.pt")
        else:
            budget = train.Budget(minutes, self.args.max_steps, end=SHALLOW)
            models.stack(self._train("shallow", build("shallow"), loss_of(SHALLOW_WINDOWS), budget, rate), model)
        budget = train.Budget(minutes, self.args.max_steps, start=SHALLOW)
        return self._train("target", model, loss_of(0), budget, rate)

    def lessons(self, target: LlamaForCausalLM, text: data.Mixture) -> tuple[distill.Lessons, distill.Lessons]:
        """Create lessons from the target's probabilities on training text and on its continuations: `lessons/`."""
        folder = self.work / "lessons"
        budget = train.Budget(self.args.continuation_minutes, self.args.max_steps)
        batch = 8 if self.settings.tiny else 64
        reader = rounded(target)
        with tempfile.TemporaryDirectory() as name:
            write_folder(Path(name), reader, self.tokenizer)
            teacher = LLM(
                name,
                [],
                "off",
                device=self.device,
                dtype="bfloat16",
                max_num_seqs=batch,
                max_model_len=distill.LENGTH,
                compile=self.args.compile and self.device.type == "cpu",
            ).engine.runner
        self.progress["lessons"] = distill.make_lessons(reader, teacher, text, folder, budget, batch, self.pause)
        halves = [sorted(folder.glob(f"{name}-*.npz")) for name in ("text", "continued")]
        return distill.Lessons.load(halves[0]), distill.Lessons.load(halves[1])

    def draft(
        self,
        name: str,
        index: int,
        target: LlamaForCausalLM,
        earlier: Sequence[LlamaForCausalLM],
        text: distill.Lessons,
        continued: distill.Lessons,
    ) -> LlamaForCausalLM:
        """Distil one draft: `ssm-*.pt`. Its embedding is initialised from the target's."""
        s = self.settings
        model = models.build(s.shape(name), s.vocab_size, s.seed + 1 + index).to(self.device)
        shares = s.shares_of(name)
        with torch.no_grad():
            model.get_input_embeddings().weight.copy_(target.get_input_embeddings().weight)
        loss = torch.compile(distill.distillation_loss) if self.args.compile else distill.distillation_loss
        earlier = earlier if self.args.hit_weight < 1 else []
        curriculum = distill.Curriculum(
            text, continued, shares, earlier, self.args.hit_weight, s.lessons_per_step, s.seed + 1 + index, loss
        )
        budget = train.Budget(self.args.ssm_minutes, self.args.max_steps)
        return self._train(name, model, curriculum, budget, PEAK_RATE["draft"])

    def _train(
        self, name: str, model: LlamaForCausalLM, loss_of: train.LossFunction, budget: train.Budget, rate: float
    ) -> LlamaForCausalLM:
        checkpoint = self.work / f"{name}.pt"
        self.progress[name] = train.train(name, model, loss_of, budget, rate, checkpoint, self.pause)
        return model.eval()

    def finish(self, target: LlamaForCausalLM, drafts: dict[str, LlamaForCausalLM]) -> None:
        """Measure on the held-out packages and export everything."""
        s = self.settings
        held_out = list(data.read_documents(self.work / "heldout.jsonl"))
        prompts = evaluate.cut_prompts(held_out, self.tokenizer, self.args.prompts, s.seed)
        evaluated = {name: rounded(model) for name, model in {"target": target, **drafts}.items()}
        ids = [self.tokenizer.encode(prompt.text).ids for prompt in prompts]
        kinds = [prompt.kind for prompt in prompts]
        figures = evaluate.agreement_report(evaluated, ids, kinds, self.args.new_tokens)
        streams = {kind: data.Stream(self.work / f"heldout-{kind}.bin") for kind in s.kinds}
        entries = {}
        for name, model in evaluated.items():
            parts = [self.progress[part] for part in (("shallow", name) if name == "target" else (name,))]
            entries[name] = {
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "held_out_loss": evaluate.held_out_losses(model, streams),
                "steps": sum(part.step for part in parts),
                "tokens": sum(part.tokens for part in parts),
                "minutes": round(sum(part.elapsed for part in parts) / 60, 1),
                "window": s.window if name == "target" else distill.LENGTH,
            }
            print(name, entries[name]["held_out_loss"], figures["agreement"].get(name, ""), flush=True)
        print("union", figures["agreement"]["union"], flush=True)
        for kind, shares in figures["agreement_by_kind"].items():
            print(kind, {name: own["top1"] for name, own in shares.items()}, flush=True)
        threads = torch.get_num_threads()
        report = {
            "models": entries,
            **figures,
            "lessons": {"tokens": self.progress["lessons"].tokens, "shards": self.progress["lessons"].step},
            "settings": asdict(s)
            | {"hit_weight": self.args.hit_weight, "peak_rate": PEAK_RATE, "draft_shares": DRAFTS, "shallow": SHALLOW},
            "packages": data.summary(data.read_documents(self.work / "train.jsonl")),
            "held_out_packages": data.summary(held_out),
            "device": f"{self.device.type}, {threads} thread{'s' * (threads > 1)}",
            "versions": {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "numpy")}
            | {"python": platform.python_version()},
        }
        export(self.args.out, {"target": target, **drafts}, self.tokenizer, report, evaluate.prompts_as_json(prompts))
        print(f"exported to {self.args.out}", flush=True)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    here = Path(__file__).resolve().parent
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--work", type=Path, default=cache / "treespec" / "train", help="folder of intermediate results"
    )
    parser.add_argument("--out", type=Path, default=here / "treespec_weights" / "default", help="folder of the result")
    parser.add_argument("--resume", action="store_true", help="continue from the work folder")
    parser.add_argument("--target-minutes", type=float, default=80, help="training time of the target")
    parser.add_argument("--continuation-minutes", type=float, default=33, help="time to make the drafts' lessons")
    parser.add_argument("--ssm-minutes", type=float, default=20, help="training time of each draft")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens per training step of the target")
    parser.add_argument("--max-steps", type=int, help="steps per stage instead of minutes")
    parser.add_argument(
        "--hit-weight", type=float, default=1.0, help="boost-tuning: weight of positions that earlier drafts predict"
    )
    parser.add_argument("--kinds", nargs="+", choices=data.KINDS, default=list(data.KINDS), help="kinds of text")
    parser.add_argument("--held-out", nargs="+", default=list(data.HELD_OUT), help="packages excluded from training")
    parser.add_argument("--package-cap", type=int, default=8_000_000, help="maximum characters per package and kind")
    parser.add_argument(
        "--text-root", type=Path, action="append", default=[], help="use this folder's packages instead"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=shutil.which("g++") is not None,
        help="compile the training step (a quarter faster on a CPU)",
    )
    parser.add_argument(
        "--compare", action="store_true", help="also train baseline drafts, into the work folder's compare/"
    )
    parser.add_argument("--prompts", type=int, default=256, help="held-out prompts to evaluate on and export")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens per continuation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="toy shapes, for tests")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all stages. Returns 0, or 130 after a pause. Raises ValueError for a work folder of other settings."""
    args = arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    roots = [str(root.resolve()) for root in args.text_root]
    settings = Settings(args.kinds, args.held_out, roots, args.package_cap, args.seed, args.tiny)
    args.work.mkdir(parents=True, exist_ok=True)
    file = args.work / "settings.json"
    if file.exists():
        if not args.resume:
            raise ValueError(f"{args.work} holds an earlier run: pass --resume, or another --work")
        if (kept := json.loads(file.read_text())) != asdict(settings):
            raise ValueError(f"{args.work} was started with {kept}, which differs from {asdict(settings)}")
    write_json(file, asdict(settings))
    try:
        Build(args, settings).run()
    except train.Paused:
        print(f"paused; continue with --resume --work {args.work}", flush=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
