"""`treespec bench`: what it counts, what it prints, what it refuses. Nothing here depends on a time."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.helpers.commands import BENCH, lend, run
from tests.helpers.models import make_llama, new_folder, open_llm, tiny
from tests.helpers.tokenizers_made import TEXT, byte_level, save_tokenizer
from treespec import LLM
from treespec.bench.measure import MEANING, Sample
from treespec.bench.modes import PLAIN, Mode, our_modes, peer_modes, select
from treespec.bench.options import Options
from treespec.bench.prompts import choose, held_out_prompts
from treespec.bench.report import best, comparisons, distinct_share, percentile, summarise
from treespec.bench.run import bench
from treespec.errors import ConfigError
from treespec.text.prompt_files import Prompt, encode_prompt, read_prompts

pytestmark = pytest.mark.slow

FIGURES = set(
    """mode engine label nodes k sources total_output_tokens output_throughput mean_ttft_ms p50_itl_ms p99_itl_ms
    speedup speedup_min speedup_max acceptance_length acceptance_length_interval acceptance_length_not_looping
    acceptance_length_by_kind acceptance_by_depth mismatches distinct_4grams nodes_per_pass efficiency pass_ratio
    draft_share profile_ms""".split()
)


def arguments(ids_file: Path, *more: object) -> list[str]:
    target, drafts = tiny()
    models = ["--model", target, *(part for draft in drafts for part in ("--draft", draft))]
    sizes = ["--samples", 3, "--max-tokens", 8, "--repeats", 1, "--warmup", 0, "--k-values", 3, "--nodes", 8]
    return [str(each) for each in ("bench", *models, "--prompts", ids_file, *sizes, *more)]


def options(ids_file: Path, **more: Any) -> Options:
    target, drafts = tiny()
    small: dict[str, Any] = {"samples": 3, "max_tokens": 8, "repeats": 1, "warmup": 0, "k_values": (3,), "nodes": (8,)}
    small |= {"model": target, "drafts": [str(draft) for draft in drafts], "prompts": ids_file}
    return Options(**(small | more))


# --- prompts


@pytest.mark.parametrize(
    "entry, expected",
    [
        ({"question_id": 81, "category": "writing", "turns": ["first", "second"]}, Prompt("first", "writing")),
        ({"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f", "test": "x"}, Prompt("def f():")),
        ({"prompt": "plain"}, Prompt("plain")),
        ({"text": "t", "package": "p", "kind": "code"}, Prompt("t", "code", "p")),
        ({"prompt_token_ids": [3, 1]}, Prompt([3, 1])),
        ({"messages": [{"role": "user", "content": "m"}]}, Prompt([{"role": "user", "content": "m"}])),
    ],
)
def test_prompt_forms(entry: dict[str, Any], expected: Prompt, tmp_path: Path) -> None:
    lines, listed = tmp_path / "prompts.jsonl", tmp_path / "prompts.json"
    lines.write_text(f"{json.dumps(entry)}\n\n{json.dumps(entry)}\n")
    listed.write_text(json.dumps([entry, entry], indent=1))
    assert read_prompts(lines) == read_prompts(listed) == [expected, expected]


@pytest.mark.parametrize(
    "text, where",
    [
        ('{"prompt": "a"}\n{"prompt": 3}', "line 2: 'prompt' holds '3'"),
        ('{"prompt": "a"}\n\n{"question": "a"}', "line 3: keys 'question'"),
        ('{"turns": []}', "line 1: 'turns' holds"),
        ('{"messages": ["text"]}', "line 1: 'messages' holds"),
        ('{"prompt": "a"}\nnot JSON', "line 2: not JSON"),
        ('[{"prompt": "a"}, 7]', "entry 2: a JSON int"),
        ("", "contains no prompt"),
    ],
)
def test_bad_prompt_files(text: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_prompts(path)
    assert str(path) in str(caught.value) and where in str(caught.value)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_prompts(path)


def test_prompts_of_chat_models(tmp_path: Path) -> None:
    """Instructions become user messages, texts stay raw."""
    folder = save_tokenizer(tmp_path, byte_level(400, TEXT.splitlines()))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a b"}\n{"turns": ["a b"]}\n{"text": "a b"}\n{"prompt_token_ids": [3]}')
    prompts = read_prompts(path, chat=True)
    encoded = [encode_prompt(tokenizer, prompt.content) for prompt in prompts]
    rendered = tokenizer.encode("<user>a b<assistant>", add_special_tokens=False)
    assert encoded == [rendered, rendered, tokenizer.encode("a b"), [3]]


@pytest.mark.parametrize("chat", [False, True])
def test_embedded_prompts_are_balanced(chat: bool) -> None:
    known = read_prompts(held_out_prompts(chat), chat)
    assert all(isinstance(prompt.content, str) != chat for prompt in known)
    chosen = choose(known, 24, seed=0)
    kinds = Counter(prompt.kind for prompt in chosen)
    assert len(chosen) == 24 and max(kinds.values()) - min(kinds.values()) <= 1
    for kind in kinds:
        packages = Counter(prompt.package for prompt in chosen if prompt.kind == kind)
        assert max(packages.values()) - min(packages.values()) <= 1
    assert choose(known, 24, seed=0) == chosen != choose(known, 24, seed=1)
    assert choose(known, 10**6, seed=0) == known


# --- what is counted


def test_looping_outputs_are_left_out() -> None:
    lively, looping = list(range(40)), [1, 2] * 20
    assert distinct_share(lively) == 1.0 and distinct_share(looping) < 0.1 and distinct_share([1]) == 1.0
    prompts = [Prompt([1], "code"), Prompt([1], "data")]
    plain = sample_of([lively, looping], passes=[40, 40])
    tree = sample_of([lively, looping], passes=[20, 10])
    figures = summarise(Mode("m", "m", {"nodes": 8}), [tree], [plain], prompts)
    assert figures["acceptance_length"] == 80 / 30 and figures["acceptance_length_not_looping"] == 2.0
    assert figures["acceptance_length_by_kind"] == {"code": 2.0, "data": 4.0}
    # At a temperature, over all repeats: the first prompt's outputs loop in one of two.
    repeats = [sample_of(outputs, passes=[20, 20]) for outputs in ([lively, looping], [looping, looping])]
    sampled = summarise(Mode("m", "m", {"nodes": 8}, keeps_tokens=False), repeats, repeats, prompts, sampled=True)
    assert sampled["acceptance_length_not_looping"] == 2.0 and sampled["mismatches"] is None


def test_speedup_is_within_a_repeat_and_efficiency_by_its_definition() -> None:
    prompts = [Prompt([1])]
    slow, fast = sample_of([list(range(8))], [8], seconds=8.0), sample_of([list(range(8))], [8], seconds=4.0)
    trees = [sample_of([list(range(8))], [2], seconds=4.0, draft=1.0), sample_of([list(range(8))], [2], seconds=1.0)]
    figures = summarise(Mode("m", "m", {"nodes": 8}), trees, [slow, fast], prompts)
    assert (figures["speedup_min"], figures["speedup"], figures["speedup_max"]) == (2.0, 3.0, 4.0)
    assert figures["output_throughput"] == (2 + 8) / 2
    # Plain passes took 1 and 0.5 s, the trees' 1.5 s with drafting of 0.5 s, and 0.5 s without.
    expected = [2.0 / (4 / (1.5 + 0.5)), 4.0 / (4 / (0.5 / 0.5))]
    assert figures["efficiency"] == pytest.approx(sum(expected) / 2)


def sample_of(tokens: list[list[int]], passes: list[int], seconds: float = 1.0, draft: float = 0.0) -> Sample:
    """Measurements of a mode that took so many passes for each prompt's tokens."""
    count, rounds = sum(map(len, tokens)), sum(passes)
    parts = dict.fromkeys(MEANING, 0.0) | {"draft": draft, "forward": seconds - draft}
    told = {"ttft": [0.1] * len(tokens), "per_token": [seconds / count] * len(tokens), "passes": passes}
    told |= {"nodes": rounds, "accepted": Counter({0: rounds}), "rounds": rounds, "stages": parts}
    return Sample(tokens=tokens, decode_seconds=seconds, decoded=count, total_seconds=seconds, **told)


