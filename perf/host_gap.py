"""Measures the host's time between captured rounds: how long a GPU would wait for its next round. Needs no GPU.

    PYTHONPATH=.:kernels:weights:perf python perf/host_gap.py --json out.json

The engine is the real one, with the embedded models, their tokenizer, the planner and the model-free sources; only the
device is simulated. Where `BatchRound` would launch a graph, a simulated device is busy for the graph's modelled
duration, that of an 8B model on an H100, and then accepts what the tree has of a known text. Each request continues a
held-out text, so lookup finds what it finds in real texts. SSMs propose the text's next token with probability
`ACCEPTED`, and a wrong one otherwise.

The gap of a round is the time that the device waits for its launches. Work that the host does while the device computes
is `hidden`; it adds to the gap only if it takes longer than the device. Launches themselves take no time here. While
the host waits, its caches grow cold, which makes the work after it slower; `--scales 0` measures without waiting. Modes
are interleaved within every repeat. Reports microseconds: median (p10 to p90) over all rounds of all repeats.
"""

import argparse
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: builds the GPU's engine on a CPU

import measuring
import numpy as np

from treespec import LLM, SamplingParams
from treespec.drafters.ssm.ssm_drafter import SsmDrafter
from treespec.executors.graph_executor import GraphExecutor
from treespec.graphs.batch_round import BatchRound
from treespec.planning.cost_measurement import processor
from treespec.planning.round_costs import CostCurve
from treespec.request import Request
from treespec.runner import Runner
from treespec.text.prompt_files import read_prompts
from treespec_kernels.tree.device_trees import SEED_BIT

VERIFY = {1: 5.8e-3, 8: 5.9e-3, 16: 6.0e-3, 32: 6.2e-3, 64: 6.8e-3}  # seconds of a target pass, by rows
LEVEL = 0.3e-3  # seconds of a draft level
ACCEPTED = 0.75  # probability that an SSM proposes the text's next token
CURVE = CostCurve(tuple(VERIFY), tuple(VERIFY.values()), LEVEL)
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}
MODES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "plain": ("off", {}),
    "trees": (None, {}),
    "trees, sampled": (None, SAMPLED),
    "trees, logprobs": (None, {"logprobs": 1}),
    "trees, stop string": (None, {"stop": "\0"}),
}


