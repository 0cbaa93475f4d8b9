"""`treespec train`: data, lessons, clusters, and whole runs on a toy target, interrupted and resumed."""

import itertools
import json
import os
import shlex
import shutil
import signal
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

import treespec.training.run
from tests.helpers.calls import calls_of
from tests.helpers.commands import run
from tests.helpers.conversions import full_disk
from tests.helpers.gguf_files import metadata_of, write_gguf
from tests.helpers.models import CURVE, make_llama, new_folder
from tests.helpers.tokenizers_made import TEXT, byte_level, save_tokenizer
from treespec import LLM, SpecConfig
from treespec.errors import ConfigError, ModelError
from treespec.planning.round_costs import CostCurve
from treespec.text.prompt_tokenizer import load_tokenizer
from treespec.text.training_prompts import MAX_FILE_BYTES, SYNTHETIC, TrainingPrompt, read_training_prompts, user_turn
from treespec.training.draft_vocabulary import choose_vocabulary, rows_of_tokens
from treespec.training.lessons import TOP, Lessons, LessonWriter, best_batch, prompts_of_shard, shard_path
from treespec.training.loop import AVERAGED, Budget, Paused, PauseRequest, average_weights, optimizers_for
from treespec.training.muon import Float32Muon, orthogonalize
from treespec.training.report import TrainingReport, measure_drafts
from treespec.training.run import TrainingRun, by_benefit, held_out, train_drafts
from treespec.training.settings import TrainingSettings
from treespec.training.sizing import choose_size, measure_level
from treespec.training.specialisation import balanced_owners, cluster_errors, cluster_groups, odds_of
from treespec.training.student import make_student, open_model, open_student, read_vocabulary, write_student
from treespec.training.texts import ROWS, WINDOW, Texts, tokenize_texts
from treespec.utils.files import replacing
from treespec_kernels.comparison import assert_close
from treespec_weights import convert_checkpoint
from treespec_weights.quantize import dequantize, quantize

VOCAB = 384


@pytest.fixture(scope="module")
def target() -> Path:
    folder = make_llama(new_folder("target"), 0, vocab_size=VOCAB, num_hidden_layers=2)
    return save_tokenizer(folder, byte_level(VOCAB, TEXT.splitlines()))


@pytest.fixture(scope="module")
def llm(target: Path) -> LLM:
    return LLM(target, drafts=[], compile=False, max_model_len=512)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for i, part in enumerate(("code", "notes")):
        (root / part).mkdir()
        (root / part / "text.txt").write_text(TEXT[i * 9000 : (i + 1) * 9000])
    return root


def test_prompts_of_every_form(tmp_path: Path) -> None:
    (tmp_path / "image.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="none with text"):
        read_training_prompts([tmp_path], chat=False)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "long.md").write_text("line\n" * 1000)
    entries: list[dict[str, Any]] = [
        {"prompt": "one", "kind": "x"},
        {"text": "two"},
        {"turns": ["three", "four"], "category": "y"},
        {"messages": [{"role": "user", "content": "five"}]},
    ]
    (path := tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, entries)))
    found = read_training_prompts([tmp_path], chat=True)
    assert [prompt for prompt in found if prompt.group != "a"] == [
        TrainingPrompt([{"role": "user", "content": "one"}], "x"),
        TrainingPrompt("two", "list"),
        TrainingPrompt([{"role": "user", "content": "three"}], "y"),
        TrainingPrompt([{"role": "user", "content": "five"}], "list"),
    ]
    passages = [prompt.content for prompt in found if prompt.group == "a"]
    assert "".join(map(str, passages)) == "line\n" * 1000 and len(passages) == 3
    assert read_training_prompts([path], chat=False)[0].content == "one"
    path.write_text(json.dumps({"text": "line\n" * 1000, "kind": "z"}))
    assert read_training_prompts([path], chat=True) == [TrainingPrompt(passage, "z") for passage in passages]
    path.write_text('{"prompt": ""}')
    with pytest.raises(ConfigError, match=r"list\.jsonl, line 1: 'prompt' holds ''"):
        read_training_prompts([tmp_path], chat=False)


