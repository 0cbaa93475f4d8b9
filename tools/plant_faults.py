"""Plant faults in copies of the repository, and check that the quick tests find each of them.

python tools/plant_faults.py [NAME ...]     all faults, or those whose names contain one of these words

A fault replaces one piece of text in one file of a copy. Its test, which no mark may make slow, has to pass in the
copy without faults and to fail with the fault. A run takes some minutes; `.ci/run` leaves it out. Run it after changes
of tests, and add a fault for each bug that the tests had missed.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers.models.llama.modeling_llama  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
ENGINE, CPU, WEIGHTS = "treespec/", "kernels/treespec_kernels/cpu/", "weights/treespec_weights/"


class Fault(NamedTuple):
    """A fault: `old` becomes `new` in `file`, and `test`, of tests/, fails."""

    name: str
    file: str
    old: str
    new: str
    test: str


EXACT = "engine/test_exactness.py::test_trees_give_the_bits_of_plain_decoding[(0, 1, 2)-float32]"
ORACLE = "engine/test_exactness.py::test_an_oracle_loses_nothing[4-float32]"
SAMPLED = "sampling/test_sampled_exactness.py::test_trees_give_the_tokens_of_plain_decoding[(0, 1, 2)-float32]"

FAULTS = (
    # engine and executors
    Fault(
        "engine: a request whose drafter failed goes on",
        ENGINE + "engine/engine.py",
        '            elif failure is not None:\n                self.finish(request, "error", failure)\n',
        "",
        "drafters/test_own_drafters.py::test_a_fault_names_drafter_request_and_remedy",
    ),
    Fault(
        "engine: a stop inside the accepted path is overrun",
        ENGINE + "request.py",
        "                return list(tokens[:count])\n",
        "                return list(tokens[: count + 1])\n",
        "frontend/test_llm.py::test_stop_tokens_inside_an_accepted_path",
    ),
    Fault(
        "native rounds: the SSMs' K/V are not compacted",
        CPU + "rounds_cpu.h",
        "            commit_path(tree_rows(), r.draft_pools[i], tree, slots.data(), slots.size());\n",
        "",
        "drafters/test_compile_drafting.py::test_trees_are_those_of_the_general_path[dynamic]",
    ),
    Fault(
        "native rounds: rounds ahead outlive a change of the batch",
        ENGINE + "engine/native_rounds.py",
        "if batch != self._batch or _places(batch) != self._ahead[0].places:",
        "if not batch:",
        "engine/test_native_rounds.py::test_requests_join_and_leave_while_rounds_are_ahead",
    ),
    Fault(
        "native rounds: a token that an SSM did not expand counts as read",
        CPU + "rounds_cpu.h",
        "context[tree] + int64_t(slots.size());",
        "context[tree] + rows.lengths[tree];",
        "engine/test_native_rounds.py::test_trees_ahead_are_those_of_the_hosts_steps[0.0]",
    ),
    Fault(
        "engine: the slots of a tree with NaN are not zeroed",
        ENGINE + "engine/host_executor.py",
        "                self.runner.cache.scrub_slots(0, request.pages, request.context_len, len(trees[i]))\n",
        "",
        "engine/test_poison.py::test_a_poisoned_node_off_the_path_changes_nothing",
    ),
    Fault(
        "runner: a node does not see its parent",
        ENGINE + "tree.py",
        "        mask = np.eye(len(self), dtype=bool)\n",
        "        mask = np.eye(len(self), dtype=bool)\n        return mask\n",
        EXACT,
    ),
    Fault(
        "scheduler: samples share the last, partial page",
        ENGINE + "engine/scheduler.py",
        "group.leader.pages[: (request.num_prompt - 1) // PAGE_SIZE]",
        "group.leader.pages[: request.num_prompt // PAGE_SIZE]",
        "cache/test_sharing.py::test_tokens_and_bits_are_those_of_samples_on_their_own",
    ),
    # cache
    Fault(
        "engine: a preempted sample decides for its group",
        f"{ENGINE}engine/engine.py",
        "adaptive and not request.num_generated:",
        "adaptive:",
        "engine/test_preemption.py::test_a_preempted_sample_does_not_change_what_its_group_has_decided",
    ),
    Fault(
        "cache: the last accepted slot is not moved",
        "kernels/treespec_kernels/attention/kv_commit.py",
        "        for step in np.flatnonzero(path != np.arange(len(path))).tolist():\n",
        "        for step in np.flatnonzero(path != np.arange(len(path))).tolist()[:-1]:\n",
        ORACLE,
    ),
    Fault(
        "cache: a dirty page is forgotten when a clean holder releases it",
        ENGINE + "cache/kv_cache.py",
        "        self._dirty[pages] |= scrub\n",
        "        self._dirty[pages] = scrub\n",
        "cache/test_cache.py::test_random_holders",
    ),
    Fault(
        "cache: one slot of a shared prompt is not copied",
        ENGINE + "cache/kv_cache.py",
        "pool[:, :, page, :, :count] = pool[:, :, source, :, :count]",
        "pool[:, :, page, :, : count - 1] = pool[:, :, source, :, : count - 1]",
        "cache/test_sharing.py::test_tokens_and_bits_are_those_of_samples_on_their_own",
    ),
    Fault(
        "cache: features are not compacted",
        ENGINE + "cache/kv_cache.py",
        "[0] if features is None else [0, len(shapes)]",
        "[0]",
        "drafters/test_heads.py::test_probabilities_are_those_of_the_reference",
    ),
    Fault(
        "drafters: an SSM counts one position too many",
        ENGINE + "drafters/ssm/ssm_drafter.py",
        "state.valid[ssm] = request.context_len + len(kept)",
        "state.valid[ssm] = request.context_len + len(kept) + 1",
        "drafters/test_drafts.py::test_a_tree_does_not_depend_on_the_rounds_before",
    ),
    # merge
    Fault(
        "tree: of two estimates the last one counts",
        ENGINE + "tree.py",
        "paths[path] = max(paths.get(path, 0.0), float(tree.probs[node]))",
        "paths[path] = float(tree.probs[node])",
        "test_tree.py::test_merge_is_the_union_of_paths",
    ),
    Fault(
        "tree: draws are attributed to the first tree's sources",
        ENGINE + "tree.py",
        "[names.index(tree.source_names[s]) for tree in trees for s in tree.draw_sources]",
        "[s for tree in trees for s in tree.draw_sources]",
        "test_tree.py::test_merge_keeps_every_draw_in_order",
    ),
    Fault(
        "tree: equal tokens below different parents are one node",
        ENGINE + "tree.py",
        "            path = (*node_paths[tree.parents[node]], int(tree.tokens[node]))\n",
        "            path = (*node_paths[tree.parents[node]][:-1], int(tree.tokens[node]))\n",
        "test_tree.py::test_merge_is_the_union_of_paths",
    ),
    # verification
    Fault(
        "verification: the residual is not renormalised",
        ENGINE + "verification/verify.py",
        "float(self.probs[draw.token]) / self.mass / draw.prob)",
        "float(self.probs[draw.token]) / draw.prob)",
        "verification/test_verify.py::test_lossless",
    ),
    Fault(
        "verification: draws without replacement count as with it",
        ENGINE + "verification/verify.py",
        "        if self.row is None or not self.excluded:\n            return 1.0\n",
        "        return 1.0\n",
        "verification/test_verify.py::test_lossless",
    ),
    Fault(
        "verification: the traversal forgets what a failed subtree took",
        ENGINE + "verification/verify.py",
        "        self.accept = remaining / (remaining + (1.0 - self.accept))",
        "        self.accept = remaining",
        "verification/test_verify.py::test_lossless",
    ),
    Fault(
        "verification: a child is found below any node",
        ENGINE + "tree.py",
        "if parents[node] == path[-1] and tokens[node]",
        "if self.depths[node] == len(path) and tokens[node]",
        EXACT,
    ),
    Fault(
        "verification: the walk chooses by the logits of the parent",
        ENGINE + "sampling/sampler.py",
        "token = self.choose(logits[path[-1]], tokens, ancestors)",
        "token = self.choose(logits[path[max(len(path) - 2, 0)]], tokens, ancestors)",
        SAMPLED,
    ),
    # planner
    Fault(
        "planner: pauses do not grow",
        ENGINE + "planning/learning.py",
        "self._pause = min(2 * self._pause, MAX_PAUSE)",
        "self._pause = PAUSE",
        "planning/test_planner.py",
    ),
    Fault(
        "planner: rows are free when trees are cut",
        ENGINE + "planning/planner.py",
        "value - rate * (seconds[k + 1] - seconds[k])",
        "value - 0 * (seconds[k + 1] - seconds[k])",
        "planning/test_planner.py",
    ),
    Fault(
        "planner: the start of drafting is free",
        "kernels/treespec_kernels/tree/level_rule.py",
        "(self.start_cost if begins else 0.0)",
        "0.0",
        "planning/test_planner.py",
    ),
    Fault(
        "planner: a gain of a failed round counts",
        ENGINE + "planning/planner.py",
        "weights = [weight_of[request] for request in requests]",
        "weights = list(weight_of.values())",
        "planning/test_planner.py",
    ),
    Fault(
        "planner: a slower machine makes rows dear",
        ENGINE + "planning/round_costs.py",
        "SLOWDOWN_STEP**2 / FORGET",
        "SLOWDOWN_STEP**2",
        "planning/test_round_costs.py",
    ),
    Fault(
        "planner: passes larger than those that pay are never tried",
        ENGINE + "planning/planner.py",
        "self.num_cuts % EXPLORE_ROWS == 0",
        "False",
        "planning/test_planner.py",
    ),
    # sampling
    Fault(
        "sampling: noise is bounded too tightly",
        ENGINE + "sampling/noise.py",
        "_MARGIN = np.float32(1.05 * np.exp(2.82))",
        "_MARGIN = np.float32(1.05)",
        "sampling/test_noise.py::test_the_choice_is_that_of_all_sums",
    ),
    Fault(
        "sampling: noise by depth in the tree",
        ENGINE + "sampling/sampler.py",
        "        position = len(tokens) + len(ancestors)\n        if self._kernel_noise:",
        "        position = len(tokens) + bool(ancestors)\n        if self._kernel_noise:",
        SAMPLED,
    ),
    Fault(
        "sampling: penalties skip the first token of a round",
        ENGINE + "sampling/transforms.py",
        "tokens[self._num_counted :], dtype",
        "tokens[self._num_counted + 1 :], dtype",
        "sampling/test_sampling.py::test_penalties_follow_the_path_and_forget_it",
    ),
    Fault(
        "sampling: a bad word across root and path is allowed",
        ENGINE + "sampling/transforms.py",
        "        tail = (*tokens[len(tokens) - min(self._lengths[-1], len(tokens)) :], *ancestors)\n",
        "        tail = tuple(ancestors or tokens)\n",
        "sampling/test_sampling.py::test_bad_words",
    ),
    Fault(
        "sampling: one token fewer than min_tokens",
        ENGINE + "sampling/transforms.py",
        "if position < least_position else",
        "if position < least_position - 1 else",
        "sampling/test_sampling.py::test_min_tokens",
    ),
    Fault(
        "sampling: a node sees the root's grammar",
        ENGINE + "sampling/transforms.py",
        "self._grammar.excluded(tokens, ancestors)",
        "self._grammar.excluded(tokens, ())",
        "sampling/test_structured_outputs.py::test_each_keeps_its_form_in_company",
    ),
    # prefix cache
    Fault(
        "prefixes: a key covers its own page only",
        ENGINE + "cache/prefix_cache.py",
        "hashlib.sha256(key + page.tobytes())",
        "hashlib.sha256(salt + page.tobytes())",
        "cache/test_prefix_cache.py::test_a_key_covers_all_tokens_before_it",
    ),
    Fault(
        "prefixes: pages that are written anew stay entered",
        ENGINE + "cache/kv_cache.py",
        "            self.prefixes.forget(allocated)\n",
        "            pass\n",
        "cache/test_cache.py::test_a_page_that_is_allocated_again_holds_no_cached_prefix",
    ),
    Fault(
        "prefixes: adapters share pages",
        ENGINE + "engine/scheduler.py",
        ' + (b"" if request.lora is None else request.lora.digest)',
        "",
        "models/test_lora.py::test_adapters_share_no_prefix_and_samples_share_theirs",
    ),
    Fault(
        "adapters: rows between two requests of an adapter are updated too",
        "kernels/treespec_kernels/attention/tree_batch.py",
        " and first == last.first + last.num_rows:",
        ":",
        "models/test_lora.py::test_adapters_of_a_batch_change_no_bits_of_one_another[bfloat16-True]",
    ),
    Fault(
        "prefixes: a page without a draft's K/V is skipped",
        ENGINE + "cache/prefix_cache.py",
        "np.logical_and.accumulate(self._has_draft[:, cached_pages], axis=1).sum(axis=1)",
        "self._has_draft[:, cached_pages].sum(axis=1)",
        "cache/test_prefix_cache.py::test_the_least_recently_used_page_goes_first",
    ),
    Fault(
        "prefixes: a draft keeps a page that another prefix got",
        ENGINE + "cache/prefix_cache.py",
        "        self._has_draft[:, pages] = False\n",
        "",
        "cache/test_prefix_cache.py::test_the_least_recently_used_page_goes_first",
    ),
    Fault(
        "prefixes: outputs that failed are shared",
        ENGINE + "engine/scheduler.py",
        'reason not in ("stop", "length")',
        'reason == "abort"',
        "cache/test_prefix_cache.py::test_a_prompt_and_outputs_that_fail_are_not_shared",
    ),
    Fault(
        "prefixes: a group keeps a page that another request shares",
        ENGINE + "engine/scheduler.py",
        "is_kept and (self.cache.num_holders(last) == 1).all()",
        "is_kept",
        "cache/test_prefix_cache.py::test_a_page_that_another_request_shares_is_not_kept_for_a_group",
    ),
    # server
    Fault(
        "server: a reader that leaves does not end its request",
        ENGINE + "async_llm.py",
        "                self._engine._submit(partial(self._engine.llm.rounds.end, self._samples))\n",
        "                pass\n",
        "frontend/test_async_llm.py::test_a_request_that_is_left_gives_its_pages_back",
    ),
    Fault(
        "server: choices of several prompts share their indices",
        ENGINE + "serve/answers.py",
        "index = prompt_index * (self._body.n or 1) + completion.index",
        "index = prompt_index + completion.index",
        "serve/test_serve.py::test_several_prompts_are_streamed_together",
    ),
    Fault(
        "server: a tag in an open string never ends the call",
        ENGINE + "serve/output_reader.py",
        "if end is None or _loads(consumed + self._text[: scanned + end]) is None:",
        "if end is None:",
        "serve/test_output_reader.py::test_the_parser",
    ),
    Fault(
        "server: a streamed call repeats its arguments",
        ENGINE + "serve/output_reader.py",
        "self._add_call(None, arguments)",
        "self._add_call(None, 2 * arguments)",
        "serve/test_serve_tools.py::test_a_call_is_streamed_as_it_is_written",
    ),
    Fault(
        "server: usage counts the last prompt only",
        ENGINE + "serve/answers.py",
        "        self._usage[prompt_index] = len(",
        "        self._usage[0] = len(",
        "serve/test_serve.py::test_several_prompts_are_streamed_together",
    ),
    # loader
    Fault(
        "loader: unexpected tensors pass",
        WEIGHTS + "load.py",
        "            if name not in expected:\n                reason = ",
        "            if name not in expected:\n                continue\n                reason = ",
        "weights/test_load_weights.py::test_all_mismatches_are_listed_at_once",
    ),
    Fault(
        "loader: heads of a fused matrix are split as stacked",
        WEIGHTS + "load.py",
        '        if self.rule.layout in ("per_head", ',
        '        if self.rule.layout in ("heads", ',
        "models/test_families.py::test_logits_and_states_are_those_of_transformers[gpt_neox-eager]",
    ),
    Fault(
        "loader: int4 pairs in the other order",
        WEIGHTS + "quantize.py",
        "return torch.stack((values & 15, values >> 4), 2)",
        "return torch.stack((values >> 4, values & 15), 2)",
        "weights/test_quantize.py::test_packing",
    ),
    Fault(
        "loader: GGUF's rows of q and k stay permuted",
        WEIGHTS + "gguf/tensors.py",
        "permuted = data.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)",
        "permuted = data",
        "weights/test_gguf.py::test_a_file_is_the_model_of_its_folder",
    ),
    # kernels
    Fault(
        "kernels: attention sees the slot behind its own",
        CPU + "attention_cpu.h",
        "    std::fill(s + length, s + end, -INFINITY);\n",
        "    std::fill(s + std::min(length + 1, end), s + end, -INFINITY);\n",
        "models/test_compile.py::test_close_to_the_eager_pass",
    ),
    Fault(
        "kernels: a window of one position more",
        CPU + "attention_cpu.h",
        "std::max<int64_t>(length_of(r) - window, 0)",
        "std::max<int64_t>(length_of(r) - window - 1, 0)",
        "models/test_compile.py::test_close_to_the_eager_pass",
    ),
    Fault(
        "kernels: the second half of a head is rotated the other way",
        CPU + "pointwise_cpu.h",
        "high * cos[i + half] + low * sin[i + half]",
        "high * cos[i + half] - low * sin[i + half]",
        "models/test_compile.py::test_close_to_the_eager_pass",
    ),
    Fault(
        "kernels: drafted nodes stand one position further on",
        CPU + "drafts_cpu.h",
        "positions[last] = context + g.depth;",
        "positions[last] = context + g.depth + 1;",
        "drafters/test_compile_drafting.py::test_trees_are_those_of_the_general_path",
    ),
    Fault(
        "kernels: ties go to the higher token",
        CPU + "growth_cpu.cpp",
        "while (i && values[i - 1] < value) i--;",
        "while (i && values[i - 1] <= value) i--;",
        "drafters/test_forest.py",
    ),
    Fault(
        "kernels: a token outside of the nucleus is chosen",
        CPU + "choice_cpu.h",
        "return before < wanted || !before;",
        "return true;",
        "sampling/test_choice_cpu.py",
    ),
    Fault(
        "kernels: the rank of a token ignores ties",
        CPU + "choice_cpu.h",
        "visit(s, (s > token.score) | ((s == token.score) & lower));",
        "visit(s, s > token.score);",
        "sampling/test_choice_cpu.py",
    ),
    Fault(
        "kernels: scales of Q4_K's last groups lack their high bits",
        CPU + "blocks_cpu.h",
        "(from[8 + i] & 15) | from[i] >> 6 << 4;",
        "from[8 + i] & 15;",
        "kernels/test_quantized_linear.py::test_blocks_of_gguf_files[Q4_K-dtype1]",
    ),
)


def copy_of_the_tree(folder: Path) -> Path:
    """Copy the files that git knows or would add; compiled libraries and measured costs are shared."""
    names = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    copy = folder / "treespec"
    copy.mkdir()
    subprocess.run(["tar", "--null", "-cf", folder / "files.tar", "-T", "-"], cwd=ROOT, input=names, check=True)
    subprocess.run(["tar", "-xf", folder / "files.tar"], cwd=copy, check=True)
    (ROOT / ".pytest_cache").mkdir(exist_ok=True)
    (copy / ".pytest_cache").symlink_to(ROOT / ".pytest_cache")
    return copy


def run_tests(copy: Path, tests: list[str]) -> tuple[int, str]:
    """Run quick tests in the copy up to the first that fails; return pytest's exit code and what it printed.

    In a fork of this process, which has imported torch and transformers but nothing of the repository.
    """
    with tempfile.TemporaryFile("w+") as printed:
        if (child := os.fork()) == 0:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            os.chdir(copy)
            os.environ["OMP_NUM_THREADS"] = "1"  # as in the workers of the test command
            torch.set_num_threads(1)
            paths = [str(copy / name) for name in ("", "kernels", "weights")]
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
            repository = {str(ROOT / name) for name in ("", "kernels", "weights", "tools", ".editable")}
            sys.path[:] = [*paths, *(path for path in sys.path if path not in repository)]
            options = ["-qx", "--tb=line", "-p", "no:cacheprovider", "-m", "not slow"]
            code = pytest.main([*options, *(f"tests/{test}" for test in tests)])
            sys.stdout.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed.seek(0)
        return code, printed.read()


def main(words: list[str]) -> int:
    faults = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    missed = 0
    for fault in faults:
        places = (ROOT / fault.file).read_text().count(fault.old)
        assert places == 1, f"{fault.name}: {places} places in {fault.file}"
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_the_tree(Path(folder))
        code, printed = run_tests(copy, list(dict.fromkeys(fault.test for fault in faults)))
        if code:
            print(f"without a fault:\n{printed}")
            return 2
        sys.dont_write_bytecode = True
        for fault in faults:
            file = copy / fault.file
            text = file.read_text()
            file.write_text(text.replace(fault.old, fault.new))
            code, printed = run_tests(copy, [fault.test])
            file.write_text(text)
            missed += code != 1
            outcome = next((line for line in printed.splitlines() if line.startswith("FAILED")), "NOT FOUND")
            print(f"{fault.name}: {outcome.removeprefix('FAILED tests/')[:150]}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
