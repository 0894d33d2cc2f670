"""Counters for Prometheus, in llama-server's names where it has them."""

from __future__ import annotations

from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest

from gguf_fusion.server.answers import expert_seconds
from gguf_fusion.server.owner import Owner
from gguf_fusion.server.writer import Spent


class Metrics:
    """Counts what was written."""

    def __init__(self, owner: Owner) -> None:
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self._registry)

        self._prompt = counter("llamacpp:prompt_tokens", "Prompt tokens of the piece expert.")
        self._prompt_s = counter("llamacpp:prompt_seconds", "Seconds spent on prompts.")
        self._predicted = counter("llamacpp:tokens_predicted", "Pieces written.")
        self._predicted_s = counter("llamacpp:tokens_predicted_seconds", "Seconds spent writing.")
        self._bytes = counter("gguf_fusion:bytes_predicted", "Bytes written.")
        self._decodes = counter("gguf_fusion:decodes", "Tokens decoded by all experts while writing.")
        self._expert_s = counter("gguf_fusion:expert_seconds", "Seconds of decoding while writing.", "expert")
        for name, text, function in (
            ("llamacpp:requests_processing", "Requests being written.", lambda: owner.n_running),
            ("llamacpp:requests_deferred", "Requests waiting.", lambda: owner.n_waiting),
        ):
            Gauge(name, text, registry=self._registry).set_function(function)

    def count(self, spent: Spent) -> None:
        """Add what one request took."""
        self._prompt.inc(spent.prompt_tokens)
        self._predicted.inc(spent.completion_tokens)
        for timings in spent.timings:
            self._prompt_s.inc(timings.prefill_s)
            self._predicted_s.inc(max(0.0, timings.total_s - timings.prefill_s))
            self._bytes.inc(timings.bytes)
            self._decodes.inc(timings.decodes)
        for name, seconds in expert_seconds(spent.timings).items():
            self._expert_s.labels(name).inc(seconds)

    async def response(self) -> Response:
        """The current values."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