def test_texts_of_any_encoding_and_length(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for encoding in ("utf-8-sig", "utf-16", "utf-32", "utf-16-le", "latin-1"):
        (tmp_path / f"{encoding}.txt").write_text("Größe\n", encoding)
    (tmp_path / "list.json").write_text('[{"text": "Größe"}]', "utf-8-sig")
    (tmp_path / "large.txt").touch()
    os.truncate(tmp_path / "large.txt", MAX_FILE_BYTES + 1)
    lines = {"spaces": "word " * 3000, "minified": "x" * 10_000, "lines": "line\n" * 600 + "x" * 5000 + "\n" * 9}
    for name, line in lines.items():
        (tmp_path / f"{name}.txt").write_text(line)
    found: dict[str, list[str]] = {}
    for prompt in read_training_prompts([tmp_path], chat=False):
        found.setdefault(prompt.group, []).append(str(prompt.content))
    marked = dict.fromkeys(("utf-8-sig", "utf-16", "utf-32"), "Größe\n")
    assert {name: "".join(passages) for name, passages in found.items()} == lines | marked | {"list": "Größe"}
    assert all(len(passage) <= 4096 for passages in found.values() for passage in passages)
    assert all(passage.endswith(" ") for passage in found["spaces"])
    log = caplog.text
    assert "skipped 1 of the files" in log and "large.txt: larger than 16 MiB" in log
    assert "skipped 2 of the files" in log and "latin-1.txt: binary, or in an encoding other than UTF-8" in log


@pytest.mark.parametrize("folder", [False, True])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, folder: bool) -> None:
    path = tmp_path / "ssm-1"
    path.write_text("before") if not folder else path.mkdir()
    message = r"no space left for .*ssm-1; free some space, then resume"
    with pytest.raises(OSError, match=message), full_disk(), replacing(path) as temporary:
        temporary.write_text("half") if not folder else temporary.mkdir()
        raise RuntimeError("PytorchStreamWriter failed writing file")
    assert [each.name for each in tmp_path.iterdir()] == ["ssm-1"] and path.is_dir() == folder


@pytest.mark.slow
def test_lessons_hold_what_the_target_writes(llm: LLM, tmp_path: Path) -> None:
    """Of that, test_a_killed_run_resumes_to_the_same_weights has more."""
    prompts = [TrainingPrompt(TEXT[i * 300 : (i + 1) * 300], f"group {i % 3}") for i in range(40)]
    for number in (1, 0):
        with closing(LessonWriter(llm, prompts, tmp_path, 12, seed=5, per_shard=32)) as writer:
            writer.write(number)
    with closing(LessonWriter(llm, prompts, tmp_path / "cut", 12, seed=5, per_shard=32)) as writer:
        num_tokens = writer.write(0, lambda tokens: tokens < 40)
    cut, whole = (Lessons.load([shard_path(folder, 0)]) for folder in (tmp_path / "cut", tmp_path))
    assert cut.generated.sum() == num_tokens >= 40 and len(cut) == writer.batch, "the last shard has what there is"
    for i, (start, end) in enumerate(itertools.pairwise(cut.starts)):
        assert np.array_equal(cut.tokens[start:end], whole.tokens[whole.starts[i] :][: end - start])
    lessons = Lessons.load([shard_path(tmp_path, number) for number in (0, 1)])
    assert len(lessons) == 64 and lessons.top_ids.shape == (lessons.generated.sum(), TOP)
    greedy = lessons.select(np.array([*range(0, 40, 2), *range(41, 64, 2)]))  # exchanged when prompts repeat
    written = np.concatenate(
        [greedy.tokens[a + n : b] for a, n, b in zip(greedy.starts, greedy.firsts, greedy.starts[1:], strict=False)]
    )
    assert np.array_equal(written, greedy.top_ids[:, 0])
    assert (np.diff(lessons.top_logprobs.astype(float), axis=1) <= 0).all()


