"""Prometheus metrics: vLLM's names with the prefix `treespec:`."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from treespec.engine.engine import Engine
from treespec.engine.metrics import WHOLE_TREE
from treespec.outputs import RequestOutput
from treespec.serve.audit import AUDIT_PREFIX

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_TIMES = {
    "time_to_first_token_seconds": "Seconds from arrival to the first token.",
    "request_time_per_output_token_seconds": "Seconds from the first token to the last, per token after the first.",
    "request_queue_time_seconds": "Seconds from arrival to the start of prefill.",
    "e2e_request_latency_seconds": "Seconds from arrival to the end.",
}


class ServerMetrics(Collector):
    """Metrics of one server, with the label model_name=`model`."""

    def __init__(self, engine: Engine, model: str):
        self.registry = registry = CollectorRegistry()
        self.num_refused = 0  # requests rejected before they reached the engine, or ended by the server
        registry.register(self)
        self._engine, self._model, labels = engine, model, ["model_name"]
        self._times = [
            Histogram(f"treespec:{name}", text, labels, buckets=_SECONDS, registry=registry).labels(model)
            for name, text in _TIMES.items()
        ]
        self._ends = PrometheusCounter(
            "treespec:request_success", "Finished choices.", [*labels, "finished_reason"], registry=registry
        )
        self._audited, self._differing = (
            PrometheusCounter(f"treespec:audit_tokens{name}", text, labels, registry=registry).labels(model)
            for name, text in (
                ("", "Tokens of finished requests that were decoded again without speculation."),
                ("_differing", "Audited tokens that differed, which must stay 0."),
            )
        )

    def count_audit(self, tokens: int, num_differing: int) -> None:
        """Count the tokens of an audit."""
        self._audited.inc(tokens)
        self._differing.inc(num_differing)

    def observe(self, output: RequestOutput) -> None:
        """Count a finished request whose output was read completely."""
        metrics = output.metrics
        between = None
        if metrics.ttft is not None and metrics.generated_tokens > len(output.outputs):
            samples = len(output.outputs)
            between = (metrics.seconds - metrics.ttft) * samples / (metrics.generated_tokens - samples)
        for histogram, seconds in zip(
            self._times, (metrics.ttft, between, metrics.queued, metrics.seconds), strict=True
        ):
            if seconds is not None:
                histogram.observe(seconds)
        for completion in output.outputs:
            self._ends.labels(self._model, str(completion.finish_reason)).inc()

    def collect(self) -> Iterator[Metric]:
        """Read the engine's counters at every scrape, while it runs: each one is a number that rounds replace."""
        stats, scheduler, cache = self._engine.stats, self._engine.scheduler, self._engine.cache
        running = sum(not request.output_id.startswith(AUDIT_PREFIX) for request in list(scheduler.running))
        used = 1 - cache.num_free / cache.num_pages
        gauges = {
            "num_requests_running": ("Requests that decode or prefill, without audits.", running),
            "num_requests_waiting": ("Requests in the queue.", len(scheduler.waiting)),
            "kv_cache_usage_perc": ("Share of the cache's pages that are in use.", used),
        }
        passes = sum(list(stats.accepted_lengths.values()))
        drafts = dict(stats.drafts)
        merged = drafts.get(WHOLE_TREE)
        counts = {
            "num_preemptions": ("Preemptions of requests for other requests' pages.", stats.num_preemptions),
            "prefill_tokens": ("Prompt tokens computed, of finished requests.", stats.prefill_tokens),
            "prompt_tokens_cached": ("Prompt tokens of cached prefixes, of finished requests.", stats.cached_tokens),
            "generation_tokens": ("Tokens generated, of finished requests.", stats.generated_tokens),
            "target_passes": ("Target passes, counted for each request in them.", passes),
            "nodes_verified": ("Rows of target passes.", passes + (merged.num_tokens if merged else 0)),
            "failed_requests": ("Requests that were refused or failed.", stats.failed_requests + self.num_refused),
        }
        for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counts)):
            for name, (text, value) in values.items():
                metric = kind(f"treespec:{name}", text, labels=["model_name"])
                metric.add_metric([self._model], value)
                yield metric
        accepted = [(source, list(draft.accepted)) for source, draft in drafts.items()]
        by_depth = [([source, str(i)], count) for source, counts in accepted for i, count in enumerate(counts)]
        for name, text, samples in (
            ("drafts", "Trees with drafts.", [([source], draft.num_drafts) for source, draft in drafts.items()]),
            ("draft_tokens", "Nodes.", [([source], draft.num_tokens) for source, draft in drafts.items()]),
            ("accepted_tokens", "Accepted nodes.", [([source], sum(counts)) for source, counts in accepted]),
            ("accepted_tokens_per_pos", "Accepted nodes by depth, from 0.", by_depth),
        ):
            text += f" By source; {WHOLE_TREE!r} is the merged tree; its nodes may have several sources."
            labels = ["model_name", "source", "position"][: 3 if samples is by_depth else 2]
            metric = CounterMetricFamily(f"treespec:spec_decode_num_{name}", text, labels=labels)
            for label_values, count in samples:
                metric.add_metric([self._model, *label_values], count)
            yield metric
