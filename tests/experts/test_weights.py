"""Models that several experts share: loaded once, freed with the last user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gguf_fusion.errors import LoadError
from gguf_fusion.experts import native, native_rpc, weights


class Model:
    """Stands in for a native model."""

    made: list[Model] = []  # noqa: RUF012

    def __init__(self, path: Path, **settings: Any) -> None:
        if path.stem == "broken":
            raise LoadError("no memory")
        self.closed = 0
        Model.made.append(self)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file; loading it makes a fake."""
    Model.made = []
    monkeypatch.setattr(native, "Model", Model)
    path = tmp_path / "a.gguf"
    path.write_bytes(b"x")
    return path


def test_the_same_file_is_loaded_once(file: Path) -> None:
    """Two users, one model; it is freed with the last of them."""
    before = weights.in_use()
    one, two = weights.borrow(file), weights.borrow(file)
    assert one is two
    assert weights.in_use() == before + 1
    weights.give_back(one)
    assert Model.made[0].closed == 0
    weights.give_back(two)
    assert (Model.made[0].closed, weights.in_use()) == (1, before)


def test_another_placement_or_content_is_another_model(file: Path) -> None:
    """Layers elsewhere, or a file that has changed meanwhile, are loaded anew."""
    models = [weights.borrow(file), weights.borrow(file, n_gpu_layers=3)]
    file.write_bytes(b"changed")
    models.append(weights.borrow(file))
    assert len({id(model) for model in models}) == 3
    for model in models:
        weights.give_back(model)
    assert all(model.closed == 1 for model in Model.made)


def test_a_failed_load_leaves_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a refusal of native code nor a worker that is missing leaves an entry."""
    before = weights.in_use()
    broken = file.with_name("broken.gguf")
    broken.write_bytes(b"x")
    with pytest.raises(LoadError, match="no memory"):
        weights.borrow(broken)

    def missing(endpoints: object) -> None:
        raise LoadError("no worker answers")

    monkeypatch.setattr(native_rpc, "device_list", missing)
    with pytest.raises(LoadError, match="no worker answers"):
        weights.borrow(file, rpc=("127.0.0.1:9",))
    assert weights.in_use() == before
