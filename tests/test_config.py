"""Registry files: what they may say, who wins, and how slips are reported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gguf_fusion.config import (
    DEFAULT_ENSEMBLE,
    HubSource,
    PathSource,
    Registry,
    Source,
    UrlSource,
    WheelSource,
    packaged_file,
    parse_source,
    user_file,
)
from gguf_fusion.errors import ConfigError

EXPERTS = '[experts.a]\nref = "u/a:Q4_K_M"\n[experts.b]\nref = "u/b"\n'


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty directory, so that no registry lies around."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def load(tmp_path: Path, text: str | bytes, name: str = "mine.toml") -> Registry:
    """A registry with this file in front of the packaged one."""
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Registry.load([path])


def failure(tmp_path: Path, text: str | bytes) -> str:
    """The message for a registry file that is wrong."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return str(caught.value)


def test_packaged_registry_holds_the_default_ensemble() -> None:
    """The default ensemble consists of three known experts with checked files."""
    registry = Registry.load()
    pocket = registry.ensemble(DEFAULT_ENSEMBLE)
    assert pocket.experts == ("smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct")
    assert len(set(pocket.weights)) == 1
    for name in pocket.experts:
        first = registry.expert(name).sources[0]
        assert isinstance(first, WheelSource)
        assert any(isinstance(source, HubSource) for source in registry.expert(name).sources)


def test_packaged_experts_state_role_and_licence() -> None:
    """Every packaged expert has a role, a licence and a link to it; its trios have three members."""
    registry = Registry.load()
    for spec in registry.experts.values():
        assert spec.role in ("chat", "coder", "reasoner", "prose")
        assert spec.licence
        assert spec.licence_url.startswith("https://")
    for memory in (6, 8, 12, 16):
        (name,) = [name for name in registry.ensembles if name.endswith(f"-{memory}")]
        assert {registry.expert(expert).role for expert in registry.ensembles[name].experts} == {
            "coder",
            "chat",
            "reasoner",
        }


def test_joined_file_gets_the_name_of_its_parts() -> None:
    """A file cut into parts is named after them."""
    source = Registry.load().expert("gemma-3-270m").sources[0]
    assert isinstance(source, WheelSource)
    assert source.file == "gemma-3-270m-q4_k_m.gguf"


def test_every_key_is_read(tmp_path: Path) -> None:
    """All keys of an expert and an ensemble arrive with their values."""
    text = EXPERTS + (
        '[experts.c]\nrole = "chat"\ndescription = "d"\nlicence = "MIT"\nlicence_url = "https://x.y"\n'
        'needs_acceptance = "say yes"\ntemplate = "t.jinja"\nn_ctx = 512\nn_gpu_layers = -1\nn_threads = 2\n'
        'type_k = "q8_0"\ntype_v = "f16"\nadd_end = [5, "<end>"]\nremove_end = ["</s>"]\n'
        'smaller = [{ hub = "u/r", quant = "Q3_K_M" }, { path = "s.gguf" }]\n'
        '[[experts.c.sources]]\npath = "m.gguf"\n'
        '[ensembles.e]\nexperts = ["a", "c"]\nweights = [1, 0.5]\ndescription = "both"\nstrategy = "linear(static)"\n'
        'epsilon = 0.02\nbridge = "token"\nplain_chat = "p"\nsampling = { temperature = 0.7 }\n'
        "smaller_quants = true\n"
    )
    registry = load(tmp_path, text)
    spec = registry.expert("c")
    assert (spec.n_ctx, spec.n_gpu_layers, spec.n_threads, spec.type_k, spec.type_v) == (512, -1, 2, "q8_0", "f16")
    assert (spec.add_end, spec.remove_end, spec.needs_acceptance) == ((5, "<end>"), ("</s>",), "say yes")
    assert spec.template == tmp_path / "t.jinja"
    assert spec.sources == (PathSource(tmp_path / "m.gguf"),)
    assert spec.smaller == (HubSource("u/r", quant="Q3_K_M"), PathSource(tmp_path / "s.gguf"))
    ensemble = registry.ensemble("e")
    assert (ensemble.experts, ensemble.weights, ensemble.epsilon) == (("a", "c"), (1.0, 0.5), 0.02)
    assert (ensemble.strategy, ensemble.bridge, ensemble.plain_chat) == ("linear(static)", "token", "p")
    assert dict(ensemble.sampling) == {"temperature": 0.7}
    assert ensemble.smaller_quants


