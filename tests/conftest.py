"""Fixtures that every test gets: no settings of the user, caches of its own, no network by accident."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_SETTINGS = ("GGUF_FUSION_", "HF_", "HUGGINGFACE_", "PIP_TIMEOUT", "PIP_DEFAULT_TIMEOUT")


@pytest.fixture(autouse=True)
def clean_environ(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the user's settings and point all caches into the test's own directory.

    Tests of real models (marker ``model``) keep the cache that ``gguf-fusion pull pocket`` has filled.
    """
    real = request.node.get_closest_marker("model") is not None
    for name in list(os.environ):
        if name.startswith(_SETTINGS) and not (real and name in ("GGUF_FUSION_CACHE", "HF_HOME", "HF_HUB_CACHE")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    if not real:
        monkeypatch.setenv("GGUF_FUSION_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
