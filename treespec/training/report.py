"""Measurement of trained drafts: the target's acceptance and speed with 0, 1, 2, ... of them."""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treespec.config.configs import SpecConfig
from treespec.llm import LLM
from treespec.sampling_params import SamplingParams
from treespec.utils.tables import table

logger = logging.getLogger(__name__)

NODES = 16
LEAST_TOKENS = 16  # minimum tokens of an output
REPEATS = 3


@dataclass(frozen=True)
class Measured:
    """Measurements of the target with some drafts."""

    drafts: int  # number of drafts
    acceptance_length: float  # tokens per target pass, with trees of 16 nodes from the drafts only
    with_lookup: float  # tokens per target pass, with prompt lookup in addition
    tokens_per_second: float  # median over the repeats, with `nodes="auto"` and all sources
    speedup: float  # median speedup over plain decoding in the same repeat
    from_drafts: float  # share of accepted tokens proposed by the drafts, with `nodes="auto"`


@dataclass(frozen=True)
class TrainingReport:
    """Results of a training run on this machine."""

    plain_tokens_per_second: float  # speed of plain decoding
    measured: tuple[Measured, ...]  # measurements with 0, 1, ... drafts
    recommended: int  # number of drafts with the highest speed
    # draft (or generalist) -> share of held-out positions where its top token is the target's
    agreement: dict[str, float]
    differing: int  # number of outputs that differ from plain decoding; expected to be 0

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-serialisable values."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [("drafts", "tokens/pass", "with lookup", "tokens/s", "over plain", "accepted from drafts")]
        for row in self.measured:
            lengths = f"{row.acceptance_length:.2f}", f"{row.with_lookup:.2f}"
            speeds = f"{row.tokens_per_second:.1f}", f"{row.speedup:.2f}x", f"{row.from_drafts:.0%}"
            rows.append((str(row.drafts), *lengths, *speeds))
        advice = f"use the first {self.recommended}" if self.recommended else "use none of them: lookup alone is faster"
        if self.recommended == len(self.measured) - 1:
            advice = "use all of them"
        agreement = ", ".join(f"{name} {share:.3f}" for name, share in self.agreement.items())
        return (
            f"{table(rows)}\nagreement on held-out lessons: {agreement}\n"
            f"plain decoding: {self.plain_tokens_per_second:.1f} tokens/s; recommended: {advice}"
        )


def measure_drafts(
    model: Any,
    drafts: Sequence[Path],
    prompts: Sequence[list[int]],
    agreement: dict[str, float],
    max_tokens: int,
    options: dict[str, Any],
    seconds: float,
    on_output: Callable[[], None],
    repeats: int = REPEATS,
) -> TrainingReport:
    """Decode held-out prompts without drafting, then with the first 0, 1, ... drafts.

    Outputs have up to `max_tokens` tokens, fewer if plain decoding would take longer than `seconds`. `on_output` is
    called after every output, and may raise.
    """
    params = SamplingParams(max_tokens=max_tokens, detokenize=False)
    rows, rates, num_differing = [], list[float](), 0
    reference: list[list[int]] | None = None
    for count in range(len(drafts) + 1):
        logger.info("measuring with %d of %d drafts", count, len(drafts))
        llm = LLM(model, drafts=list(drafts[:count]), max_num_seqs=1, **options)

        def decode(spec: SpecConfig | str, llm: LLM = llm) -> tuple[list[Any], float, list[list[int]]]:
            outputs, began = [], time.perf_counter()
            for prompt in prompts:
                outputs += llm.generate({"prompt_token_ids": prompt}, params, spec)
                on_output()
            return outputs, time.perf_counter() - began, [output.outputs[0].token_ids for output in outputs]

        if not count:
            params.max_tokens = LEAST_TOKENS
            _, plain_seconds, tokens = decode("off")
            decodes = (3 + 2 * repeats) * (1 + len(drafts))
            num_tokens = int(seconds / decodes / plain_seconds * sum(map(len, tokens)) / len(prompts))
            params.max_tokens = min(max(num_tokens, LEAST_TOKENS), max_tokens)
        tau = []
        for sources in (llm.draft_names or ("lookup",), (*llm.draft_names, "lookup")):
            outputs, _, tokens = decode(SpecConfig(nodes=NODES, sources=sources))
            reference = reference or tokens
            num_differing += sum(a != b for a, b in zip(tokens, reference, strict=True))
            tau.append(sum(map(len, tokens)) / sum(output.metrics.target_passes for output in outputs))
        decode(SpecConfig())  # lets the planner learn
        speeds, ratios, accepted, lookup_alone = [], [], 0, 0
        for _ in range(repeats):
            _, plain, tokens = decode("off")
            outputs, seconds, drafted = decode(SpecConfig())
            total = sum(map(len, tokens))
            num_differing += sum(a != b for a, b in zip(drafted, tokens, strict=True))
            rates.append(total / plain)
            speeds.append(total / seconds)
            ratios.append(plain / seconds)
            for output in outputs:
                accepted += output.metrics.generated_tokens - output.metrics.target_passes
                lookup_alone += output.metrics.accepted_only_by_source.get("lookup", 0)
        rows.append(
            Measured(
                count,
                tau[0] if count else 1.0,
                tau[1],
                statistics.median(speeds),
                statistics.median(ratios),
                1 - lookup_alone / max(accepted, 1) if count else 0.0,
            )
        )
        del llm, decode  # frees its memory before the next one is built
    fastest = max(rows, key=lambda row: row.speedup)
    return TrainingReport(statistics.median(rates), tuple(rows), fastest.drafts, agreement, num_differing)
