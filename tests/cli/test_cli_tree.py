"""`treespec tree`: the drawn tree is that of a round, and its texts are those of the tokens."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np

from tests.helpers.commands import run
from tests.helpers.models import tree_of
from treespec import LLM, SamplingParams
from treespec.drawing.recording import picture
from treespec.engine.round_record import RoundRecord

PROMPT = "def add(a, b):\n    return"


def test_the_drawn_tree_is_the_real_one(loaded: LLM) -> None:
    output = loaded.generate(PROMPT, SamplingParams(max_tokens=64))[0]
    sequence = output.prompt_token_ids + output.outputs[0].token_ids
    at = len(output.prompt_token_ids)
    for number in range(1, 5):
        document = run("tree", PROMPT, "--round", number, "--json").document
        tokens, path = document["tokens"], document["path"]
        assert len(tokens) == 16 and document["round"] == number
        assert document["context"] == sequence[: at - 1] and tokens[0] == sequence[at - 1]
        assert document["emitted"] == [tokens[i] for i in path[1:]] + [document["bonus"]]
        assert document["emitted"] == sequence[at : at + len(document["emitted"])]
        assert [document["parents"][i] for i in path] == [-1, *path[:-1]]
        assert [document["depths"][i] for i in path] == list(range(len(path)))
        assert document["sources"][0] == [] and document["probs"][0] is None
        assert all(document["sources"][1:]) and all(0 < p <= 1 for p in document["probs"][1:])
        assert {len(document[key]) for key in ("tokens", "texts", "parents", "depths", "sources", "probs")} == {16}
        at += len(document["emitted"])


def test_the_best_tree_as_text_and_svg(loaded: LLM, tmp_path: Path) -> None:
    ran = run("tree", PROMPT, "--svg", tmp_path / "tree.svg")
    document = run("tree", PROMPT, "--json").document
    first, *lines = ran.stdout.splitlines()
    assert first.startswith(f"round {document['round']}, the best of the first 8: they accepted ")
    accepted = [int(count) for count in first.split("accepted ")[1].split()[:8]]
    assert accepted[document["round"] - 1] == max(accepted) == len(document["path"]) - 1 > 0
    assert sum("●" in line or "○" in line for line in lines) == 16 + 1  # the legend
    assert f"accepted {max(accepted)} of 15 drafted nodes + 1 bonus token" in ran.stdout and "\x1b" not in ran.stdout
    root = ElementTree.parse(tmp_path / "tree.svg").getroot()
    groups = [group.get("class") for group in root.iter("{http://www.w3.org/2000/svg}g")]
    assert groups.count("on") == max(accepted) and groups.count("off") == 15 - max(accepted)
    assert str(tmp_path / "tree.svg") in ran.stderr


def test_bad_options(loaded: LLM, tmp_path: Path) -> None:
    assert "missing" in run("tree", PROMPT, "--svg", tmp_path / "missing" / "tree.svg", code=2).stderr
    ran = run("tree", PROMPT * 12, "--round", 999, code=2)  # the context has room for few rounds
    assert "--round 999" in ran.stderr and "valid: 1 to" in ran.stderr
    assert "--round 0" in run("tree", PROMPT, "--round", 0, code=2).stderr


def test_texts_of_nodes_follow_their_own_path(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    context, [root, *path] = tokenizer.encode("def add("), tokenizer.encode("self, other")
    tree = tree_of(root, {tuple(path[:depth]): 0.5 for depth in range(1, len(path))} | {(path[0], root): 0.2})
    accepted = [0, *(node for node in range(1, len(tree)) if tree.tokens[node] == path[tree.depths[node] - 1])]
    shown = picture(RoundRecord("r", 1, context, tree, np.array(accepted), path[-1]), tokenizer)
    accepted_text = "".join(shown.tokens[node] for node in shown.path)
    assert shown.context + accepted_text + str(shown.bonus) == "def add(self, other"
