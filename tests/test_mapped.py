"""Pages given back: those of look-up matrices, in mapped files only, and nothing that is read is changed by it."""

import mmap
import re
from pathlib import Path

import pytest

from gguf_fusion import gguf_info, hub, mapped
from gguf_fusion.config import Registry
from gguf_fusion.load import load_expert
from gguf_fusion.members import members_from
from gguf_fusion.options import Options

SMAPS = Path("/proc/self/smaps")
LINUX = SMAPS.exists()


def resident_kb(path):
    """Kilobytes of a mapped file that are in this process's memory; 0 where the system does not tell."""
    total, inside = 0, False
    for line in (SMAPS.read_text() if LINUX else "").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def big_gguf(write_gguf, name, **fields):
    """A file whose first tensor is given, in the header, the megabyte that follows the small tensors."""
    path = write_gguf(name, payload=bytes(range(256)) * 4096, **fields)
    info = gguf_info.read(path)
    tensors = [*info.tensors]
    at = next(i for i, tensor in enumerate(tensors) if tensor.name == "token_embd.weight")
    tensors[at] = type(tensors[at])("token_embd.weight", (1 << 18,), "F32", 1 << 20, None, path, tensors[at].offset)
    return path, tensors


def with_tensors(path, tensors):
    info = gguf_info.read(path)
    return type(info)(**{key: getattr(info, key) for key in info.__slots__} | {"tensors": tuple(tensors)})


@pytest.mark.parametrize("tied", [True, False])
def test_only_embeddings_beside_an_output_matrix_are_given_back(write_gguf, tied):
    """A tied embedding is read whole at every step and stays; another one leaves memory and reads the same later."""
    path, tensors = big_gguf(write_gguf, "tiny.gguf")
    if not tied:
        tensors.append(type(tensors[0])("output.weight", (32,), "F32", 128, None, path, tensors[1].offset))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        content = bytes(data)
        before = resident_kb(path)
        given = mapped.give_back_lookups(with_tensors(path, tensors))
        assert bool(given) == (LINUX and not tied)
        assert given % mmap.PAGESIZE == 0 and given <= 1 << 20
        assert resident_kb(path) <= before - given // 1024
        assert bytes(data) == content


def test_files_that_are_not_mapped_cost_nothing(write_gguf):
    """Nothing is given back of a file that this process does not map."""
    path, tensors = big_gguf(write_gguf, "other.gguf")
    tensors.append(type(tensors[0])("output.weight", (32,), "F32", 128, None, path, tensors[1].offset))
    assert mapped.give_back_lookups(with_tensors(path, tensors)) == 0


def test_without_the_list_of_mappings_nothing_happens(write_gguf, monkeypatch, tmp_path):
    """Systems that do not tell where files are mapped keep all pages."""
    monkeypatch.setattr(mapped, "_MAPS", tmp_path / "missing")
    path, tensors = big_gguf(write_gguf, "tiny.gguf")
    assert mapped.give_back_lookups(with_tensors(path, tensors)) == 0
    assert mapped.give_back_code("lib") == 0


def test_offsets_are_those_of_the_data(write_gguf):
    """A tensor's offset is where its bytes begin in the file."""
    path = write_gguf()
    for tensor in gguf_info.read(path).tensors:
        assert path.read_bytes()[tensor.offset :][: tensor.size_bytes] == b"\x01" * 128


@pytest.mark.model
def test_rows_are_the_same_without_the_pages():
    """An expert whose embedding was given back reads any token as one that keeps it, from 80 MB less."""
    name = "qwen2.5-coder-0.5b-instruct"
    registry = Registry.load()
    path = hub.locate(name, registry)
    spec = members_from([name], registry)[0].spec
    text = b"def add(a, b):\n    return a + b  # \xe4\xb8\xad\xe6\x96\x87 Stra\xc3\x9fe"
    with load_expert(spec, path, Options(n_ctx=256, n_threads=1)) as expert:
        assert resident_kb(path) * 1024 < path.stat().st_size - 80_000_000
        rows = expert.evaluate(expert.tokenize(text), 4).copy()
        assert mapped.give_back_lookups(gguf_info.read(path)) > 80_000_000 or not LINUX
        expert.forget()
        assert (expert.evaluate(expert.tokenize(text), 4) == rows).all()