def test_experts_may_be_a_table_of_weights(tmp_path: Path) -> None:
    """``experts = {a = 0.6, b = 0.4}`` gives names and weights at once."""
    spec = load(tmp_path, EXPERTS + "[ensembles.e]\nexperts = { a = 0.6, b = 0.4 }\n").ensemble("e")
    assert (spec.experts, spec.weights) == (("a", "b"), (0.6, 0.4))


@pytest.mark.parametrize("count", [1, 5])
def test_one_and_five_experts_are_fine(tmp_path: Path, count: int) -> None:
    """An ensemble may have one expert or five."""
    names = [f"x{index}" for index in range(count)]
    text = "".join(f'[experts.{name}]\nref = "u/r:{name}.gguf"\n' for name in names)
    assert load(tmp_path, f"{text}[ensembles.e]\nexperts = {names}\n").ensemble("e").experts == tuple(names)


def test_two_names_for_one_file_are_fine(tmp_path: Path) -> None:
    """The same file may be two experts, if each has its own name."""
    text = '[experts.a]\nref = "u/r"\n[experts.b]\nref = "u/r"\n[ensembles.e]\nexperts = ["a", "b"]\n'
    assert load(tmp_path, text).ensemble("e").experts == ("a", "b")


def test_lookup_order(tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--config wins over the variable, over ./models.toml, over the user's file, over the package."""
    layers = [tmp_path / "config.toml", tmp_path / "variable.toml", elsewhere / "models.toml", user_file()]
    user_file().parent.mkdir(parents=True)
    monkeypatch.setenv("GGUF_FUSION_MODELS", str(layers[1]))
    for path in layers:
        path.write_text(f'[experts.smollm2-135m-instruct]\nrole = "{path.stem}"\n')
    roles = []
    for path in layers:
        roles.append(Registry.load([layers[0]] if layers[0].exists() else []).expert("smollm2-135m-instruct").role)
        path.unlink()
        if path == layers[1]:
            monkeypatch.delenv("GGUF_FUSION_MODELS")
    roles.append(Registry.load().expert("smollm2-135m-instruct").role)
    assert roles == ["config", "variable", "models", "models", "chat"]


def test_files_of_the_variable_are_separated_like_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first file in $GGUF_FUSION_MODELS wins."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(f'[experts.n]\nref = "u/{name}"\n')
    monkeypatch.setenv("GGUF_FUSION_MODELS", f"{tmp_path / 'one'}{os.pathsep}{tmp_path / 'two'}")
    assert Registry.load().expert("n").sources == (HubSource("u/one"),)


def test_single_keys_can_be_overridden(tmp_path: Path) -> None:
    """A user file that sets one key keeps the others, sources included."""
    before = Registry.load().expert("gemma-3-270m")
    after = load(tmp_path, "[experts.gemma-3-270m]\nn_ctx = 8192\n").expert("gemma-3-270m")
    assert after.n_ctx == 8192
    assert after.sources == before.sources


def test_relative_paths_belong_to_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are resolved against the registry file, wherever the command runs; ``ref`` too."""
    folder = tmp_path / "registry"
    folder.mkdir()
    path = folder / "r.toml"
    path.write_text('[experts.a]\nref = "./a.gguf"\n[experts.b]\nsources = [{ path = "sub/b.gguf" }]\n')
    registry = Registry.load([path])
    assert registry.expert("a").sources == (PathSource(folder / "a.gguf"),)
    assert registry.expert("b").sources == (PathSource(folder / "sub/b.gguf"),)


def test_byte_order_mark_and_crlf_are_fine(tmp_path: Path) -> None:
    """Files saved by Windows editors are read."""
    assert "a" in load(tmp_path, b"\xef\xbb\xbf" + EXPERTS.replace("\n", "\r\n").encode()).experts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[experts.a]\nref = 'u/a'\nn_ctxx = 5\n", ["mine.toml:3", "n_ctxx", "'n_ctx'"]),
        ("[experts.a]\nref = 'u/a'\nn_gpu_layer = 5\n", ["mine.toml:3", "'n_gpu_layers'"]),
        ("[expert.a]\nref = 'u/a'\n", ["mine.toml:1", "'experts'"]),
        ("[ensembles.e]\nexpert = ['a']\n", ["mine.toml:2", "'experts'"]),
        ("[experts.a]\nref = 'u/a'\n[experts.a]\nrole = 'x'\n", ["mine.toml", "line 3", "twice"]),
        ("[experts.'m.gguf']\nref = 'u/a'\n", ["mine.toml:1", "m.gguf", "reads like a file"]),
        ("[experts.'a/b']\nref = 'u/a'\n", ["a/b", "reads like a file"]),
        (EXPERTS + "[ensembles.a]\nexperts = ['a']\n", ["mine.toml:6", "also the name of an expert"]),
        (EXPERTS + "[ensembles.e]\nexperts = ['a', 'b']\nweights = [1]\n", ["mine.toml:7", "2 weights", "got 1"]),
        (EXPERTS + "[ensembles.e]\nexperts = ['a', 'b']\nweights = [1, -1]\n", ["mine.toml:7", "not negative"]),
        (EXPERTS + "[ensembles.e]\nexperts = ['a', 'b']\nweights = [0, 0]\n", ["mine.toml:7", "sum to zero"]),
        (EXPERTS + "[ensembles.e]\nexperts = ['a', 'b']\nweights = [nan, 1]\n", ["finite"]),
        (EXPERTS + "[ensembles.e]\nexperts = ['a', 'b']\nweights = [true, 1]\n", ["2 numbers"]),
        (EXPERTS + "[ensembles.e]\nexperts = []\n", ["mine.toml:6", "list of expert names"]),
        (EXPERTS + "[ensembles.e]\nexperts = ['a', 'a']\n", ["mine.toml:6", "listed twice"]),
        (EXPERTS + "[ensembles.e]\nexperts = ['a', 'bb']\n", ["mine.toml:6", "'bb'"]),
        (EXPERTS + "[ensembles.e]\nexperts = ['gemma-3-270']\n", ["did you mean 'gemma-3-270m'"]),
        (EXPERTS + "[ensembles.e]\nweights = [1]\n", ["has no 'experts'"]),
        (EXPERTS + "[ensembles.e]\nexperts = ['a']\nbridge = 'bits'\n", ["mine.toml:7", "byte or token"]),
        (EXPERTS + "[ensembles.e]\nexperts = ['a']\nepsilon = 1.5\n", ["mine.toml:7", "from 0"]),
        (EXPERTS + "[ensembles.e]\nexperts = ['a']\nsampling = 3\n", ["mine.toml:7", "table"]),
        ("[experts.a]\nrole = 'x'\n", ["says nowhere where its file comes from"]),
        ("[experts.a]\nref = 'u/a'\nsources = [{ hub = 'u/a' }]\n", ["both"]),
        ("[experts.a]\nref = 'word'\n", ["mine.toml:2", "user/repo"]),
        ("[experts.a]\nref = 'u/a'\nn_ctx = '5'\n", ["mine.toml:3", "whole number"]),
        ("[experts.a]\nref = 'u/a'\nn_ctx = 0\n", ["mine.toml:3", "at least 1"]),
        ("[experts.a]\nref = 'u/a'\nadd_end = ['']\n", ["mine.toml:3", "token ids"]),
        ("[experts.a]\nref = 'u/a'\nrole = 7\n", ["mine.toml:3", "text"]),
        ("[experts.a]\nsources = [{ hub = 'u/a', url = 'http://x' }]\n", ["exactly one of"]),
        ("[experts.a]\nsources = [{ hub = 'a' }]\n", ["user/repo"]),
        ("[experts.a]\nsources = [{ hub = 'u/a', quantt = 'Q4' }]\n", ["'quant'"]),
        ("[experts.a]\nsources = [{ hub = 'u/a', quant = 'Q4', file = 'f.gguf' }]\n", ["not both"]),
        ("[experts.a]\nsources = [{ hub = 'u/a', sha256 = 'xyz' }]\n", ["64"]),
        ("[experts.a]\nsources = [{ hub = 'u/a', size = -5 }]\n", ["number of bytes"]),
        ("[experts.a]\nsources = [{ wheels = [{ package = 'p' }], sha256 = 's' }]\n", ["sha256"]),
        ("[experts.a]\nref = 'u/a'\nsmaller = [{ hub = 'u/a', quantt = 'Q3' }]\n", ["'quant'"]),
        ("[experts.a]\nref = 'u/a'\nsmaller = 'Q3_K_M'\n", ["list of tables"]),
        ("[experts.a]\nsources = []\n", ["mine.toml:2", "list of tables"]),
        ("experts = 3\n", ["mine.toml:1", "[experts.NAME]"]),
        ("[experts]\na = 3\n", ["mine.toml:2", "table"]),
        ("[experts.a\n", ["mine.toml", "line 1"]),
        ('[experts.a]\nref = "C:\\models\\a.gguf"\n', ["line 2", "single quotes"]),
        ('[experts.a]\nsources = [{ path = "C:\\temp\\new.gguf" }]\n', ["mine.toml", "single quotes"]),
        (b"[experts.a]\nref = '\xff'\n", ["mine.toml:2", "UTF-8", "0xff"]),
        ("[experts.a]\n".encode("utf-16"), ["UTF-16"]),
    ],
)
def test_slips_are_reported_with_file_and_key(tmp_path: Path, text: str | bytes, parts: list[str]) -> None:
    """Every slip names the file, mostly the line, and what would be right."""
    message = failure(tmp_path, text)
    for part in parts:
        assert part in message


def test_missing_files_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that was asked for must exist, by option or by variable."""
    with pytest.raises(ConfigError, match=r"absent\.toml.*no such registry file"):
        Registry.load([tmp_path / "absent.toml"])
    monkeypatch.setenv("GGUF_FUSION_MODELS", str(tmp_path / "gone.toml"))
    with pytest.raises(ConfigError, match=r"gone\.toml"):
        Registry.load()


def test_unknown_names_suggest_the_nearest() -> None:
    """A misspelt expert or ensemble names the right one."""
    registry = Registry.load()
    with pytest.raises(ConfigError, match="did you mean 'gemma-3-270m'"):
        registry.expert("gema-3-270m")
    with pytest.raises(ConfigError, match="did you mean 'pocket'"):
        registry.ensemble("poket")
    with pytest.raises(ConfigError, match="that is an expert"):
        registry.ensemble("gemma-3-270m")


def test_wheel_sources_need_hash_and_size(tmp_path: Path) -> None:
    """A file joined from wheels cannot be trusted without its hash and size."""
    part = "{ package = 'p', version = '1.0', member = 'p/m.gguf' }"
    assert "needs sha256 and size" in failure(tmp_path, f"[experts.a]\nsources = [{{ wheels = [{part}] }}]\n")
    bad = "{ package = '-p', version = '1.0', member = 'm' }"
    text = f"[experts.a]\nsources = [{{ wheels = [{bad}], size = 1, sha256 = '{'0' * 64}' }}]\n"
    assert "no package name and version" in failure(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("u/r", HubSource("u/r")),
        ("u/r:Q4_K_M", HubSource("u/r", quant="Q4_K_M")),
        ("u/r@v2:Q8_0", HubSource("u/r", quant="Q8_0", revision="v2")),
        ("u/r:m.gguf", HubSource("u/r", file="m.gguf")),
        ("u/r/sub/m.gguf", HubSource("u/r", file="sub/m.gguf")),
        ("hf.co/u/r:q4_k_m", HubSource("u/r", quant="q4_k_m")),
        ("https://huggingface.co/u/r", HubSource("u/r")),
        ("https://huggingface.co/u/r/tree/dev", HubSource("u/r", revision="dev")),
        ("https://huggingface.co/u/r/blob/main/x/m.gguf", HubSource("u/r", file="x/m.gguf")),
        ("https://huggingface.co/u/r/resolve/v1/m.gguf?download=true", HubSource("u/r", file="m.gguf", revision="v1")),
        ("HTTPS://hf.co/u/r/blob/main/a%20b.gguf", HubSource("u/r", file="a b.gguf")),
        ("https://example.org/m.gguf", UrlSource("https://example.org/m.gguf")),
        ("./m.gguf", PathSource(Path("m.gguf"))),
        ("m.gguf", PathSource(Path("m.gguf"))),
        ("sub/m.gguf", PathSource(Path("sub/m.gguf"))),
        ("/x/y.bin", PathSource(Path("/x/y.bin"))),
        ("word", None),
        ("two words", None),
        ("a/b/c", None),
        ("", None),
    ],
)
def test_references_mean_what_they_look_like(text: str, source: Source | None) -> None:
    """Repositories, pages, links, addresses and paths are told apart; a plain word is a name."""
    assert parse_source(text) == source