def test_best_and_comparisons() -> None:
    names = [PLAIN, "auto", "hf-plain", "hf-assisted-a-k3", "hf-assisted-b-own"]
    rates = dict(zip(names, (1.0, 4.0, 0.5, 1.0, 2.0), strict=True))
    samples = {name: [sample_of([[1] * 8], [8], seconds=8 / rate)] * 2 for name, rate in rates.items()}
    engines = {name: "transformers" if "hf" in name else "treespec" for name in names}
    fastest = best([{"mode": name, "engine": engines[name], "output_throughput": rates[name]} for name in names])
    assert fastest == {"ours": "auto", "assisted": "hf-assisted-b-own"}
    found = {(each["mode"], each["peer"]): each["times"] for each in comparisons(fastest, samples)}
    assert found["auto", "hf-assisted-b-own"] == 2.0 and found[PLAIN, "hf-plain"] == 2.0
    assert percentile(list(range(1, 101)), 50) == 50 and percentile([3.0], 99) == 3.0


# --- how it runs


def test_modes() -> None:
    ours, peers = our_modes(["x", "y"], [3, 5], [8]), peer_modes(["x", "y"], [3])
    trees = [f"tree-{kind}-n8" for kind in "x y ssms trusted lookup everything trusted-lookup".split()]
    assert [mode.name for mode in ours] == ["plain", "chain-k3", "chain-k5", *trees, "auto"]
    assisted = [f"hf-assisted-{draft}-{count}" for draft in "xy" for count in ("k3", "own")]
    assert [peer.name for peer in peers] == ["hf-plain", *assisted, "hf-lookup-k3"]
    assert [mode.name for mode in our_modes([], [3], [8])] == ["plain", "tree-lookup-n8", "auto"]
    combined = [mode for mode in our_modes(["x", "y"], [3], [8], ["x+lookup"]) if "x+lookup" in mode.name]
    assert [(mode.name, mode.spec.nodes) for mode in combined] == [("tree-x+lookup-n8", 8), ("auto-x+lookup", "auto")]
    assert {mode.spec.sources for mode in combined} == {("x", "lookup")}
    with pytest.raises(ConfigError, match=r"--combine x[+]z: unknown z; valid: x, y, ssm, lookup, suffix"):
        our_modes(["x", "y"], [3], [8], ["x+z"])
    assert "tree-x-n8" not in [mode.name for mode in our_modes(["x"], [3], [8])], "one SSM alone is all SSMs"
    some, others = select(ours, peers, ["tree-?-*", "hf-plain"])
    assert [mode.name for mode in some] == ["plain", "tree-x-n8", "tree-y-n8"]
    assert [peer.name for peer in others] == ["hf-plain"]
    with pytest.raises(ConfigError, match="--only nothing: no such mode; valid: plain, chain-k3"):
        select(ours, peers, ["nothing"])