@pytest.mark.slow
def test_a_chat_model_writes_prompts_itself(target: Path, tmp_path: Path) -> None:
    tokenizer, data = load_tokenizer(None, target), [TrainingPrompt(TEXT[:300], "text")]
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ConfigError):
        user_turn(tokenizer)
    tokenizer.chat_template = "Q: {{ messages[0].content }}\nA:"
    llm = LLM(target, drafts=[], tokenizer=tokenizer, compile=False, max_model_len=512)
    assert user_turn(tokenizer) == (tokenizer.encode("Q: "), tokenizer.encode("\n")[0])
    for folder, starts in ((tmp_path / "whole", [(0, 1)]), (tmp_path / "resumed", [(0,), (1,)])):
        for numbers in starts:
            with closing(LessonWriter(llm, data, folder, 12, seed=5, synthetic=0.5)) as writer:
                for number in numbers:
                    writer.write(number)
    shards = [shard_path(tmp_path / "whole", number) for number in (0, 1)]
    assert [path.read_bytes() for path in shards] == [
        (tmp_path / "resumed" / path.name).read_bytes() for path in shards
    ]
    lessons = Lessons.load(shards)
    texts = [tokenizer.decode(lessons.tokens[a : a + n]) for a, n in zip(lessons.starts, lessons.firsts, strict=False)]
    asked = [text for text, group in zip(texts, lessons.groups, strict=True) if group == SYNTHETIC]
    assert sum(lessons.groups == "text") == 16 and 1 < len(asked) == len(set(asked)) <= 16
    assert all(text.startswith("Q: ") and text.endswith("\nA:") and text[3:-3].strip() for text in asked)


def test_shards_follow_each_other_and_grow() -> None:
    shards = [prompts_of_shard(number) for number in range(40)]
    assert shards[0] == range(16) and all(a.stop == b.start for a, b in itertools.pairwise(shards))
    assert [len(shard) for shard in shards[::16]] == [16, 32, 48]


def test_batches_are_as_large_as_pays() -> None:
    """Passes that are bound by arithmetic at 16 rows, and ones that cost the same up to 64."""
    slow, fast = (CostCurve((1, 64), (seconds, 1.0), 0.0) for seconds in (1 / 64, 1.0))
    assert [best_batch(curve, most) for curve, most in ((slow, 64), (fast, 64), (fast, 32), (slow, 4))] == [
        16,
        64,
        32,
        4,
    ]


@pytest.mark.slow
def test_vocabulary_holds_what_the_target_writes() -> None:
    top, logprobs = np.zeros((5, TOP), dtype=np.int32), np.full((5, TOP), -20, dtype=np.float16)
    top[:, 0], logprobs[:, 0] = [100, 100, 101, 102, 100], 0  # certain tokens, behind prompts of one
    tokens = np.array([7, 100, 100, 101, 8, 102, 100], dtype=np.int32)
    lessons = Lessons(tokens, np.array([0, 4, 7]), np.array([1, 1]), top, logprobs, np.array(["x", "x"]))
    assert choose_vocabulary(lessons, 1000, (3,), max_rows=1000).tolist() == [*range(1000), -1]
    chosen = choose_vocabulary(lessons, 1000, (3,), max_rows=900)
    assert (np.diff(chosen[:-1]) > 0).all() and chosen[-1] == -1
    assert {3, 100, 101, 102} <= set(chosen.tolist())
    assert (len(chosen) - 1) % 16 == 0
    small = choose_vocabulary(lessons, 1000, (3,), max_rows=17)
    assert {3, 100, 101, 102} <= set(small.tolist()) and len(small) == 17
    assert len(choose_vocabulary(lessons, 1000, (3,), max_rows=100)) == 65, "a head of whole vectors"
    started = choose_vocabulary(lessons, 1000, range(500, 570), max_rows=200)
    assert len(started) in (129, 193) and set(range(500, 570)) <= set(started.tolist())
    rows = rows_of_tokens(small, 1000)
    assert (small[rows[small[:-1]]] == small[:-1]).all() and rows[999 if 999 not in small else 998] == 16


