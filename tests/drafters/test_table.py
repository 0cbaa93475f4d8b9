"""The n-gram table: what it counts, its compiled twin, and engines that draft with it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.enumeration import paths_of
from tests.helpers.exactness import differences, run
from tests.helpers.libraries import LIBRARIES
from tests.helpers.models import VOCAB, greedy, new_folder, open_llm, quick, random_prompts, tiny
from tests.helpers.quantized_checkpoints import needs_compiler
from treespec import LLM, SpecConfig
from treespec.drafters.table.stored_table import StoredTable, quantize_probs
from treespec.drafters.table.table_drafter import TableDrafter
from treespec.errors import ConfigError, ModelError
from treespec.request import Request
from treespec.sampling_params import SamplingParams
from treespec.training.lessons import TOP, Lessons
from treespec.training.table import count_lessons, table_agreement
from treespec_kernels.cpu.cpu_library import find_compiler
from treespec_kernels.cpu.table_cpu import PROBS, table_library

TABLE = SpecConfig(nodes=16, sources=("table",))


def lessons_of(texts: list[list[int]], firsts: int = 1, sure: float = 1.0) -> Lessons:
    """Lessons whose target gives its next token the probability `sure`, and the rest to the token after that."""
    tokens = np.array([token for text in texts for token in text], dtype=np.int32)
    generated = np.concatenate([text[firsts:] for text in texts])
    ids = (generated[:, None] + np.arange(TOP)) % VOCAB
    probs = np.full((len(generated), TOP), 1e-7)
    probs[:, 0], probs[:, 1] = sure, max(1 - sure, 1e-7)
    starts = np.cumsum([0, *map(len, texts)])
    firsts_of = np.full(len(texts), firsts)
    return Lessons(tokens, starts, firsts_of, ids.astype(np.int32), np.log(probs).astype(np.float16), np.array(["x"]))


def random_texts(seed: int, words: int = 9, count: int = 30) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, words, int(rng.integers(2, 60))).tolist() for _ in range(count)]


def prob_after(table: StoredTable, text: list[int], token: int, temperature: float = 0.0) -> float:
    tree = TableDrafter(table).expand(np.array(text), len(text), 1, 32, 0.0, temperature)
    return float(tree.probs[1:][tree.tokens[1:] == token].sum())


def test_counts_are_interpolated() -> None:
    """Of 8 times 2 after 1, and 4 times 3 after 0 and 1: with Witten and Bell's weights, and two types more each."""
    table = count_lessons(lessons_of([[1, 2]] * 8 + [[0, 1, 3]] * 4), VOCAB)
    singles = np.array([0, 4, 8, 4]) / 16
    after_1 = (np.array([0, 0, 8, 4]) + 4 * singles) / (12 + 4)  # two types
    after_01 = (np.array([0, 0, 0, 4]) + 3 * after_1) / (4 + 3)
    for text, expected in (([1], after_1), ([5, 1], after_1), ([0, 1], after_01), ([4, 0, 1], after_01)):
        for token in (2, 3):
            assert prob_after(table, text, token) == pytest.approx(expected[token], rel=0.04)
    assert prob_after(table, [0, 1], 3) > prob_after(table, [0, 1], 3, 2.0) > prob_after(table, [0, 1], 2, 2.0)
    soft = count_lessons(lessons_of([[1, 2]] * 8, sure=0.75), VOCAB)
    assert prob_after(soft, [1], 2) == pytest.approx(3 * prob_after(soft, [1], 3), rel=0.1)


def test_a_table_predicts_its_lessons_and_is_stored(tmp_path: Path) -> None:
    lessons = lessons_of([[*text, *range(20, 32)] for text in random_texts(0)])
    table = count_lessons(lessons, VOCAB)
    table.save(tmp_path)
    loaded = StoredTable.load(tmp_path, VOCAB)
    for name, array in vars(table).items():
        assert np.array_equal(array, getattr(loaded, name)) and array.dtype == getattr(loaded, name).dtype
    tree = TableDrafter(loaded).expand(np.array([3, 20, 21, 22]), 4, 5, 8, 0.1)
    assert (23, 24, 25, 26, 27) in paths_of(tree) and (np.diff(tree.values) <= 0).all()
    smaller = count_lessons(lessons, VOCAB, table.nbytes // 2)
    assert smaller.nbytes <= table.nbytes // 2 < table.nbytes
    assert 0.3 < table_agreement(TableDrafter(smaller), lessons) < table_agreement(TableDrafter(loaded), lessons)
    with pytest.raises(ModelError, match=f"is the table of a target with {VOCAB} tokens, but this target has 99"):
        StoredTable.load(tmp_path, 99)
    StoredTable(**vars(table) | {"sizes": table.sizes[:-1]}).save(tmp_path)
    with pytest.raises(ModelError, match="is damaged"):
        StoredTable.load(tmp_path, VOCAB)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelError, match="write the table again"):
        StoredTable.load(tmp_path, VOCAB)
    levels = np.array([0.0005, 0.01, 0.5, 0.99, 0.995])
    stored = PROBS[quantize_probs(levels)]
    assert stored == pytest.approx(levels, rel=0.035) and 1 - stored == pytest.approx(1 - levels, rel=0.035)