def test_document_of_all_kinds_of_modes(ids_file: Path, lent_engine: None) -> None:
    document = bench(options(ids_file, batch=(1, 2), warmup=1))
    json.dumps(document)
    assert document["num_prompts"] == 3 and document["kinds"] == {"code": 2, "data": 1}
    assert document["dtype"] == "float32" and document["versions"]["transformers"] and document["grown"] is None
    single, pair = document["runs"]
    assert (single["batch"], pair["batch"]) == (1, 2) and single["peers_left_out"] == []
    assert all("assisted" in name or "lookup" in name for name in pair["peers_left_out"])
    assert "hf-plain" in [mode["mode"] for mode in pair["modes"]] and "batch 1 only" in pair["why_left_out"]
    assert set(single["best"]) == {"ours", "assisted", "lookup"} and set(pair["best"]) == {"ours"}
    assert (single["num_prompts"], pair["num_prompts"]) == (3, 2), "every batch is full"
    assert {mode["total_output_tokens"] for mode in single["modes"]} == {24}
    assert {mode["total_output_tokens"] for mode in pair["modes"]} == {16}
    for mode in single["modes"] + pair["modes"]:
        assert mode.keys() >= FIGURES
        assert mode["mismatches"] == 0, mode["mode"]  # float32: transformers too
        assert mode["speedup_min"] <= mode["speedup"] <= mode["speedup_max"]
        assert 1 <= mode["acceptance_length"] <= 8
        assert (mode["profile_ms"] is None) == (mode["engine"] == "transformers")
    by_name = {mode["mode"]: mode for mode in single["modes"]}
    assert by_name["plain"]["acceptance_length"] == by_name["hf-plain"]["acceptance_length"] == 1.0
    assert by_name["plain"]["speedup"] == 1.0 and by_name["plain"]["acceptance_by_depth"] == []
    assert by_name["chain-k3"]["nodes"] == 4 and len(by_name["chain-k3"]["acceptance_by_depth"]) <= 3
    tree = by_name["tree-ssms-n8"]
    emitted = 1 + sum(tree["acceptance_by_depth"])
    assert tree["acceptance_length"] == pytest.approx(emitted, abs=0.15)  # the last round may end inside its path
    pairs = {(each["mode"], each["minus"]) for each in single["differences"]}
    below = {"everything": ["ssms", "lookup"], "trusted-lookup": ["trusted", "lookup"]}
    below |= {merged: ["ssm-1", "ssm-2", "ssm-3"] for merged in ("ssms", "trusted")}
    assert pairs == {(f"tree-{a}-n8", f"tree-{b}-n8") for a, others in below.items() for b in others}