class SimulatedDevice:
    """Runs graphs one after another, in the time that a device would need, and accepts the tokens of known texts.

    Args:
        scale: multiplies the durations of graphs.

    Attributes:
        gaps: by round, the seconds that the device waited for launches; NaN after a prefill.
        hidden: by round, the seconds of host work between the last launch and the wait.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.texts: dict[int, list[int]] = {}  # by the first page of the request
        self.gaps: list[float] = []
        self.hidden: list[float] = []
        self._random = random.Random(0)
        self._simulating = 0.0  # seconds spent on simulating, which the host's clock does not count
        self._seconds = [0.0, 0.0]  # of drafting and verification in this round
        self._gap, self._launched, self._levels = 0.0, 0.0, 0
        self._free: float | None = None  # when the device has run all launches; None after a prefill

    def prefill(self, request: Request, text: Sequence[int]) -> None:
        self.texts[int(request.pages[0])] = list(text)
        self._free = None

    def launch(self, batch: BatchRound, name: tuple[Any, ...], launches: Any) -> None:
        """Take the place of `BatchRound._run_graph`."""
        began = time.perf_counter()
        now = began - self._simulating
        first = name[0] == "first level" or name[:2] == ("verify", 1)
        if self._free is None:
            self._gap, self._free = math.nan, now
        elif first:
            self._gap = 0.0
        self._gap += max(now - self._free, 0.0)
        if first:
            self._seconds, self._levels = [0.0, 0.0], 0
        duration = self.scale * (VERIFY[name[1]] if name[0] == "verify" else LEVEL)
        self._seconds[name[0] == "verify"] += duration
        self._free = max(self._free, now) + duration
        if name[0] == "verify":
            self._accept(batch, name[1])
            self.gaps.append(self._gap)
        else:
            self._levels += 1
        self._launched = now
        self._simulating += time.perf_counter() - began

    def synchronize(self, batch: BatchRound) -> None:
        """Take the place of `BatchRound._synchronize`."""
        assert self._free is not None
        self.hidden.append(time.perf_counter() - self._simulating - self._launched)
        while time.perf_counter() - self._simulating < self._free:
            pass
        self._free = time.perf_counter() - self._simulating  # the device waits from here on

    def seconds(self, batch: BatchRound) -> tuple[float, float]:
        """Take the place of `BatchRound.seconds`."""
        draft, verify = self._seconds
        return draft, verify

    def _accept(self, batch: BatchRound, nodes: int) -> None:
        """Write what a device would write to the host."""
        inputs, rows = batch._inputs.host, batch._verify._rows[nodes].numpy()
        for i in np.flatnonzero(inputs["max_nodes"]).tolist():
            rows[i] = self._row(inputs, i, self._levels, nodes, batch.limits.width)
        batch._verify._read_probs.fill_(0.5)

    def _row(self, inputs: dict[str, np.ndarray], i: int, levels: int, nodes: int, width: int) -> np.ndarray:
        """Return a request's row of results, as `VerifyStage` describes it."""
        first = int(inputs["context_lens"][i]) + 1
        text = self.texts[int(inputs["pages"][i, 0])][first : first + width]
        tokens, parents, depths, masks = [int(inputs["roots"][i])], [-1], [0], [0]
        values, places = [1.0], {(-1, -1): 0}

        def add(parent: int, token: int, prob: float, bit: int) -> int:
            node = places.setdefault((parent, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(parent)
                depths.append(depths[parent] + 1)
                masks.append(0)
                values.append(values[parent] * prob)
            masks[node] |= 1 << bit
            return node

        size = min(nodes, int(inputs["max_nodes"][i]))
        node = 0
        for depth in range(min(levels, int(inputs["max_depths"][i]), len(text) - 1)):  # the SSMs' best path, siblings
            right = self._random.random() < ACCEPTED
            if len(tokens) + 2 > size:
                break
            add(node, text[depth] + 1, 0.2, 1)
            node = add(node, text[depth] if right else text[depth] + 2, 0.7, 0)
        below = [0]
        for token, parent, prob in zip(
            inputs["proposed_tokens"][i].tolist(),
            inputs["proposed_parents"][i].tolist(),
            inputs["proposed_probs"][i].tolist(),
            strict=True,
        ):
            if len(tokens) >= size or (token < 0 and len(below) > 1) or parent + 1 >= len(below):
                break
            if token >= 0:
                below.append(add(below[parent + 1], token, prob, SEED_BIT))
        path = [0]
        while len(path) <= len(text) and (child := places.get((path[-1], text[len(path) - 1]))) is not None:
            path.append(child)
        path = path[: len(text)]
        row = np.zeros(1 + 2 * width + 5 * nodes, dtype=np.int32)
        row[0], row[1 : 1 + len(path)], row[1 + width : 1 + width + len(path)] = len(path), text[: len(path)], path
        tree = row[1 + 2 * width :].reshape(5, nodes)
        tree[:3] = -1
        for field, own in zip(tree, (tokens, parents, depths, masks), strict=False):
            field[: len(own)] = own
        tree[4, : len(values)] = np.array(values, dtype=np.float32).view(np.int32)
        return row


@contextmanager
def simulated(device: SimulatedDevice, texts: dict[int, list[int]]) -> Iterator[None]:
    """Replace device work by `device`.

    Args:
        device: what rounds run on.
        texts: text by length of the prompt.
    """

    def prefill(runner: Runner, requests: Sequence[Request], counts: Sequence[int]) -> None:
        for request, count in zip(requests, counts, strict=True):
            device.prefill(request, texts[request.num_prompt])
            request.context_len += count

    def read(drafter: SsmDrafter, ssm: int, requests: Sequence[Request]) -> None:
        for request in requests:
            drafter._state(request).valid[ssm] = request.context_len

    with ExitStack() as patches:
        for owner, name, replacement in (
            (BatchRound, "_run_graph", lambda *args: device.launch(*args)),
            (BatchRound, "_synchronize", lambda batch: device.synchronize(batch)),
            (BatchRound, "seconds", lambda batch: device.seconds(batch)),
            (Runner, "prefill", prefill),
            (SsmDrafter, "_read", read),
        ):
            patches.enter_context(mock.patch.object(owner, name, replacement))
        yield


def opened(batch: int) -> LLM:
    """Return the GPU's engine on the CPU, with the costs of the modelled device."""
    with (
        mock.patch("treespec.startup.target.differing_rows", lambda *_: []),
        mock.patch("treespec.graphs.capture._measure_costs", lambda _: CURVE),
    ):
        return LLM(
            device="cpu",
            dtype="float32",
            attention="triton",
            linear="triton",
            max_num_seqs=batch,
            max_model_len=2048,
        )


def measure(
    llm: LLM, prompts: Sequence[list[int]], texts: dict[int, list[int]], mode: str, rounds: int, scale: float = 1.0
) -> Any:
    """Return the gaps and the hidden seconds of the rounds of one call, and the tokens per round and request."""
    device = SimulatedDevice(scale)
    spec, params = MODES[mode]
    sampling = [SamplingParams(max_tokens=len(texts[len(p)]) - len(p) - 64, ignore_eos=True, **params) for p in prompts]
    assert isinstance(llm.engine.captured, GraphExecutor)
    for planner in llm.engine.captured.rounds.planners.values():
        planner.costs.learns = scale == 1.0  # other durations contradict the cost curve
    with simulated(device, texts):
        outputs = llm.generate(list(prompts), sampling, spec)
    for prompt, output in zip(prompts, outputs, strict=True):
        own = list(output.outputs[0].token_ids)
        assert own == texts[len(prompt)][len(prompt) : len(prompt) + len(own)], "the engine lost a token"
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    kept = [i for i, gap in enumerate(device.gaps) if not math.isnan(gap)][:rounds]
    gaps, hidden = [device.gaps[i] for i in kept], [device.hidden[i] for i in kept]
    return gaps, hidden, tokens / len(device.hidden) / len(prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=100, help="rounds per mode and repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0], help="of the device's durations; 0: no waits")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for batch in args.batches:
        llm = opened(batch)
        words = llm.get_tokenizer().encode(" ".join(prompt.content for prompt in read_prompts(measuring.HELDOUT)))
        starts = [700 * i for i in range(batch)]
        texts = {100 + i: words[start : start + llm.config.max_model_len] for i, start in enumerate(starts)}
        prompts = [text[:length] for length, text in texts.items()]
        runs: dict[tuple[str, float], list[Any]] = {}
        for _ in range(args.repeats):
            for key in itertools.product(args.modes, args.scales):
                runs.setdefault(key, []).append(measure(llm, prompts, texts, key[0], args.rounds, key[1]))
        for (mode, scale), own in runs.items():
            row: dict[str, Any] = {"batch": batch, "mode": mode, "scale": scale}
            for i, name in enumerate(("gap", "hidden")):
                row[f"{name}_us"] = _spread([1e6 * each for run in own for each in run[i]])
            row["tokens"] = statistics.fmean(run[2] for run in own)
            results.append(row)
            gap, hidden = ("{:.0f} ({:.0f} to {:.0f})".format(*row[name]) for name in ("gap_us", "hidden_us"))
            print(
                f"batch {batch:3} x {scale:.1f}  {mode:20} gap {gap:22} hidden {hidden:22} tokens {row['tokens']:.2f}"
            )
    setup = {"rounds": args.rounds, "repeats": args.repeats, "processor": processor()}
    measuring.write_json(args.json, {"setup": setup, "results": results})


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the 10th and the 90th percentile."""
    low, middle, high = np.percentile(np.array(values), [10, 50, 90]).tolist()
    return middle, low, high


if __name__ == "__main__":
    main()