@needs_compiler
@pytest.mark.parametrize("tokens", [0, 4, 4000])  # of the history; with 4, contexts share slots
def test_compiled_and_python_agree_to_the_bit(tokens: int) -> None:
    stored = count_lessons(lessons_of(random_texts(1, 40), sure=0.8), VOCAB) if tokens != 4 else StoredTable.empty()
    library, rng = table_library(find_compiler(), LIBRARIES), np.random.default_rng(2)
    drafters, nodes = (TableDrafter(stored, None, tokens), TableDrafter(stored, library, tokens)), 0
    requests = [Request(text, SamplingParams(), SpecConfig()) for text in random_texts(3, 40, 6)]
    for number in range(60):
        depths, least = rng.integers(0, 7, len(requests)).tolist(), float(rng.random() ** 4)
        trees, others = ([*drafter.propose(requests, depths, least).trees.values()] for drafter in drafters)
        text = np.array(requests[number % 6].tokens)
        trees.append(drafters[0].expand(text, len(text), 4, int(rng.integers(1, 40)), 0.002, 1.7))
        others.append(drafters[1].expand(text, len(text), 4, len(trees[-1]), 0.002, 1.7))
        for tree, other in zip(trees, others, strict=True):
            tree.check_integrity()
            for name in ("tokens", "parents", "depths", "probs", "values", "draw_nodes"):
                assert np.array_equal(getattr(tree, name), getattr(other, name))
            nodes += len(tree) - 1
        for request in requests:
            request.tokens += rng.integers(0, 40, int(rng.integers(0, 4))).tolist()
        if number % 20 == 19:
            for drafter in drafters:
                drafter.release(requests[0])
                drafter.forget(requests if number == 39 else ())
    assert nodes > (20 if tokens == 4 else 100)


PROMPTS = random_prompts((17, 20, 9))


@pytest.fixture(scope="module")
def folder() -> Path:
    """The table of a run, of the tiny target's own outputs."""
    texts = [output.outputs[0].token_ids for output in open_llm(tiny()[0]).generate(PROMPTS, greedy(40))]
    out = new_folder("run")
    count_lessons(lessons_of([prompt[-3:] + text for prompt, text in zip(PROMPTS, texts, strict=True)], 3), VOCAB).save(
        out / "table"
    )
    return out


def accepted(outputs: Any) -> int:
    return sum(output.metrics.accepted_by_source.get("table", 0) for output in outputs)


@pytest.mark.parametrize("temperature", quick([0, 0.9], (0,)))
@pytest.mark.parametrize("learns", [False, True])
def test_tokens_are_those_of_plain_decoding(folder: Path, learns: bool, temperature: float) -> None:
    """With a stored table and an SSM, or with one that only counts the engine's outputs."""
    target, ssms = tiny()
    drafts = ["table"] if learns else [ssms[0], folder]
    llm = open_llm(target, drafts, suffix_tokens=1000 * learns, max_num_seqs=3)
    assert llm.draft_names == (("table",) if learns else (ssms[0].name, "table")) and llm.stats()["memory"]["table"] > 0
    params = [greedy(40, temperature=temperature, seed=i) for i in range(3)]
    plain = run(llm, PROMPTS, params, "off")
    for spec in (TABLE, SpecConfig(nodes=8), SpecConfig()):
        tree = run(llm, PROMPTS, params, spec)
        assert not differences(plain, tree)
        if spec is TABLE:
            assert accepted(tree.outputs) > (60 if learns or not temperature else 0)


def test_what_an_engine_counts(folder: Path) -> None:
    llm = open_llm(tiny()[0], ["table"], suffix_tokens=4096)

    def gained(spec: SpecConfig = TABLE) -> int:
        return accepted(llm.generate(PROMPTS[:1], greedy(30), spec))

    gained(SpecConfig(sources=("lookup",)))
    assert llm.generate(PROMPTS[:1], greedy(9), TABLE)[0].metrics.accepted_by_source.get("table", 0) < 8
    gained()
    assert gained() > 20
    llm.reset_suffix_cache()
    assert gained() < 20
    for drafts, message in ((["table"], "add suffix_tokens=262144"), ([folder, folder / "table"], "2 tables")):
        with pytest.raises(ConfigError, match=message):
            LLM(tiny()[0], drafts=drafts)
    with pytest.raises(ConfigError, match="this engine has 'lookup', 'grammar'"):
        LLM(tiny()[0], drafts=[], spec=TABLE)
