"""`treespec bench` at a temperature: paired seeds, rules on one tree, intervals, and the shares of a round."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.bench.test_bench import arguments, options
from tests.helpers.commands import run
from tests.helpers.exactness import altered_logits
from tests.helpers.models import random_prompts, tiny_llm
from treespec import SamplingParams, SpecConfig
from treespec.bench.measure import MEANING, profiled
from treespec.bench.modes import PLAIN, rule_modes
from treespec.bench.report import differences, interval, resampled_lengths
from treespec.bench.run import bench
from treespec.config.configs import VERIFICATIONS
from treespec.engine.executor import StageClock
from treespec.planning.round_costs import RoundSeconds

pytestmark = pytest.mark.slow


def test_differences_are_paired_by_prompt() -> None:
    modes = rule_modes(("naive", "rejection"), [(2, 1)], sampled=True)[1:]
    rng = np.random.default_rng(0)
    passes = rng.integers(20, 60, (2, 40))

    def sample(passes: Any) -> Any:
        return SimpleNamespace(tokens=[[0] * 60] * 40, passes=passes.tolist())

    samples = {"naive-n5": [sample(each) for each in passes], "rejection-n5": [sample(each - 2) for each in passes]}
    (length, low, high), (other, *_) = (interval(resampled_lengths(each)) for each in samples.values())
    assert length == pytest.approx(2 * 40 * 60 / passes.sum()) and low < length < high
    [pair] = differences(modes, samples)
    assert (pair["mode"], pair["minus"]) == ("rejection-n5", "naive-n5")
    difference, least, most = pair["difference"]
    assert difference == pytest.approx(other - length) and 0 < least < difference < most
    assert most - least < (high - low) / 2, "what prompts have in common is not in the difference"
    assert differences(modes, samples) == [pair]
    [same] = differences(modes, dict.fromkeys(samples, samples["naive-n5"]))
    assert same["difference"] == [0.0, 0.0, 0.0]


def test_a_stage_inside_another_is_counted_once() -> None:
    now = [0.0]
    clock = StageClock(lambda: now[0])

    def pass_in(stage: str, seconds: float) -> str:
        ended = clock.enter(stage)
        now[0] += seconds
        return ended

    pass_in("forward", 1.0)
    mark = clock.mark()
    pass_in("draft", 3.0)
    assert pass_in("search", 2.0) == "draft"
    pass_in("draft", 1.0)
    pass_in("commit", 0.0)
    clock.move("draft", forward=0.5)
    assert (clock.seconds["draft"], clock.seconds["search"], clock.seconds["forward"]) == (3.5, 2.0, 1.5)
    assert clock.since(mark, read=1.0) == (RoundSeconds(2.5, 1.0, 1.5, 2.0), 0.0)


@pytest.mark.parametrize("rule", [None, *VERIFICATIONS])
def test_the_parts_of_a_round(rule: str | None) -> None:
    """Every part takes time, in greedy rounds and under every rule; a sample is complete when its block fails too."""
    llm = tiny_llm()
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.8 if rule else 0.0, seed=1)
    with pytest.raises(ZeroDivisionError), profiled(llm.engine) as profile:
        llm.generate(random_prompts([5]), params, spec=SpecConfig(branching=(2, 1), verification=rule or "coupled"))
        raise ZeroDivisionError
    assert list(profile.stages) == list(MEANING)
    assert profile.prefill_seconds > 0 and all(seconds > 0 for seconds in profile.stages.values())


def test_rules_in_one_document(ids_file: Path, lent_engine: None) -> None:
    more: dict[str, Any] = {"branching": (2, 2), "nodes": (16,), "repeats": 2, "batch": (1, 2)}
    document = bench(options(ids_file, temperature=0.9, verification=VERIFICATIONS, **more))
    json.dumps(document, allow_nan=False)
    assert document["temperature"] == 0.9 and "not the tokens" in str(document["definitions"])
    for figures in document["runs"]:
        by_name = {mode["mode"]: mode for mode in figures["modes"]}
        assert list(by_name) == [PLAIN, "coupled-n7", "naive-n7", "rejection-n7", "traversal-n7"]
        assert [mode["mismatches"] for mode in by_name.values()] == [0, 0, 0, None, None]
        assert figures["rules"] == list(by_name)[1:]
        for name in figures["rules"]:
            low, high = by_name[name]["acceptance_length_interval"]
            assert low <= by_name[name]["acceptance_length"] <= high
        pairs = {(each["mode"].removesuffix("-n7"), each["minus"]) for each in figures["differences"]}
        below = {"coupled": ["naive"], "rejection": ["naive"], "traversal": ["rejection", "coupled"]}
        assert pairs == {(rule, f"{other}-n7") for rule, others in below.items() for other in others}
        for mode in by_name.values():
            total = sum(mode["profile_ms"].values())
            assert 0 < mode["verify_share"] < 1 and total > 0
            assert set(mode["accepted_by_source"]) <= {"ssm-1", "ssm-2", "ssm-3"}


@pytest.mark.parametrize("shift", [0, 1])
def test_a_planted_fault_is_counted(ids_file: Path, lent_engine: None, shift: int) -> None:
    def shifted(request: Any, tree: Any, logits: Any) -> None:
        logits.copy_(logits.roll(shift if len(tree) > 1 else 0, 1))

    with altered_logits(tiny_llm(), shifted):
        figures = bench(options(ids_file, temperature=1.0, only=("tree-ssms-*", "chain-k3")))["runs"][0]
    plain, *drafted = figures["modes"]
    assert [mode["mode"] for mode in drafted] == ["chain-k3", "tree-ssms-n8"] and figures["rules"] is None
    assert plain["mismatches"] == 0 and all((mode["mismatches"] > 0) == bool(shift) for mode in drafted)


def test_prints_rules(ids_file: Path, lent_engine: None) -> None:
    given = arguments(ids_file, "--verification", "all", "--branching", "2,1", "--temperature", 0.9)
    at = given.index("--nodes")
    ran = run(*given[:at], *given[at + 2 :])
    setting = ["temperature 0.9", "2,1 (5 nodes)", "SSM drafts only", "transformers is skipped"]
    figures = ["traversal, 5 nodes, less rejection", "95 % interval", "by rule", "preserve the distribution"]
    for part in setting + figures:
        assert part in ran.stdout, part
    [line] = [line for line in ran.stdout.splitlines() if line.startswith("rejection, 5 nodes") and "(" in line]
    assert line.split()[-1] == "-"
    document = run(*arguments(ids_file, "--verification", "naive", "--json")).document
    assert document["temperature"] == 0.8, "by default"
    assert [mode["branching"] for mode in document["runs"][0]["modes"]] == [None, [2, 1, 1]]
