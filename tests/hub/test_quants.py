"""What ``repo:Q4_K_M`` means."""

from __future__ import annotations

import pytest

from gguf_fusion.errors import HubError
from gguf_fusion.hub.quants import RemoteFile, choose, human_size

LISTING = [
    RemoteFile(name, size)
    for name, size in [
        ("m-Q4_K_M.gguf", 5_000_000_000),
        ("m-Q4_K_S.gguf", 4_700_000_000),
        ("m-UD-Q4_K_XL.gguf", 5_100_000_000),
        ("m-IQ4_NL.gguf", 4_600_000_000),
        ("m-F16.gguf", 16_000_000_000),
        ("x-AVQ2.gguf", 2_000_000_000),
        ("sub/Q8_0/m-Q8_0.gguf", 8_500_000_000),
        ("README.md", 10),
        ("mmproj-m-F16.gguf", 800_000_000),
    ]
]


def pick(quant: str | None = None, file: str | None = None, files: list[RemoteFile] = LISTING) -> str:
    """The name of the chosen file."""
    return choose("u/r", files, file=file, quant=quant).name


@pytest.mark.parametrize(
    ("quant", "name"),
    [
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("ud-q4_k_xl", "m-UD-Q4_K_XL.gguf"),
        ("iq4_nl", "m-IQ4_NL.gguf"),
        ("F16", "m-F16.gguf"),
        ("fp16", "m-F16.gguf"),
        ("Q8_0", "sub/Q8_0/m-Q8_0.gguf"),
        (None, "m-Q4_K_M.gguf"),
        ("m-q4_k_s", "m-Q4_K_S.gguf"),
        ("m-Q8_0.gguf", "sub/Q8_0/m-Q8_0.gguf"),
    ],
)
def test_whole_tokens_in_any_case(quant: str | None, name: str) -> None:
    """A quant is a whole token in any case; a file's name works as well; nothing means the default order."""
    assert pick(quant) == name


@pytest.mark.parametrize("quant", ["Q4", "Q2", "Q4_K", "Q4_K_XL", "K_M", "4"])
def test_parts_of_a_token_match_nothing(quant: str) -> None:
    """Half a token is absent, and the candidates are listed with their sizes."""
    with pytest.raises(HubError, match=f"no file of the quant '{quant}'") as caught:
        pick(quant)
    for expected in ("UD-Q4_K_XL", "5.1 GB", "m-Q4_K_M.gguf"):
        assert expected in str(caught.value)


def test_exact_file_wins_over_everything() -> None:
    """A file's exact name is taken even if a folder holds another one like it."""
    files = [RemoteFile("a/m-Q8_0.gguf"), RemoteFile("m-Q8_0.gguf")]
    assert pick("m-Q8_0.gguf", files=files) == "m-Q8_0.gguf"
    with pytest.raises(HubError, match="several files of the quant"):
        pick("Q8_0", files=files)


@pytest.mark.parametrize(("pattern", "name"), [("*q4_k_m.gguf", "m-Q4_K_M.gguf"), ("sub/*", "sub/Q8_0/m-Q8_0.gguf")])
def test_patterns_must_match_once(pattern: str, name: str) -> None:
    """A pattern that fits one file means it; one that fits several lists them."""
    assert pick(file=pattern) == name
    with pytest.raises(HubError, match="matches 2 files"):
        pick(file="*Q4_K_[MS].gguf")


def test_default_order() -> None:
    """Without a quant the documented order decides, whatever the order of the listing."""
    names = ["m-F16.gguf", "m-Q8_0.gguf", "m-Q5_K_M.gguf", "m-Q2_K.gguf"]
    order = []
    while names:
        try:
            order.append(pick(files=[RemoteFile(name) for name in names]))
        except HubError:
            break
        names.remove(order[-1])
    assert order == ["m-Q5_K_M.gguf", "m-Q8_0.gguf", "m-F16.gguf", "m-Q2_K.gguf"]


def test_ambiguous_default_is_an_error() -> None:
    """Two models of the preferred quant are not guessed between."""
    with pytest.raises(HubError, match="several models"):
        pick(files=[RemoteFile("a-Q4_K_M.gguf"), RemoteFile("b-Q4_K_M.gguf")])


def test_only_file_needs_no_quant() -> None:
    """One model file is taken whatever it is called, companions do not count."""
    assert pick(files=[RemoteFile("model.gguf"), RemoteFile("mmproj-F16.gguf")]) == "model.gguf"


def test_no_gguf_at_all() -> None:
    """A repository of another format says so."""
    with pytest.raises(HubError, match="holds no GGUF"):
        pick(files=[RemoteFile("model.safetensors")])


def test_split_and_whole_of_one_quant() -> None:
    """Where a quant exists whole and in parts, the exact name decides, by any of its shards."""
    shards = [RemoteFile(f"m-Q4_K_M-{index:05d}-of-00002.gguf", 5) for index in (1, 2)]
    files = [RemoteFile("m-Q4_K_M.gguf", 10), *shards]
    with pytest.raises(HubError, match="several files of the quant"):
        pick("Q4_K_M", files=files)
    assert pick(file="m-Q4_K_M.gguf", files=files) == "m-Q4_K_M.gguf"
    chosen = choose("u/r", files, file="m-Q4_K_M-00002-of-00002.gguf", quant=None)
    assert (chosen.name, chosen.size_bytes) == ("m-Q4_K_M-00001-of-00002.gguf", 10)


@pytest.mark.parametrize(
    ("size", "text"),
    [(None, "?"), (0, "0 B"), (999, "999 B"), (1500, "2 kB"), (98_362_432, "98.4 MB"), (4_683_073_536, "4.7 GB")],
)
def test_sizes_as_people_read_them(size: int | None, text: str) -> None:
    """Sizes are in powers of ten, like on web pages."""
    assert human_size(size) == text
