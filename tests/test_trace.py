"""Traces: what is written is what is read, line by line."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from gguf_fusion.cli import main
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.errors import GgufFusionError, UsageError
from gguf_fusion.experts.table import TableExpert
from gguf_fusion.records import Piece
from gguf_fusion.testing import byte_vocabulary, nested_vocabulary
from gguf_fusion.trace import TraceHeader, TraceWriter, read_trace, versions


def piece(data: bytes, logprob: float = -1.5, reason: str | None = None) -> Piece:
    return Piece(
        data=data,
        text=data.decode("utf-8", "replace"),
        logprob=logprob,
        expert_logprobs=np.array([-np.inf, -0.1 / 3]),
        weights=np.array([0.25, 0.75]),
        responsibility=np.array([0.0, 1.0]),
        n_decodes=2,
        ghost_share=0.0125,
        finish_reason=reason,
    )


HEADER = TraceHeader(experts=("a", "b"), strategy="linear(static)", seed=7, piece_expert="b")


class Full(io.StringIO):
    """A file on a disk with room for some lines."""

    name = "t.jsonl"

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, text: str) -> int:
        self.room -= 1
        if self.room < 0:
            raise OSError(errno.ENOSPC, "no room")
        return super().write(text)

    def close(self) -> None:
        if self.room < 0:  # what a buffer holds is tried again
            raise OSError(errno.ENOSPC, "no room")
        super().close()


@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_trace_that_cannot_be_kept_is_an_error_with_its_name(room: int) -> None:
    """A full disk ends the run with the name of the file, whether at the header or at a piece."""
    with (
        pytest.raises(GgufFusionError, match=r"^trace t\.jsonl: it cannot be kept there: no room$") as failed,
        TraceWriter(Full(room), HEADER) as writer,
    ):
        writer.write([piece(b"a"), piece(b"b")])
    assert failed.value.exit_status == 1


def test_a_trace_reads_back_as_it_was_written(tmp_path: Path) -> None:
    """Every number survives exactly, impossible pieces, other scripts and broken characters included."""
    pieces = [piece(b" the"), piece("歪\n\u2028".encode()), piece(b"\xff", -np.inf), piece(b"", reason="stop")]
    with TraceWriter.open(tmp_path / "t.jsonl", HEADER) as trace:
        trace.write(pieces)
    header, found = read_trace(tmp_path / "t.jsonl")
    assert header == HEADER
    assert len(found) == len(pieces)
    for ours, theirs in zip(pieces, found, strict=True):
        assert ours.data == theirs.data
        assert ours.text == theirs.text
        assert ours.logprob == theirs.logprob
        assert ours.expert_logprobs.tolist() == theirs.expert_logprobs.tolist()
        assert ours.weights.tolist() == theirs.weights.tolist()
        assert ours.finish_reason == theirs.finish_reason


def test_every_line_is_strict_json_with_all_votes(tmp_path: Path) -> None:
    """Any JSON reader takes a trace; each piece names every expert."""
    with TraceWriter.open(tmp_path / "t.jsonl", HEADER) as trace:
        trace.write([piece(b"x")])
    lines = (tmp_path / "t.jsonl").read_bytes().decode().split("\n")[:-1]
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert (first["type"], first["experts"], first["seed"]) == ("header", ["a", "b"], 7)
    assert second["experts"]["a"] == {"logprob": None, "weight": 0.25, "responsibility": 0.0}
    assert second["bytes"] == "78"


def test_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    """A run that is killed leaves all pieces so far; half a line is ignored."""
    path = tmp_path / "t.jsonl"
    with TraceWriter.open(path, HEADER) as trace:
        trace.write([piece(b"x"), piece(b"y")])
        assert len(read_trace(path)[1]) == 2
    path.write_bytes(path.read_bytes()[:-5])
    assert [p.data for p in read_trace(path)[1]] == [b"x"]


@pytest.mark.parametrize(
    "content", ["", "hello\n", '{"type": "piece"}\n', '{"type": "header", "format": 99}\n', "[1]\n"]
)
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    """A file that is no trace, or one of another format, is named."""
    (tmp_path / "t.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=r"t\.jsonl"):
        read_trace(tmp_path / "t.jsonl")


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """A trace into a missing folder is an error of the request."""
    with pytest.raises(UsageError, match="can be written"):
        TraceWriter.open(tmp_path / "missing" / "t.jsonl", HEADER)


def test_versions_name_what_shapes_a_text() -> None:
    """The header says which releases wrote it."""
    assert {"python", "llama-cpp-python", "numpy", "gguf-fusion"} <= set(versions())


def test_the_trace_of_a_reply_tells_its_bytes_and_sums(tmp_path: Path) -> None:
    """Pieces of a real reply, read back: the same bytes, the same log-probability, every expert's vote."""
    experts = []
    for name, vocabulary in (("small", byte_vocabulary()), ("words", nested_vocabulary())):
        law = np.where(vocabulary.kinds == 3, 0.02, 1.0)  # ends rarely
        law[[i for i in vocabulary.text_ids if not set(vocabulary.piece(int(i))) <= set(b"abc")]] = 0.0
        experts.append(TableExpert(vocabulary, lambda _, law=law: law, name=name))
    with Ensemble.from_experts(experts, weights=[1, 2], strategy="linear") as ensemble:
        view = ensemble.piece_view()
        reply = ensemble.generate("ab", seed=3, max_bytes=60)
        header = TraceHeader(
            experts=ensemble.names, strategy=ensemble.strategy, seed=reply.seed, piece_expert=ensemble.piece_expert
        )
        steps = []
        with TraceWriter.open(tmp_path / "t.jsonl", header) as writer:
            for step in reply:
                steps.append(step)
                writer.write(view.push(step))
    header, pieces = read_trace(tmp_path / "t.jsonl")
    assert (header.experts, header.piece_expert, header.seed) == (("small", "words"), "words", 3)
    assert b"".join(p.data for p in pieces) == b"".join(s.data for s in steps)
    assert sum(p.logprob for p in pieces) == pytest.approx(sum(s.logprob for s in steps))
    assert pieces[-1].finish_reason == steps[-1].finish_reason
    assert all(p.responsibility.sum() == pytest.approx(1.0) for p in pieces)
    assert max(len(p.data) for p in pieces) > 1


@pytest.mark.model
def test_run_writes_a_trace(tmp_path: Path) -> None:
    """``run --trace`` shows what each of the three real experts thought of the printed text."""
    path = tmp_path / "t.jsonl"
    arguments = ["run", "The capital of France is", "--raw", "--max-bytes", "12", "--seed", "1", "--offline"]
    result = CliRunner().invoke(main, [*arguments, "--trace", str(path)], input="")
    assert result.exit_code == 0, result.stderr
    header, pieces = read_trace(path)
    assert len(header.experts) == 3
    assert "".join(p.text for p in pieces) + "\n" == result.stdout
    assert all(len(p.expert_logprobs) == 3 for p in pieces)
