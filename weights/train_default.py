"""Train the embedded default models: `python weights/train_default.py`.

Stages: text of installed packages -> tokenizer -> target -> ssm-1, ssm-2, ssm-3, as `treespec train` trains them ->
prompts of held-out packages and export. Ctrl-C pauses without loss of progress; `--resume` continues. Training time
is set in minutes per stage, over which the learning rate is annealed. `--target FOLDER` trains new SSMs for the target
of an earlier run.
"""

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from itertools import chain
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))

from treespec.training import loop as train
from treespec.training.run import TrainingRun
from treespec.training.settings import TrainingSettings
from treespec.training.student import open_model
from treespec.utils.files import write_json
from treespec_training import data, evaluate, rendered
from treespec_training import shapes as models
from treespec_training import train_tokenizer as tokenizer
from treespec_training.export import export, rounded, write_folder

DRAFTS = ("ssm-1", "ssm-2", "ssm-3")
PEAK_RATE = 4e-3  # peak learning rate of the target
SHALLOW = 0.3  # fraction of the target's schedule trained with a third of its layers
SHORT_WINDOWS = 0.8  # fraction of the target's schedule on half-length windows, for a quarter more tokens per second
SHALLOW_WINDOWS = 500_000_000  # offset that separates the shallow model's windows from the deep model's


