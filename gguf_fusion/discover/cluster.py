"""Evaluating candidates on a Ray cluster, for searches that outgrow one machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from gguf_fusion.discover.candidates import Question, Scored, Yardstick, evaluate
from gguf_fusion.discover.corpus import Corpus
from gguf_fusion.errors import MissingExtraError, UsageError


class RayCluster:
    """A connection to a cluster that holds one copy of the corpus per node. Every node needs gguf-fusion installed.

    ``address``: what ``ray.init`` takes; "local" starts Ray on this machine.
    """

    def __init__(self, address: str, corpus: Corpus, yardstick: Yardstick) -> None:
        """Raises MissingExtraError without Ray, UsageError where the cluster cannot be reached."""
        try:
            import ray
        except ImportError:
            raise MissingExtraError("ray", "ray") from None
        try:
            ray.init(address, log_to_driver=False, logging_level="error", include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(f"--ray {address}: no cluster answers there ({error})") from None
        self._ray: Any = ray
        self._shared = ray.put((corpus, yardstick))
        self._remote = ray.remote(_evaluate)

    def map(self, questions: Sequence[Question]) -> Iterator[Scored]:
        """Yield the answers in the order of the questions."""
        for answer in [self._remote.remote(self._shared, question) for question in questions]:
            yield self._ray.get(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ray.shutdown()


def _evaluate(shared: tuple[Corpus, Yardstick], question: Question) -> Scored:
    corpus, yardstick = shared
    expression, tier, parents = question
    return evaluate(corpus, yardstick, expression, tier, parents)