# --- the command


def test_prints_tables_or_a_document(ids_file: Path, lent_engine: None, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    ran = run(*arguments(ids_file, "--only", "chain-k3", "tree-ssms-n8", "hf-plain", "--profile", "--out", out))
    modes = ["plain decoding", "chain, K=3", "all SSMs, 8 nodes", "transformers plain"]
    figures = ["times as fast", "acceptance length", "ms per round", "efficiency", "output tokens per target pass"]
    for part in ("float32", "3 (2 code, 1 data)", *modes, *figures):
        assert part in ran.stdout, part
    assert "grown" not in ran.stdout and len(json.loads(out.read_text())["runs"][0]["modes"]) == 4
    document = run(*arguments(ids_file, "--only", "chain-k3", "--no-peers", "--json")).document
    assert [mode["mode"] for mode in document["runs"][0]["modes"]] == ["plain", "chain-k3"]


def test_grown_figures_say_so(tmp_path: Path, ids_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafts = tiny()

    def opened(model: Any, given: Any, spec: Any, **rest: Any) -> LLM:
        return open_llm(model, drafts[:1] if given else [], max_num_seqs=1)

    lend(opened, monkeypatch, BENCH)
    sizes = "--samples 2 --max-tokens 8 --repeats 1 --warmup 0 --only tree-ssms-n16 --grow 4M".split()
    given = ["--model", target, "--draft", drafts[0], "--prompts", ids_file, *sizes]
    ran = run("bench", *given, "--out", tmp_path / "out.json")
    assert f"it computes the function of {target}: 0 of its tokens differ" in ran.stdout
    tables = [line for line in ran.stdout.splitlines() if line.startswith("batch")]
    assert tables and all("grown" in line for line in tables)
    figures = json.loads((tmp_path / "out.json").read_text())["grown"]
    assert figures["parameters"] == pytest.approx(4e6, rel=0.1) and figures["mismatches_with_source"] == 0


@pytest.mark.parametrize(
    "given, message",
    [
        (["--only", "nothing"], "--only nothing: no such mode"),
        (["--nodes", "8", "1"], "nodes=(8, 1); valid: whole numbers from 2"),
        (["--k-values", "5", "x"], "--k-values x: valid: whole numbers"),
        (["--grow", "huge"], "--grow huge: valid are sizes"),
        (["--grow-vocab", "600"], "require grow"),
        (["--out", "no/such/folder/out.json"], "does not exist"),
        (["--max-tokens", "1000"], "fits: --max-tokens 1000 leaves"),
        (["--batch", "1,5"], "--batch 5, but there are only 4 prompts; raise --samples"),
        (["--verification", "greedy"], "--verification greedy: valid are coupled"),
        (["--branching", "2,1"], "branching needs verification"),
        (["--verification", "all", "--branching", "2,x"], "--branching 2,x"),
        (["--verification", "all", "--branching", "900"], "branching=(900,)"),
        (["--verification", "all", "--nodes", "8", "--only", "tree-*"], "valid: plain, coupled-n7"),
        (["--temperature", "-1"], "temperature=-1"),
        (["--temperature", "1", "--only", "hf-plain"], "--only hf-plain"),
    ],
)
def test_bad_options(given: list[str], message: str, ids_file: Path, lent_engine: None) -> None:
    given = given if {"--only", "--verification"} & {*given} else [*given, "--only", "chain-k3"]
    error = run("bench", "--prompts", ids_file, *given, "--json", code=2).document["error"]
    assert message in error["message"]


def test_rules_need_an_ssm(ids_file: Path, lent_engine: None) -> None:
    with pytest.raises(ConfigError, match="no SSM; pass --draft"):
        bench(options(ids_file, verification=("coupled",), drafts=[]))


def test_text_prompts_need_a_tokenizer(ids_file: Path, lent_engine: None) -> None:
    ids_file.write_text('{"prompt": "text"}\n')
    assert "no tokenizer; use prompt" in run(*arguments(ids_file, "--only", "chain-k3"), code=2).stderr


def test_a_user_s_models_may_have_no_draft(tmp_path: Path, ids_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_llama(new_folder("alone"), 5)
    lend(lambda model, drafts, spec, **rest: open_llm(model, drafts), monkeypatch, BENCH)
    document = bench(Options(model=target, prompts=ids_file, max_tokens=8, repeats=1, only=("hf-*",)))
    assert document["drafts"] == [] and all(mode["mismatches"] == 0 for mode in document["runs"][0]["modes"])
