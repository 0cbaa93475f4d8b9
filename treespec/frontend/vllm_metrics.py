"""Conversion of an engine's totals to vLLM's metrics."""

from dataclasses import dataclass

from treespec.engine.engine import Engine


@dataclass
class Metric:
    """A named value. `labels` distinguish metrics with the same name."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only increases."""

    value: int


@dataclass
class Gauge(Metric):
    """A number that may increase and decrease."""

    value: float


@dataclass
class Vector(Metric):
    """A list of counters."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """Observations by upper bound of their bucket. treespec has no metrics of this type."""

    count: int
    sum: float
    buckets: dict[str, int]


def as_metrics(engine: Engine) -> list[Metric]:
    """Return totals over finished requests. Each round of a request is a draft; its tokens are the drafted nodes."""
    stats, scheduler = engine.stats, engine.scheduler
    counts = {
        "vllm:num_preemptions": stats.num_preemptions,
        "vllm:generation_tokens": stats.generated_tokens,
        "vllm:spec_decode_num_drafts": stats.target_passes,
        "vllm:spec_decode_num_draft_tokens": stats.nodes_verified - stats.target_passes,
        "vllm:spec_decode_num_accepted_tokens": stats.generated_tokens - stats.target_passes,
        "treespec:requests": stats.requests,
        "treespec:failed_requests": stats.failed_requests,
        "treespec:prefill_tokens": stats.prefill_tokens,
    }
    return [
        Gauge("vllm:num_requests_running", {}, len(scheduler.running)),
        Gauge("vllm:num_requests_waiting", {}, len(scheduler.waiting)),
        *(Counter(name, {}, value) for name, value in counts.items()),
        *(
            Counter("treespec:accepted_tokens", {"source": source}, count)
            for source, count in sorted(stats.accepted_by_source.items())
        ),
    ]
