"""All stages, ordered by priority."""

from collections.abc import Sequence
from functools import partial

from gpu import (
    baselines,
    bits,
    captured,
    families,
    grown,
    kernels,
    ops,
    passes,
    prefill,
    quantized,
    rounds,
    smoke,
    tune,
)
from gpu.stage import Stage

STAGES = (
    Stage("smoke", "s", "the first minute", smoke.measurements, smoke.describe, 110.0),
    Stage("passes", "p", "8B target pass at 2k, default kernels", partial(passes.measurements, False), passes.describe),
    Stage(
        "autotune", "p", "tuning of the 8B shape", partial(tune.measurements, ("8B",)), tune.describe, also=tune.modules
    ),
    Stage(
        "passes_tuned", "p", "8B target pass at 2k, tuned kernels", partial(passes.measurements, True), passes.describe
    ),
    Stage(
        "autotune_grown",
        "g",
        "tuning of the grown 8B shape",
        partial(tune.measurements, ("grown 8B",)),
        tune.describe,
        also=tune.modules,
    ),
    Stage("rounds", "g", "rounds of the grown 8B model, host gaps", rounds.measurements, rounds.describe),
    Stage("grown8b", "g", "end to end, grown 8B", partial(grown.measurements, "8B"), grown.describe),
    Stage("bits", "a", "bits of trees against plain decoding", bits.measurements, bits.describe),
    Stage("ops", "a", "cases of every kernel on the device", ops.measurements, ops.describe, also=ops.modules),
    Stage("families", "a", "bits and passes of every family", families.measurements, families.describe),
    Stage("baselines", "m", "8B decoding at 2k against a compiled Llama", baselines.measurements, baselines.describe),
    Stage("prefill", "m", "8B prompts up to the first token", prefill.measurements, prefill.describe),
    Stage("passes_more", "m", "8B target pass: batches, contexts", passes.more_measurements, passes.describe),
    Stage("kernels", "m", "ops of an 8B layer against bandwidth and torch", kernels.measurements, kernels.describe),
    Stage("captured", "m", "verify stage of captured rounds, 8B", captured.measurements, captured.describe),
    Stage("grown1b", "m", "end to end, grown 1B", partial(grown.measurements, "1B"), grown.describe),
    Stage(
        "autotune_more", "m", "tuning of other shapes", tune.more_measurements, tune.describe, also=tune.more_modules
    ),
    Stage(
        "quantized", "m", "8B passes of quantised layers", quantized.measurements, quantized.describe, also=tune.modules
    ),
)


def choose(names: Sequence[str]) -> list[Stage]:
    """Select stages by name or letter, in the given order; all by priority if empty.

    Raises:
        ValueError: a name is unknown.
    """
    for name in names:
        if not any(name in (stage.name, stage.letter) for stage in STAGES):
            valid = ", ".join(f"{stage.name} ({stage.letter})" for stage in STAGES)
            raise ValueError(f"--stage {name}: valid: {valid}")
    named = [stage for name in names for stage in STAGES if name in (stage.name, stage.letter)]
    return list(dict.fromkeys(named)) if names else list(STAGES)