@pytest.mark.parametrize("text", ["u/r", "u/r:Q4_K_M", "u/r@v2:Q8_0", "u/r:sub/m.gguf", "https://example.org/m.gguf"])
def test_printed_references_parse_back(text: str) -> None:
    """A reference survives printing and parsing."""
    source = parse_source(text)
    assert str(source) == text
    assert parse_source(str(source)) == source


def test_existing_files_are_paths(elsewhere: Path) -> None:
    """A file that exists is a path, even if its name looks like a repository."""
    (elsewhere / "u").mkdir()
    (elsewhere / "u/r").write_text("x")
    assert parse_source("u/r") == PathSource(Path("u/r"))


def test_pages_of_the_endpoint_are_repositories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links to the mirror in HF_ENDPOINT mean its repositories."""
    monkeypatch.setenv("HF_ENDPOINT", "http://localhost:1234")
    assert parse_source("http://localhost:1234/u/r/blob/main/m.gguf") == HubSource("u/r", file="m.gguf")


def test_packaged_file_exists() -> None:
    """The default registry is found."""
    assert packaged_file().is_file()


def test_placement_settings(tmp_path: Path) -> None:
    """Workers and layers by expert, margins and fewer layers by ensemble; None where nothing was said."""
    registry = load(
        tmp_path,
        EXPERTS + 'n_gpu_layers = -1\nrpc = ["far:50052", "[::1]:1"]\n'
        '[ensembles.e]\nexperts = ["a", "b"]\nfewer_layers = true\nvram_margin = 0.1\n',
    )
    assert (registry.expert("b").rpc, registry.expert("b").n_gpu_layers) == (("far:50052", "[::1]:1"), -1)
    assert (registry.expert("a").rpc, registry.expert("a").n_gpu_layers) == ((), None)
    assert (registry.ensemble("e").fewer_layers, registry.ensemble("e").vram_margin) == (True, 0.1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('rpc = "far:50052"', "list of workers"),
        ('rpc = ["far"]', "list of workers"),
        ("n_gpu_layer = 3", "n_gpu_layers"),
        ("n_ctxx = 3", "n_ctx"),
        ('[ensembles.e]\nexperts = ["a"]\nfewer_layers = 1', "true or false"),
        ('[ensembles.e]\nexperts = ["a"]\nvram_margin = 1.0', "up to (not including) 1"),
    ],
)
def test_slips_in_placement_settings(tmp_path: Path, line: str, message: str) -> None:
    """Wrong types and misspelt keys are named, with the nearest valid one."""
    assert message in failure(tmp_path, EXPERTS + line + "\n")