def test_clusters() -> None:
    groups = np.array(["a"] * 5 + ["b"] * 3 + ["c"] * 2)
    assert cluster_groups(groups, 2).tolist() == [0] * 5 + [1] * 5
    rng = np.random.default_rng(0)
    missed = [rng.integers(0, 10, 6) + 10 * (i % 3) for i in range(60)]
    owners = cluster_errors(missed, 30, 3, seed=1)
    assert all(len(set(owners[i::3].tolist())) == 1 for i in range(3)) and set(owners.tolist()) == {0, 1, 2}
    costs = np.zeros((40, 2))
    costs[:, 1] = 1 + np.arange(40)
    owners = balanced_owners(costs)
    assert np.flatnonzero(owners == 1).tolist() == list(range(10))
    odds = odds_of(owners, 1)
    assert odds.sum() == pytest.approx(1) and odds[0] > odds[-1] > 0
    a, b, c = (np.array(row, dtype=bool) for row in ([1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 1, 0]))
    assert by_benefit([b, c, a]) == [2, 1, 0], "ordered by what each adds"
    assert held_out(100, 0).sum() == 4 and held_out(4, 0).sum() == 2 and np.array_equal(held_out(9, 3), held_out(9, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssms": 9}, "ssms=9; valid: an int from 0 to 8"),
        ({"seed": -1}, "seed=-1; valid: an int from 0 to 18446744073709551615"),
        ({"ssms": 0}, "ssms=0 trains nothing; pass table"),
        ({"minutes": 0.0}, "minutes=0.0; valid: more than 0"),
        ({"tokens": 5, "minutes": 1.0}, "minutes and tokens exclude each other"),
        ({"ssms": 1, "generalist": True}, "ssms=1 is already a generalist; choose more SSMs"),
        ({"lessons": "out"}, "lessons=... replaces new lessons; omit data and synthetic"),
        ({"synthetic": 1.5}, "synthetic=1.5; valid: a number from 0.0 to 1.0"),
        ({"data": (), "synthetic": 0.5}, "synthetic=0.5 without data; pass data, or omit synthetic"),
        ({"start": "draft", "layers": 1}, "start=... determines layers and width; omit them"),
        ({"hidden": 100}, "hidden=100; valid: multiples of 64"),
        ({"head": "medusa"}, "head='medusa'; valid: 'state-ssm', 'dflash'"),
        ({"head": "state-ssm", "texts": ["notes"]}, "texts does not apply to head='state-ssm'; omit it"),
        ({"head": "dflash", "start": "draft"}, "start does not apply to head='dflash'; omit it"),
    ],
)
def test_settings_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingSettings(**{"target": "target", "data": ("data",), "out": "out", **changes}).check()


@pytest.mark.slow
def test_texts_train_by_their_own_next_tokens(llm: LLM, target: Path, data: Path, tmp_path: Path) -> None:
    tokens = tokenize_texts([data], llm.get_tokenizer())
    assert llm.get_tokenizer().decode(tokens) == "".join(
        (data / part / "text.txt").read_text() for part in ("code", "notes")
    )
    target_ids = np.array([*range(300), -1])
    texts = Texts(tokens, target_ids, VOCAB, 0, torch.device("cpu"))
    model = make_student(open_model(target), 1, None, target_ids, [0])
    first, again, other = (texts.loss(model, step) for step in (7, 7, 8))
    assert first.mean == again.mean != other.mean and 0 < first.tokens < ROWS * WINDOW
    optimizers = optimizers_for(model)
    for step in range(8):
        texts.loss(model, step).mean.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert texts.loss(model, 7).mean < first.mean


@pytest.mark.slow
def test_inputs_are_checked_before_lessons_are_written(target: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "short.md").write_text("A title\n")
    with pytest.raises(ConfigError, match=r"--texts .*short.md: \d+ tokens of raw text; at least 257 are needed"):
        train_drafts(target, [data], tmp_path / "out", texts=[tmp_path / "short.md"], **OPTIONS)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        train_drafts(target, [data], tmp_path / "out", texts=[tmp_path / "nowhere"], **OPTIONS)
    with pytest.raises(ModelError, match="hidden=64: the target's width is 64; choose less, or omit hidden"):
        train_drafts(target, [data], tmp_path / "out", hidden=64, **OPTIONS)
    assert not (tmp_path / "out").exists()


OPTIONS: dict[str, Any] = {"ssms": 2, "tokens": 600, "layers": 1, "vocabulary": 257, "max_tokens": 16}


def weights_of(out: Path) -> dict[str, bytes]:
    return {f"{name}/{file.name}": file.read_bytes() for name in ("ssm-1", "ssm-2") for file in (out / name).iterdir()}