@dataclass(frozen=True)
class Settings:
    """Settings that must not change when a run is resumed; stored as `settings.json` in the work folder."""

    kinds: list[str]
    held_out: list[str]
    text_roots: list[str]
    target: str | None
    package_cap: int
    seed: int
    tiny: bool

    @property
    def vocab_size(self) -> int:
        return 384 if self.tiny else 4096

    @property
    def window(self) -> int:
        """Tokens per training window of the target."""
        return 64 if self.tiny else 512

    def shape(self, name: str) -> dict[str, int]:
        """Return the configuration of "target", or of "shallow", the target with a third of its layers."""
        target = models.TINY_TARGET if self.tiny else models.TARGET
        if name == "shallow":
            target = target | {"num_hidden_layers": max(target["num_hidden_layers"] // 3, 1)}
        return target


class Build:
    """A run of all stages in a work folder.

    Every stage stores its result there, and returns immediately if the result exists.
    """

    def __init__(self, args: argparse.Namespace, settings: Settings) -> None:
        self.args, self.settings, self.work = args, settings, args.work
        self.pause = train.PauseRequest()
        name = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(name)
        self.progress: dict[str, train.TrainingProgress] = {}

    def run(self) -> None:
        with self.pause.listening():
            self.text()
            if self.args.target is None:
                self.tokens(("train", "heldout"))
                target = self.target()
                write_folder(self.work / "target", target, self.tokenizer)
            else:
                shutil.copytree(self.args.target, self.work / "target", dirs_exist_ok=True)
                shutil.copy(self.args.target / "tokenizer.json", self.work)
                self.tokens(("heldout",))
                target = open_model(self.args.target, torch.float32)
            self.finish(target, self.drafts())

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
        data.write_lines(self.work / "train.jsonl", map(asdict, training))
        data.write_lines(self.work / "heldout.jsonl", map(asdict, held_out))
        print(f"text: {len(training)} documents, {len(held_out)} held out", flush=True)

    def tokens(self, halves: Sequence[str]) -> None:
        """Train the tokenizer unless it exists, then tokenise every kind of text: `<half>-<kind>.bin`."""
        file = self.work / "tokenizer.json"
        if not file.exists():
            texts = (document.text for document in data.read_documents(self.work / "train.jsonl"))
            tokenizer.train_tokenizer(texts, self.settings.vocab_size).save(str(file))
        self.tokenizer = Tokenizer.from_file(str(file))
        for half in halves:
            for kind in self.settings.kinds:
                path = self.work / f"{half}-{kind}.bin"
                if not path.exists():
                    documents = (d for d in data.read_documents(self.work / f"{half}.jsonl") if d.kind == kind)
                    count = data.tokenize(documents, self.tokenizer, path)
                    print(f"tokens: {half} {kind} {count:,}", flush=True)
                self.pause.check()

    def target(self) -> LlamaForCausalLM:
        """Train the target, first with a third of its layers: `shallow.pt`, `target.pt`."""
        s = self.settings
        streams = {kind: data.Stream(self.work / f"train-{kind}.bin") for kind in s.kinds}
        text = data.Mixture(streams, data.SHARES, s.seed)
        loss = torch.compile(models.next_token_loss) if self.args.compile else models.next_token_loss

        def step_loss(first: int, model: torch.nn.Module, step: int, fraction: float) -> train.StepLoss:
            length = s.window // 2 if fraction < SHORT_WINDOWS else s.window
            cut = text.windows(first + step, max(self.args.batch_tokens // length, 1), length + 1)
            windows = torch.from_numpy(cut).to(self.device)
            return train.StepLoss(loss(model, windows), windows[:, 1:].numel())

        def build(name: str) -> LlamaForCausalLM:
            return models.build(s.shape(name), s.vocab_size, s.seed).to(self.device)

        minutes = self.args.target_minutes
        model = build("target")
        if (self.work / "target.pt").exists():
            self.progress["shallow"] = train.read_progress(self.work / "shallow.pt")
        else:
            budget = train.Budget(minutes, self.args.max_steps, end=SHALLOW)
            shallow_loss = partial(step_loss, SHALLOW_WINDOWS)
            models.stack(self._train("shallow", build("shallow"), shallow_loss, budget), model)
        budget = train.Budget(minutes, self.args.max_steps, start=SHALLOW)
        return self._train("target", model, partial(step_loss, 0), budget)

    def drafts(self) -> Path:
        """Train the drafts like `treespec train`, each mostly on one kind of text; return their folder `drafts/`."""
        folder, text = self.work / "target", (str(self.work / "train.jsonl"),)
        settings = TrainingSettings(
            folder,
            text,
            self.work / "drafts",
            texts=text,
            ssms=len(DRAFTS),
            minutes=None if self.args.draft_tokens else self.args.draft_minutes,
            tokens=self.args.draft_tokens,
            specialise="folders",
            generalist=self.args.compare,
            seed=self.settings.seed,
            device=self.device.type,
            resume=True,
            **(models.TINY_DRAFT if self.settings.tiny else models.DRAFT),
        )
        TrainingRun(settings, self.pause).run()
        return self.work / "drafts"

    def _train(
        self, name: str, model: LlamaForCausalLM, loss_of: train.LossFunction, budget: train.Budget
    ) -> LlamaForCausalLM:
        self.progress[name] = train.train(name, model, loss_of, budget, PEAK_RATE, self.work / f"{name}.pt", self.pause)
        return model.eval()

    def finish(self, target: LlamaForCausalLM, drafts: Path) -> None:
        """Measure the target's loss on the held-out packages, and export everything."""
        s = self.settings
        held_out = list(data.read_documents(self.work / "heldout.jsonl"))
        prompts = evaluate.cut_prompts(held_out, self.tokenizer, self.args.prompts, s.seed)
        streams = {kind: data.Stream(self.work / f"heldout-{kind}.bin") for kind in s.kinds}
        stages = self.progress.values()
        trained = {
            "parameters": sum(parameter.numel() for parameter in target.parameters()),
            "held_out_loss": evaluate.held_out_losses(rounded(target), streams),
        }
        if stages:
            trained |= {
                "steps": sum(stage.step for stage in stages),
                "tokens": sum(stage.tokens for stage in stages),
                "minutes": minutes_of(stages),
                "window": s.window,
            }
        print("target", trained["held_out_loss"], flush=True)
        threads = torch.get_num_threads()
        report = {
            "target": trained,
            "drafts": training_of(drafts),
            "settings": asdict(s) | {"peak_rate": PEAK_RATE, "shallow": SHALLOW},
            "packages": data.summary(data.read_documents(self.work / "train.jsonl")),
            "held_out_packages": data.summary(held_out),
            "device": f"{self.device.type}, {threads} thread{'s' * (threads > 1)}",
            "versions": {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "numpy")}
            | {"python": platform.python_version()},
        }
        folders = {name: drafts / name for name in DRAFTS}
        if stages:
            folders["target"] = self.work / "target"
        export(self.args.out, folders, report, prompts)
        print(f"exported to {self.args.out}", flush=True)


def minutes_of(stages: Iterable[train.TrainingProgress]) -> float:
    """Return the total training minutes, without pauses."""
    return round(sum(stage.elapsed for stage in stages) / 60, 1)


def training_of(drafts: Path) -> dict[str, object]:
    """Return the settings, training statistics and figures in the folder of a finished `treespec train` run."""
    report = json.loads((drafts / "report.json").read_text())
    lessons = train.TrainingProgress(**json.loads((drafts / "work" / "lessons.json").read_text()))
    stages = [lessons, *(train.read_progress(path) for path in sorted((drafts / "work").glob("*.ckpt")))]
    names = ("minutes", "tokens", "specialise", "layers", "hidden", "vocabulary", "seed")
    settings = {name: report["settings"][name] for name in names}
    trained = {"settings": settings, "lesson_tokens": lessons.tokens, "minutes": minutes_of(stages)}
    return trained | {"agreement": report["agreement"], "measured": report["measured"]}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    folder = Path(__file__).resolve().parent
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--work", type=Path, default=cache / "treespec" / "train", help="intermediate results")
    parser.add_argument("--out", type=Path, default=folder / "treespec_weights" / "default", help="the result")
    parser.add_argument("--resume", action="store_true", help="continue from the work folder")
    parser.add_argument("--target", type=Path, help="train SSMs for this target, and export only these")
    parser.add_argument("--target-minutes", type=float, default=80, help="training time of the target")
    parser.add_argument("--draft-minutes", type=float, default=90, help="time for the drafts' lessons and training")
    parser.add_argument("--draft-tokens", type=int, help="tokens of the drafts' lessons, instead of minutes")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens per training step of the target")
    parser.add_argument("--max-steps", type=int, help="training steps of the target, instead of minutes")
    parser.add_argument("--kinds", nargs="+", choices=data.KINDS, default=list(data.KINDS), help="kinds of text")
    parser.add_argument("--held-out", nargs="+", default=list(data.HELD_OUT), help="packages excluded from training")
    parser.add_argument("--package-cap", type=int, default=8_000_000, help="maximum characters per package and kind")
    parser.add_argument("--text-root", type=Path, action="append", default=[], help="folder of packages to use instead")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    compiles = {"action": argparse.BooleanOptionalAction, "default": shutil.which("g++") is not None}
    parser.add_argument("--compile", **compiles, help="compile the training step (a quarter faster on a CPU)")
    parser.add_argument("--compare", action="store_true", help="also train a generalist, into --work's drafts/")
    parser.add_argument("--prompts", type=int, default=256, help="held-out prompts to export")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="toy shapes, for tests")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all stages. Returns 0, or 130 after a pause. Raises ValueError if the work folder has other settings."""
    args = arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    roots = [str(root.resolve()) for root in args.text_root]
    target = None if args.target is None else str(args.target)
    settings = Settings(args.kinds, args.held_out, roots, target, args.package_cap, args.seed, args.tiny)
    args.work.mkdir(parents=True, exist_ok=True)
    file = args.work / "settings.json"
    if file.exists():
        if not args.resume:
            raise ValueError(f"{args.work} holds an earlier run: pass --resume or another --work")
        if (stored := json.loads(file.read_text())) != asdict(settings):
            raise ValueError(f"{args.work} was started with {stored}, which differs from {asdict(settings)}")
    write_json(file, asdict(settings))
    try:
        Build(args, settings).run()
    except train.Paused:
        print(f"paused; continue with --resume --work {args.work}", flush=True)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
