"""Vocabulary-only GGUF files of many tokenizers, from the source package of llama-cpp-python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

from gguf_fusion.hub.store import cache_dir

_FOLDER = "/vendor/llama.cpp/models/"


@pytest.fixture(scope="session")
def vocab_dir() -> Path:
    """``$GGUF_FUSION_VOCAB_DIR``, or the files taken out of the source package once and kept in the cache."""
    given = os.environ.get("GGUF_FUSION_VOCAB_DIR")
    if given:
        return Path(given)
    release = version("llama-cpp-python")
    target = cache_dir() / "test-vocabularies" / release
    if not target.is_dir():
        _fetch(release, target)
    return target


def _fetch(release: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work)]
        package = "llama-cpp-python"
        done = subprocess.run(
            [*command, "--no-binary", package, f"{package}=={release}"], capture_output=True, text=True, check=False
        )
        archives = list(work.glob("*.tar.gz"))
        if done.returncode or not archives:
            pytest.skip(f"the source package of llama-cpp-python {release} cannot be had: {done.stderr[-300:]}")
        found = work / "found"
        found.mkdir()
        with tarfile.open(archives[0]) as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                if _FOLDER + "ggml-vocab-" in member.name and member.isfile():
                    source = archive.extractfile(member)
                    assert source is not None
                    (found / name).write_bytes(source.read())
        found.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
