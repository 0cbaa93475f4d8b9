"""All stages, ordered by priority."""

from collections.abc import Sequence
from functools import partial

from gpu import bits, families, grown, kernels, ops, passes, quantized, rounds, smoke, tune
from gpu.stage import Stage

STAGES = (
    Stage("smoke", "s", "the first minute", smoke.measurements, smoke.describe, 110.0),
    Stage("ops", "a", "correctness of every kernel: tests marked gpu", ops.measurements, ops.describe),
    Stage("bits", "a", "bits of trees against plain decoding", bits.measurements, bits.describe),
    Stage("families", "a", "bits and passes of every family", families.measurements, families.describe),
    Stage("passes", "b", "8B target pass against the roofline", passes.measurements, passes.describe),
    Stage("rounds", "b", "rounds of the grown 8B model, host gaps", rounds.measurements, rounds.describe),
    Stage("autotune", "c", "kernel autotune", tune.measurements, tune.describe),
    Stage("kernels", "d", "ops of an 8B layer against bandwidth and torch", kernels.measurements, kernels.describe),
    Stage("grown1b", "e", "end to end, grown 1B", partial(grown.measurements, "1B"), grown.describe),
    Stage("grown8b", "e", "end to end, grown 8B", partial(grown.measurements, "8B"), grown.describe),
    Stage("quantized", "f", "8B passes of quantised layers", quantized.measurements, quantized.describe),
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