@pytest.fixture(scope="module")
def trained(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "out"
    report = train_drafts(target, [data], out, **OPTIONS)
    assert report.differing == 0 and [row.drafts for row in report.measured] == [0, 1, 2]
    assert json.loads((out / "report.json").read_text())["settings"]["ssms"] == 2
    return out


@pytest.mark.slow
def test_trained_drafts_load_here_and_in_transformers(trained: Path, target: Path) -> None:
    llm = LLM(target, drafts=[trained / "ssm-1", trained / "ssm-2"], compile=False, max_model_len=256)
    plain, tree = (llm.generate("import os", spec=spec)[0] for spec in ("off", SpecConfig(nodes=8)))
    assert plain.outputs[0].token_ids == tree.outputs[0].token_ids
    model = AutoModelForCausalLM.from_pretrained(trained / "ssm-1")
    assert model.config.num_hidden_layers == 1 and model.config.vocab_size == 257


@pytest.mark.slow
def test_drafts_of_a_gguf_file(target: Path, data: Path, tmp_path: Path) -> None:
    """The folder of a run stands for its drafts."""
    tokenizer = metadata_of(json.loads((target / "tokenizer.json").read_text()))
    tokenizer["tokenizer.ggml.pre"] = "gpt-2"
    model = write_gguf(tmp_path / "target.gguf", target, "Q8_0", tokenizer=tokenizer)
    report = train_drafts(model, [data], tmp_path / "out", **OPTIONS)
    llm = LLM(model, drafts=[tmp_path / "out"], max_model_len=256)
    assert report.differing == 0 and llm.draft_names == ("ssm-1", "ssm-2")
    plain, tree = (llm.generate("import os", spec=spec)[0] for spec in ("off", SpecConfig(nodes=8, sources=("ssm",))))
    assert plain.outputs[0].token_ids == tree.outputs[0].token_ids
    assert tree.metrics.nodes_verified > plain.metrics.nodes_verified


@pytest.mark.slow
def test_reports_take_as_long_as_they_may(target: Path) -> None:
    options, most = {"compile": False, "max_model_len": 256}, list[int]()
    with calls_of(LLM, "generate", lambda calls: most.append(calls[-1][2].max_tokens)):
        for seconds in (0.0, 1e6):
            measure_drafts(target, [], [[5, 6]] * 2, {}, 40, options, seconds, lambda: None)
    assert set(most[: len(most) // 2]) == {16} and set(most[len(most) // 2 :]) == {16, 40}
    with pytest.raises(Paused):
        measure_drafts(target, [], [[5, 6]], {}, 40, options, 1.0, mock.Mock(side_effect=Paused))


@pytest.mark.slow
def test_a_table_of_lessons(trained: Path, target: Path, tmp_path: Path) -> None:
    """Alone, and beside the SSMs of a run that is resumed for it."""
    alone = train_drafts(target, [], tmp_path / "alone", lessons=trained, ssms=0, table=True)
    assert alone.differing == 0 and [*alone.agreement] == ["table"] and len(alone.measured) == 2
    (work := tmp_path / "both" / "work").mkdir(parents=True)
    shutil.copytree(trained / "work", work, dirs_exist_ok=True)
    data = json.loads((work / "settings.json").read_text())["data"]
    both = train_drafts(target, data, tmp_path / "both", table=True, resume=True, **OPTIONS)
    assert both.differing == 0 and [*both.agreement] == ["table", "ssm-1", "ssm-2"]
    assert weights_of(tmp_path / "both") == weights_of(trained)
    llm = LLM(target, drafts=[tmp_path / "both"], compile=False, max_model_len=256)
    assert llm.draft_names == ("ssm-1", "ssm-2", "table")
    listed = run("weights", "inspect", tmp_path / "alone" / "table")
    assert "codes" in listed.stdout, listed.stderr


@pytest.mark.slow
def test_lessons_of_another_run(trained: Path, target: Path, data: Path, tmp_path: Path) -> None:
    train_drafts(target, [], tmp_path / "same", lessons=trained, **OPTIONS)
    assert weights_of(tmp_path / "same") == weights_of(trained)
    with pytest.raises(ConfigError, match="same has no lessons; pass the output folder of an earlier run"):
        train_drafts(target, [], tmp_path / "none", lessons=tmp_path / "same", **OPTIONS)
    smaller = make_llama(tmp_path / "smaller", 0, vocab_size=64)
    with pytest.raises(ConfigError, match=r"has lessons of another target: token \d+, but this target has 64 tokens"):
        train_drafts(smaller, [], tmp_path / "other", lessons=trained, **OPTIONS)
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        train_drafts(target, [data], trained, tokens=99, resume=True)
    assert load_file(trained / "ssm-1" / "model.safetensors")


@pytest.mark.slow
def test_texts_and_a_generalist(trained: Path, target: Path, data: Path, tmp_path: Path) -> None:
    """Texts change what the same lessons give, and a generalist is written beside the specialists."""
    report = train_drafts(target, [], tmp_path, lessons=trained, texts=[data], generalist=True, **OPTIONS)
    assert list(report.agreement) == ["ssm-1", "ssm-2", "generalist"] and len(report.measured) == 3
    assert weights_of(tmp_path) != weights_of(trained)
    written = [load_file(tmp_path / name / "model.safetensors") for name in report.agreement]
    for other in written[:2]:
        assert any(not torch.equal(tensor, other[name]) for name, tensor in written[2].items())
    LLM(target, drafts=[tmp_path / "generalist"], compile=False, max_model_len=256)


@pytest.mark.parametrize(("best", "share"), [(1.4, 1.0), (0.8, 0.7), (0.1, 0.5)])
def test_an_average_with_the_start_is_the_one_that_agrees_most(best: float, share: float) -> None:
    model, start = torch.nn.Linear(3, 2), [torch.randn(2, 3), torch.randn(2)]
    trained = [parameter.detach().clone() for parameter in model.parameters()]

    def agreement(model: torch.nn.Module) -> float:
        return -float((model.weight.detach() - start[0].lerp(trained[0], best)).norm())

    assert average_weights(model, start, agreement) == share
    assert all(torch.equal(p, a.lerp(b, share)) for p, a, b in zip(model.parameters(), start, trained, strict=True))
    assert share < 1 or all(map(torch.equal, model.parameters(), trained))


@pytest.mark.slow
def test_training_starts_from_a_draft(target: Path, trained: Path, tmp_path: Path) -> None:
    """Also from one that is stored in fp8; its vocabulary and layers stay."""
    convert_checkpoint(trained / "ssm-1", start := tmp_path / "start", quantization="fp8")
    options, began = OPTIONS | {"layers": None, "lessons": trained}, {}

    def begin(calls: list[Any]) -> None:
        student, model, *_ = calls[-1]
        began[student] = {name: weight.clone() for name, weight in model.state_dict().items()}

    with calls_of(treespec.training.run, "train", begin):
        train_drafts(target, [], tmp_path / "out", start=Path(os.path.relpath(start)), **options)
    for name, weight in open_model(start, torch.float32).state_dict().items():
        assert torch.equal(began["generalist"][name], weight), name
    checkpoint = torch.load(tmp_path / "out" / "work" / "generalist.ckpt")["model"]
    mixes = [{n: before.lerp(checkpoint[n], s) for n, before in began["generalist"].items()} for s in AVERAGED]
    averaged = began["specialist-1"]
    assert any(all(torch.equal(mix[name], weight) for name, weight in averaged.items()) for mix in mixes)
    vocabularies = [(folder / "draft_vocab.safetensors").read_bytes() for folder in (start, tmp_path / "out" / "ssm-1")]
    assert vocabularies[0] == vocabularies[1]
    known = read_vocabulary(trained / "ssm-1", VOCAB)
    more = np.append(np.union1d(known[:-1], range(300, VOCAB, 2)), -1)
    small, large = (
        open_model(trained / "ssm-1", torch.float32),
        open_student(trained / "ssm-1", more, open_model(target)),
    )
    rows = large.get_input_embeddings().weight
    assert torch.equal(rows[np.isin(more, known)], small.get_input_embeddings().weight)
    assert len(rows) == len(more) > len(known) and rows.isfinite().all() and large.config.vocab_size == len(more)
    with pytest.raises(ModelError, match=r"target.* has no reduced vocabulary; start from a draft of `treespec train`"):
        train_drafts(target, [], tmp_path / "none", start=target, **options)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_weights(target: Path, data: Path, trained: Path, tmp_path: Path) -> None:
    """Killed and interrupted while lessons are written, and interrupted while specialists are trained."""
    out, left, settings = tmp_path / "out", tmp_path / "left", {"target": target, "data": [data], **OPTIONS}

    class Killed(PauseRequest):
        def check(self) -> None:
            if shard_path(out / "work" / "lessons", 1).exists():
                shutil.copytree(out, left)  # before anything cleans up
                raise RuntimeError("killed")

    class Interrupted(PauseRequest):
        passes = 0

        def check(self) -> None:
            self.passes += 1
            if self.passes == 3:
                os.kill(os.getpid(), signal.SIGINT)
            super().check()

    def interrupt(calls: list[Any]) -> None:
        if len(calls) == 8:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(RuntimeError, match="killed"):
        TrainingRun(TrainingSettings(out=out, **settings), Killed()).run()
    shutil.rmtree(out)
    left.rename(out)
    (out / "work" / ".generalist.ckpt.1.tmp").write_text("half of a checkpoint")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    pause = Interrupted()
    with pytest.raises(Paused), pause.listening():
        TrainingRun(TrainingSettings(out=out, resume=True, **settings), pause).run()
    assert pause.passes == 3, "an interruption does not wait for the end of the shard"
    with calls_of(Budget, "progress", interrupt):
        run("train", "--target", target, "--data", data, "--out", out, *flags, "--resume", code=130)
    assert (out / "work" / "specialist-1.ckpt").exists() and not (out / "report.json").exists()
    train_drafts(target, [data], out, resume=True, **OPTIONS)
    assert weights_of(out) == weights_of(trained)
    assert not list(out.rglob(".*.tmp"))


def test_the_printed_command_quotes_its_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    report = TrainingReport(1.0, (), 1, {"ssm-1": 0.5}, 0)
    monkeypatch.setattr("treespec.training.run.train_drafts", lambda **_: report)
    printed = run("train", "--target", "my model", "--out", "my drafts").stdout.splitlines()[-1]
    draft = str(Path("my drafts") / "ssm-1")
    assert shlex.split(printed) == ["treespec", "generate", "--model", "my model", "--draft", draft, "..."]


def test_messages_need_a_chat_template(target: Path, tmp_path: Path) -> None:
    (data := tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    with pytest.raises(ConfigError, match=r"chats.jsonl: 'messages', but .* has no chat template; pass prompt or text"):
        train_drafts(target, [data], tmp_path / "out", tokens=10)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_else_is_refused(target: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="is not empty; use --resume"):
        train_drafts(target, [data], tmp_path, tokens=10)
    with pytest.raises(ConfigError, match="holds no run to resume; choose another --out"):
        train_drafts(target, [data], tmp_path, tokens=10, resume=True)
    (tmp_path / "work").mkdir()
    stored = TrainingSettings(target, [data], tmp_path, tokens=10).stored()
    (file := tmp_path / "work" / "settings.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=r"with other settings: \{'tokens': 10, 'seed': 0\}; repeat them"):
        train_drafts(target, [data], tmp_path, tokens=20, seed=4, resume=True)
    file.unlink()
    file.parent.rmdir()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.slow
def test_a_quantised_target_is_dequantised(tmp_path: Path) -> None:
    plain = make_llama(tmp_path / "plain", 0, torch.bfloat16)
    convert_checkpoint(plain, tmp_path / "int8", quantization="int8")
    found, expected = open_model(tmp_path / "int8"), open_model(plain)
    assert found.dtype == torch.bfloat16
    for name, weight in expected.state_dict().items():
        own = found.state_dict()[name]
        quantised = name.endswith("proj.weight") and "layers" in name
        right = dequantize(quantize(weight, 8)).bfloat16() if quantised else weight
        assert torch.equal(own, right), name
    for folder, whole in ((tmp_path / "int8", found), (plain, expected)):
        first = open_model(folder, layers=1)
        assert first.config.num_hidden_layers == 1 < whole.config.num_hidden_layers
        assert all(torch.equal(weight, whole.state_dict()[name]) for name, weight in first.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_students_start_from_the_targets_rows(tied: bool, tmp_path: Path) -> None:
    """Narrow ones keep the similarity of tokens."""
    sizes = {"hidden_size": 192, "intermediate_size": 384, "num_attention_heads": 12, "num_key_value_heads": 6}
    folder = make_llama(tmp_path / "target", 0, tie_word_embeddings=tied, **sizes)
    target, target_ids = AutoModelForCausalLM.from_pretrained(folder), np.array([*range(2, 42), -1])
    student, narrow = (make_student(target, 2, width, target_ids, [7]) for width in (None, 128))
    assert student.config.tie_word_embeddings is tied and student.config.eos_token_id == [5]
    config = narrow.config
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (128, 256, 16)
    assert (config.num_attention_heads, config.num_key_value_heads) == (8, 4)
    for of in ("get_input_embeddings", "get_output_embeddings"):
        own, fewer, source = (getattr(model, of)().weight for model in (student, narrow, target))
        rows = torch.cat((source[target_ids[:-1]], source.mean(0, keepdim=True)))
        assert torch.equal(own, rows)
        torch.testing.assert_close(fewer @ fewer.T, rows @ rows.T)  # 41 rows have at most 41 principal components
    (vectors_and_ends,) = (each for each in optimizers_for(student) if isinstance(each, torch.optim.AdamW))
    trained = {id(p) for group in vectors_and_ends.param_groups for p in group["params"] if p.ndim == 2}
    assert trained == {id(student.get_input_embeddings().weight), id(student.get_output_embeddings().weight)}
    write_student(narrow, tmp_path / "draft", target_ids, 64)
    llm = LLM(make_llama(tmp_path / "small", 0, vocab_size=64), drafts=[tmp_path / "draft"], compile=False)
    plain, tree = (llm.generate({"prompt_token_ids": [5, 6, 7]}, spec=spec)[0] for spec in ("off", SpecConfig(nodes=8)))
    assert plain.outputs[0].token_ids == tree.outputs[0].token_ids
    with pytest.raises(ModelError, match="hidden=192: the target's width is 192; choose less, or omit hidden"):
        make_student(target, 2, 192, target_ids, [7])


@pytest.mark.slow
def test_muon_in_float32_makes_torchs_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(24, 40), (40, 24), (32, 32)]
    begin, *gradients = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(5))
    moved, states = [], []
    for kind in (torch.optim.Muon, Float32Muon):
        parameters = [torch.nn.Parameter(each.clone()) for each in begin]
        optimizer = kind(parameters, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient
            optimizer.step()
        moved.append([parameter.detach() - each for parameter, each in zip(parameters, begin, strict=True)])
        states.append(optimizer.state_dict())
    for theirs, ours in zip(*moved, strict=True):
        assert_close(ours, theirs, max_error=0.1, rms_error=0.02)  # bfloat16 has a precision of 0.4 %
    for theirs, ours in zip(*(state["state"].values() for state in states), strict=True):
        assert torch.equal(ours["momentum_buffer"], theirs["momentum_buffer"]), "checkpoints fit both"
    singular = torch.linalg.svdvals(orthogonalize(gradients[0][0], (3.4445, -4.775, 2.0315), 5, 1e-7))
    assert singular.min() > 0.5 and singular.max() < 1.3


@pytest.mark.slow
def test_sizes_follow_from_measured_passes(target: Path) -> None:
    """Costs in proportion to layers and width, of a target whose pass takes 100 such units."""
    config = LlamaConfig(hidden_size=256, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2)

    def chosen(unit: float, layers: int | None = None, hidden: int | None = None) -> tuple[int, int | None]:
        return choose_size(
            lambda count, width: (unit * count * (width or 256) / 256, 100.0), config, 12, layers, hidden
        )

    assert [chosen(unit) for unit in (0.5, 1.5, 2.0, 99.0)] == [(6, None), (2, None), (2, 192), (2, 64)]
    assert chosen(99.0, layers=3) == (3, None) and chosen(1.0, hidden=128) == (6, 128)

    def write(layers: int, width: int | None, folder: Path) -> None:
        write_student(make_student(open_model(target), layers, width, target_ids, [0]), folder, target_ids, VOCAB)

    target_ids = np.array([*range(64), -1])
    assert measure_level(target, write, {"compile": False}, 1, None) == (CURVE.draft_seconds, CURVE.verify(1.0))
