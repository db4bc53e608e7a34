"""What the HTTP surface measures, in Prometheus' terms: base units, `_total` for counters."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)


class HttpMetrics:
    """One registry per app, so that several apps (and tests) can live in one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self.time_to_first_token = Histogram(
            "pdserve:time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self.inter_token_latency = Histogram(
            "pdserve:inter_token_latency_seconds",
            "Gap between outputs of one sequence that bring tokens",
            buckets=_GAP_S,
            registry=registry,
        )
        self.time_per_output_token = Histogram(
            "pdserve:request_time_per_output_token_seconds",
            "Mean over all but the first token of a request",
            buckets=_GAP_S,
            registry=registry,
        )
        self.whole = Histogram(
            "pdserve:e2e_request_latency_seconds",
            "From arrival to the last byte, of requests that were completed",
            buckets=_WHOLE_S,
            registry=registry,
        )
        self.requests = Counter(
            "pdserve:requests",
            "Requests by how they ended: stop, length, rejected, unavailable, error, cancelled",
            ("endpoint", "outcome"),
            registry=registry,
        )
        self.in_flight = Gauge("pdserve:http_requests_in_flight", "Requests that are being answered", registry=registry)
        self.prompt_tokens = Counter("pdserve:prompt_tokens", "Tokens of accepted prompts", registry=registry)
        self.generation_tokens = Counter("pdserve:generation_tokens", "Tokens generated", registry=registry)

    def start(self, endpoint: str) -> RequestMeter:
        return RequestMeter(self, endpoint)

    def text(self) -> str:
        return generate_latest(self._registry).decode()


class RequestMeter:
    """Follows one HTTP request. Whoever learns how it ended sets `outcome`; `close()` books it."""

    def __init__(self, metrics: HttpMetrics, endpoint: str) -> None:
        self.outcome = "cancelled"  # what it is when nobody gets to say anything else
        self._metrics = metrics
        self._endpoint = endpoint
        self._started_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s: dict[int, float] = {}
        self._tokens = 0
        metrics.in_flight.inc()

    def prompt(self, tokens: int) -> None:
        self._metrics.prompt_tokens.inc(tokens)

    def output(self, choice: int, tokens: int) -> None:
        """One output of one sequence has come."""
        if not tokens:
            return
        now_s = time.perf_counter()
        if self._first_s is None:
            self._first_s = now_s
            self._metrics.time_to_first_token.observe(now_s - self._started_s)
        if choice in self._last_s:
            self._metrics.inter_token_latency.observe(now_s - self._last_s[choice])
        self._last_s[choice] = now_s
        self._tokens += tokens
        self._metrics.generation_tokens.inc(tokens)

    def close(self) -> None:
        self._metrics.in_flight.dec()
        self._metrics.requests.labels(self._endpoint, self.outcome).inc()
        if self.outcome not in ("stop", "length"):
            return
        self._metrics.whole.observe(time.perf_counter() - self._started_s)
        sequences = len(self._last_s)
        if self._first_s is not None and self._tokens > sequences:
            decoding_s = max(self._last_s.values()) - self._first_s
            self._metrics.time_per_output_token.observe(decoding_s * sequences / (self._tokens - sequences))
