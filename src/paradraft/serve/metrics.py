"""Prometheus metrics under vLLM's names."""

from __future__ import annotations

import math
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from paradraft.decode.payoff import Payoff
from paradraft.engine.answers import Chunk
from paradraft.serve.admission import Admission

FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
WHOLE_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
"""Bucket bounds of the histograms."""


class Metrics:
    """Counts and times of all answers; each choice of a request counts as one, as in vLLM.

    `slow_models` is the number of models whose C++ pass was refused or could not be built.
    """

    def __init__(self, model: str, admission: Admission, slow_models: int, payoff: Payoff) -> None:
        self._registry = CollectorRegistry()
        self._model = model

        def gauge(name: str, help_text: str) -> Gauge:
            return Gauge(f"vllm:{name}", help_text, ("model_name",), registry=self._registry).labels(model)

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", help_text, ("model_name", *labels), registry=self._registry)

        def histogram(name: str, help_text: str, bounds_s: tuple[float, ...]) -> Histogram:
            labelled = Histogram(f"vllm:{name}", help_text, ("model_name",), registry=self._registry, buckets=bounds_s)
            return labelled.labels(model)

        gauge("num_requests_running", "Answers that are decoded.").set_function(lambda: admission.running)
        gauge("num_requests_waiting", "Answers that wait.").set_function(lambda: admission.waiting)

        def own_gauge(name: str, help_text: str) -> Gauge:
            return Gauge(f"paradraft:{name}", help_text, ("model_name",), registry=self._registry).labels(model)

        connections = admission.connections
        help_text = (
            "Models whose pass in C++ was refused or could not be built, so that PyTorch decodes, several times slower."
        )
        own_gauge("slow_models", help_text).set(slow_models)
        own_gauge("malformed_requests", "Requests that were no HTTP.").set_function(lambda: connections.malformed)
        own_gauge("refused_connections", "Connections above the limit.").set_function(lambda: connections.refused)
        help_text = "Tokens a second as a multiple of those of rounds without drafts; NaN as long as that is not known."
        speedup = own_gauge("drafting_speedup", help_text)
        speedup.set_function(lambda: math.nan if payoff.speedup is None else payoff.speedup)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were read.").labels(model)
        self.tokens = counter("generation_tokens", "Tokens of answers.").labels(model)
        self._ended = counter("request_success", "Answers that have ended.", "finished_reason")
        self.drafts = counter("spec_decode_num_drafts", "Rounds with a draft.").labels(model)
        self.drafted = counter("spec_decode_num_draft_tokens", "Tokens of drafts.").labels(model)
        self.accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens of answers.").labels(model)
        self._accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafted tokens of answers by position, from 0.", "position"
        )
        self.first_s = histogram("time_to_first_token_seconds", "From the request to the first round.", FIRST_S)
        self.between_s = histogram("inter_token_latency_seconds", "Between two rounds.", BETWEEN_S)
        self.whole_s = histogram("e2e_request_latency_seconds", "From the request to the end.", WHOLE_S)

    @property
    def text(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def accept(self, tokens: int) -> None:
        """Counts the accepted tokens of a round."""
        self.accepted.inc(tokens)
        for position in range(tokens):
            self._accepted_at.labels(self._model, str(position)).inc()

    def end(self, reason: str) -> None:
        """Counts an answer that has ended: "stop", "length", "abort" or "error"."""
        self._ended.labels(self._model, reason).inc()


class AnswerMetrics:
    """Records the metrics of one answer while it is decoded; `prompt` is the prompt's length in tokens."""

    def __init__(self, metrics: Metrics, arrived_s: float, prompt: int) -> None:
        self._metrics, self._arrived_s, self._prompt = metrics, arrived_s, prompt
        self._last_s: float | None = None

    def add(self, chunk: Chunk) -> None:
        """Records a round."""
        metrics, now_s = self._metrics, time.perf_counter()
        if self._last_s is None:
            metrics.first_s.observe(now_s - self._arrived_s)
            metrics.prompt_tokens.inc(self._prompt)
        else:
            metrics.between_s.observe(now_s - self._last_s)
        self._last_s = now_s
        metrics.tokens.inc(len(chunk.tokens))
        metrics.drafts.inc(chunk.drafted > 0)
        metrics.drafted.inc(chunk.drafted)
        metrics.accept(chunk.accepted)

    def end(self, reason: str) -> None:
        """Records the end; see `Metrics.end`."""
        self._metrics.end(reason)
        if reason in ("stop", "length"):
            self._metrics.whole_s.observe(time.perf_counter() - self._arrived_s)
