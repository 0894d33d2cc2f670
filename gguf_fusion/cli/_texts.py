"""Texts to learn from, read by experts and a router: what ``router train`` and ``router refine`` have in common."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf_fusion.cli._output import note
from gguf_fusion.cli.discover import _traces
from gguf_fusion.cli.evaluate import _Clock
from gguf_fusion.evaluate.score import Document
from gguf_fusion.evaluate.scorer import Scorer, Settings
from gguf_fusion.hub.digests import model_digest
from gguf_fusion.load import load_expert
from gguf_fusion.members import Member
from gguf_fusion.options import Options

if TYPE_CHECKING:
    from gguf_fusion.discover.corpus import Corpus
    from gguf_fusion.discover.hidden import States
    from gguf_fusion.experts.llama import LlamaExpert


@contextmanager
def read_texts(
    documents: list[Document], splits: Mapping[str, str], members: Sequence[Member], paths: Sequence[Path], at: int,
    adapter: Mapping[str, Any] | None,
) -> Iterator[tuple[Corpus, dict[str, States]]]:  # fmt: skip
    """(the corpus of all laws, the router's hidden states by document), computed where they are not kept already.

    ``at``: which of the members is the router, ``adapter``: its LoRA adapter as a router's card has it.
    """
    from gguf_fusion.discover import corpus
    from gguf_fusion.discover.hidden import cached_states

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gguf-fusion-")))
        scorer = stack.enter_context(Scorer.of_members(members, paths, Options(), Settings()))
        waiting = sum(len(d.text) for d in documents if not scorer.is_cached(d.text))
        with _Clock(waiting) as clock:
            traced = corpus.gather(
                _traces(scorer, documents, clock), splits, sum(len(d.text) for d in documents), folder
            )
        scorer.close()
        loaded: list[LlamaExpert] = []

        def load() -> LlamaExpert:
            if not loaded:
                loaded.append(load_expert(members[at].spec, paths[at], Options(), max_rows=32, hidden=True))
            return loaded[0]

        note("reading the router's hidden states")
        digest = model_digest(paths[at])
        reads_as = digest if adapter is None else f"{digest}+{adapter['sha256']}"
        try:
            states = {d.name: cached_states(load, reads_as, d.text) for d in documents if d.text}
        finally:
            for expert in loaded:
                expert.close()
        yield traced, states
