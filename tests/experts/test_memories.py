"""Rows after rolling back and branching, for every kind of native memory: tiny models with random weights.

mamba keeps a running state, lfm2 a state in some layers and a cache in others, gemma2 a sliding window in every second
layer, llama a plain cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_fusion.arrays import F32, I32
from gguf_fusion.ensemble import Ensemble
from gguf_fusion.experts import native
from gguf_fusion.experts.llama import LlamaExpert
from gguf_fusion.experts.prompt_cache import PromptCache
from gguf_fusion.gguf_info import read
from gguf_fusion.plan.memory import shape_of

KINDS = ("llama", "gemma2", "mamba", "lfm2")
N_EMBD, N_FF, N_HEAD, WINDOW = 32, 64, 2, 8
PIECES = [b"<unk>", b"<s>", b"</s>"]
N_VOCAB = 3 + 256 + 60


def tokenizer(writer: gguf.GGUFWriter, rng: np.random.Generator) -> None:
    """A SentencePiece-like vocabulary: specials, all bytes, single letters and pairs."""
    letters = [chr(97 + i) for i in range(26)] + ["\u2581"]
    pairs = sorted({"".join(rng.choice(letters[:26], 2)) for _ in range(80)})
    words = (letters + pairs)[:60]
    pieces = [*PIECES, *(f"<0x{byte:02X}>".encode() for byte in range(256)), *(word.encode() for word in words)]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores([-float(i) for i in range(N_VOCAB)])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(words)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def tensors(kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes (rows, columns) of a model of two to four layers."""
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (N_VOCAB, N_EMBD)}
    found["token_embd_norm.weight" if kind == "lfm2" else "output_norm.weight"] = (N_EMBD,)
    for i in range(4 if kind in ("lfm2", "gemma2") else 2):
        layer = {"attn_norm.weight": (N_EMBD,)}
        if kind == "mamba":
            inner, state, rank = 2 * N_EMBD, 8, 4
            layer |= {
                "ssm_in.weight": (2 * inner, N_EMBD), "ssm_conv1d.weight": (inner, 4), "ssm_conv1d.bias": (inner,),
                "ssm_x.weight": (rank + 2 * state, inner), "ssm_dt.weight": (inner, rank), "ssm_dt.bias": (inner,),
                "ssm_a": (inner, state), "ssm_d": (inner,), "ssm_out.weight": (N_EMBD, inner),
            }  # fmt: skip
        else:
            layer |= {
                "ffn_norm.weight": (N_EMBD,), "ffn_gate.weight": (N_FF, N_EMBD), "ffn_up.weight": (N_FF, N_EMBD),
                "ffn_down.weight": (N_EMBD, N_FF),
            }  # fmt: skip
            if kind == "lfm2" and i % 2 == 0:
                layer |= {
                    "shortconv.conv.weight": (N_EMBD, 3), "shortconv.in_proj.weight": (3 * N_EMBD, N_EMBD),
                    "shortconv.out_proj.weight": (N_EMBD, N_EMBD),
                }  # fmt: skip
            else:
                layer |= {f"attn_{part}.weight": (N_EMBD, N_EMBD) for part in ("q", "k", "v", "output")}
            if kind == "lfm2" and i % 2:
                layer |= {f"attn_{part}_norm.weight": (N_EMBD // N_HEAD,) for part in "qk"}
            if kind == "gemma2":
                layer |= {"post_attention_norm.weight": (N_EMBD,), "post_ffw_norm.weight": (N_EMBD,)}
        found |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that gives the file of a tiny random model of that kind."""
    folder = tmp_path_factory.mktemp("tiny")

    def make(kind: str) -> Path:
        path = folder / f"{kind}.gguf"
        if path.exists():
            return path
        rng = np.random.default_rng(7)
        shapes = tensors(kind)
        n_layers = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blk."))
        writer = gguf.GGUFWriter(path, kind)
        writer.add_block_count(n_layers)
        writer.add_context_length(512)
        writer.add_embedding_length(N_EMBD)
        writer.add_feed_forward_length(0 if kind == "mamba" else N_FF)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(N_VOCAB)
        writer.add_head_count(0 if kind == "mamba" else N_HEAD)
        if kind == "mamba":
            writer.add_ssm_conv_kernel(4)
            writer.add_ssm_inner_size(2 * N_EMBD)
            writer.add_ssm_state_size(8)
            writer.add_ssm_time_step_rank(4)
        else:
            writer.add_head_count_kv([0 if kind == "lfm2" and i % 2 == 0 else N_HEAD for i in range(n_layers)])
            writer.add_rope_dimension_count(N_EMBD // N_HEAD)
            writer.add_key_length(N_EMBD // N_HEAD)
            writer.add_value_length(N_EMBD // N_HEAD)
        if kind == "lfm2":
            writer.add_shortconv_l_cache(3)
        if kind == "gemma2":
            writer.add_sliding_window(WINDOW)
        tokenizer(writer, rng)
        for name, shape in shapes.items():
            values = rng.normal(0.0, 0.5, shape) if len(shape) > 1 else rng.uniform(0.5, 1.5, shape)
            if name.endswith("ssm_a"):
                values = -np.abs(values) - 0.1
            writer.add_tensor(name, values.astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def load(path: Path, **settings: object) -> LlamaExpert:
    options = {"n_ctx": 128, "n_threads": 1, "n_batch": 16, "n_ubatch": 16, **settings}
    return LlamaExpert.load(path, name=path.stem, **options)  # type: ignore[arg-type]


def fresh(path: Path, ids: I32, **settings: object) -> F32:
    with load(path, **settings) as expert:
        return expert.evaluate(ids)[0].copy()


def close_to(row: F32, expected: F32) -> bool:
    """Equal within what batches of another size change by rounding."""
    return bool(np.allclose(row, expected, rtol=1e-3, atol=1e-3 * float(np.abs(expected).max())))


def random_ids(rng: np.random.Generator, n: int) -> I32:
    return rng.integers(3, N_VOCAB, n).astype(np.int32)


@pytest.mark.parametrize("swa_full", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_any_way_back_equals_a_fresh_evaluation(tiny: Callable[[str], Path], kind: str, swa_full: bool) -> None:
    """Going on, cutting back by one, by many, to nothing, and branching give the rows of a fresh evaluation."""
    path = tiny(kind)
    rng = np.random.default_rng(3)
    ids = random_ids(rng, 60)
    with load(path, swa_full=swa_full) as expert:
        here = 40
        expert.evaluate(ids[:here])
        for step in (3, -1, 1, -9, -20, 5, 12, -30, 2, -1, -1, 8):
            here += step
            tail = random_ids(rng, 2)
            branch = np.concatenate([ids[:here], tail]).astype(np.int32)
            assert close_to(expert.evaluate(branch, branch=True)[0], fresh(path, branch)), (here, "branch")
            other = np.concatenate([ids[:here], random_ids(rng, 1)]).astype(np.int32)
            assert close_to(expert.evaluate(other)[0], fresh(path, other)), here
            assert close_to(expert.evaluate(ids[:here])[0], fresh(path, ids[:here])), here


@pytest.mark.parametrize("kind", KINDS)
def test_which_memories_can_be_cut(tiny: Callable[[str], Path], kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Caches are cut; states are evaluated again, and the user is told once."""
    rng = np.random.default_rng(5)
    ids = random_ids(rng, 20)
    with load(tiny(kind)) as expert:
        state = expert._model.has_state
        assert state == (kind in ("mamba", "lfm2"))
        expert.evaluate(ids)
        counts = []
        for n in (15, 10):
            before = expert.n_decoded
            expert.evaluate(np.concatenate([ids[:n], ids[:1]]).astype(np.int32))
            counts.append(expert.n_decoded - before)
    assert counts == ([16, 11] if state else [1, 1])
    assert sum("cannot go back" in record.message for record in caplog.records) == state


def test_the_guard_of_a_small_window_is_needed(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of what the window still holds, rows after a far cut are wrong although the cut succeeded."""
    path = tiny("gemma2")
    ids = random_ids(np.random.default_rng(11), 700)  # the window's cells are 256 at least
    other = np.concatenate([ids[:300], ids[:1]]).astype(np.int32)
    expected = fresh(path, other, n_ctx=1024)
    rows = []
    for guarded in (True, False):
        with load(path, swa_full=False, n_ctx=1024) as expert, monkeypatch.context() as patch:
            if not guarded:
                patch.setattr(LlamaExpert, "_window_complete", lambda self, start: True)
            expert.evaluate(ids)
            rows.append(expert.evaluate(other)[0].copy())
    assert close_to(rows[0], expected)
    assert not close_to(rows[1], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_text_is_that_of_a_fresh_ensemble(tiny: Callable[[str], Path], kind: str) -> None:
    """Texts one after the other, the second one sharing a prefix: the same as with experts loaded for each."""
    paths = [tiny(kind), tiny("llama" if kind != "llama" else "gemma2")]
    sampling = {"seed": 1, "max_bytes": 12, "temperature": 0.0}

    def write(ensemble: Ensemble, prompt: str) -> str:
        return ensemble.complete(prompt, **sampling).text  # type: ignore[arg-type]

    options = {"n_ctx": 128, "n_threads": 1, "lanes": "serial", "calibrate": False, "space": "byte"}
    with Ensemble.from_files(paths, **options) as ensemble:  # type: ignore[arg-type]
        together = [write(ensemble, prompt) for prompt in ("hello", "hello again", "hello")]
    for prompt, text in zip(("hello", "hello again"), together, strict=False):
        with Ensemble.from_files(paths, **options) as ensemble:  # type: ignore[arg-type]
            assert write(ensemble, prompt) == text
    assert together[0] == together[2]


@pytest.mark.parametrize("kind", KINDS)
def test_unusual_architectures_can_be_planned(tiny: Callable[[str], Path], kind: str) -> None:
    """Layers without a cache count none; the sums are those of the file."""
    shape = shape_of(kind, read(tiny(kind)))
    need = shape.need(n_ctx=256)
    assert need.weights == sum(4 * int(np.prod(dims)) for dims in tensors(kind).values())
    with_cache = {"llama": 2, "gemma2": 4, "mamba": 0, "lfm2": 2}[kind]
    assert need.kv == with_cache * 256 * 2 * N_EMBD * 2
    assert need.buffers > 0


def test_rows_do_not_change_behind_ones_back(tiny: Callable[[str], Path]) -> None:
    """Copies of rows stay as they were when more is evaluated, and the native cells never hold more than the path."""
    ids = random_ids(np.random.default_rng(2), 30)
    with load(tiny("llama")) as expert:
        kept = [expert.evaluate(ids[:n])[0].copy() for n in range(1, 6)]
        again = [row.copy() for row in kept]
        expert.evaluate(ids)
        assert all(np.array_equal(a, b) for a, b in zip(kept, again, strict=True))
        assert isinstance(expert._context, native.Context)
        assert expert._context.last_position(0) == 29


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_text_goes_on_where_it_was(tiny: Callable[[str], Path], kind: str) -> None:
    """Two texts in turn: each reads its new tokens only, with the rows of a fresh evaluation."""
    rng = np.random.default_rng(5)
    one, other, more = random_ids(rng, 90), random_ids(rng, 100), random_ids(rng, 12)
    with load(tiny(kind)) as expert:
        expert.prompt_cache = PromptCache(1 << 24)
        expert.evaluate(one)
        assert expert.bring_back(other) == 0
        expert.evaluate(other)
        longer, n = np.concatenate([one, more]), expert.n_decoded
        assert expert.bring_back(longer) == len(one)
        row = expert.evaluate(longer).copy()
        assert expert.n_decoded - n == len(more)
        assert close_to(row, fresh(tiny(kind), longer))
        assert expert.bring_back(other) == len(other)
        grown = np.concatenate([other, more])
        assert close_to(expert.evaluate(grown).copy(), fresh(tiny(kind), grown))
        expert.forget()
        assert expert.bring_back(grown) == len(grown)
        assert 0 < expert.prompt_cache.n_bytes <= 1 << 24


def test_a_state_that_does_not_fit_is_no_harm(tiny: Callable[[str], Path]) -> None:
    """Refused by the native library, the text is read again."""
    rng = np.random.default_rng(6)
    one, other = random_ids(rng, 90), random_ids(rng, 100)
    with load(tiny("llama")) as expert:
        expert.prompt_cache = PromptCache(1 << 24)
        expert.evaluate(one)
        expert.bring_back(other)
        expert.evaluate(other)
        _, kept = expert.prompt_cache._kept[0]
        kept.state[:64] = 255
        assert expert.bring_back(one) == 0
        assert close_to(expert.evaluate(one).copy(), fresh(tiny("llama"), one))
