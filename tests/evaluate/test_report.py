"""Reports: the expert chosen on dev is the one compared with on test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from gguf_fusion.evaluate import report
from gguf_fusion.evaluate.plot import draw_all
from gguf_fusion.evaluate.score import BridgeScore, DocumentScore, ExpertScore, FusedScore, total


def scored(name: str, a: float, b: float, fused: float) -> DocumentScore:
    def bridge(bits: float) -> BridgeScore:
        return BridgeScore(
            epsilon=0.1, bits=bits, n_bytes=100, n_tokens=30, n_decodes=30, share_sum=0.0, n_reanchors=0, floor_hits=0
        )

    experts = {
        key: ExpertScore(
            own_bits=bits, n_bytes=100, n_tokens=30, bridge=(bridge(0.9 * bits),), joint_decodes=30, joint_share_sum=0.0
        )
        for key, bits in (("a", a), ("b", b))
    }
    law = FusedScore(
        bits=fused, n_bytes=100, zero_hits=0, empty_pools=0, brier=np.zeros(100, np.float32),
        confidence=np.ones(100, np.float32), correct=np.ones(100, np.bool_), weights=np.full((100, 2), 0.5, np.float32),
    )  # fmt: skip
    return DocumentScore(
        name=name, domain=name, total_bytes=132, n_bytes=100, n_windows=1, seconds=0.0,
        experts=experts, oracle_bits=1.0, word_first=np.ones(100, np.bool_), fused={"linear": law},
    )  # fmt: skip


def test_best_expert_comes_from_dev() -> None:
    """On dev a is better, on test b: the comparison is with a, and the document oracle takes the better of each."""
    dev, test = [scored("d", 90, 110, 80)], [scored("t", 120, 100, 90), scored("u", 80, 100, 70)]
    overall = [*test, scored("v", 130, 100, 90)]
    assert report.best_on(overall) == "b"
    assert report.best_on(dev) == "a"
    entry = report.comparison(overall, "a")["linear"]
    assert entry["best_single"] == "a"
    assert np.isclose(entry["relative"], 1 - 250 / 330)
    assert np.isclose(entry["relative_to_bridge"], 1 - 250 / 297)
    assert np.isclose(report.document_oracle(overall), 280 / 300)


def test_no_p_value_against_an_expert_chosen_on_the_same_documents() -> None:
    """Chosen on dev: p-values against own tokens and the bridge, with Holm's correction; chosen here: none of them."""
    scores = [scored(f"{i}", 100 + i, 120, 90) for i in range(8)]
    on_dev = report.comparison(scores, "a")["linear"]
    here = report.comparison(scores, "a", chosen_here=True)["linear"]
    assert on_dev["p_value"] == on_dev["p_holm"] < 0.05
    assert on_dev["against_bridge"]["p_value"] < 0.05
    assert np.isclose(on_dev["against_bridge"]["relative"], on_dev["relative_to_bridge"])
    assert here["p_value"] is here["p_holm"] is here["against_bridge"]["p_value"] is None
    assert here["relative_low"] == on_dev["relative_low"]
    assert report.comparison(scores)["linear"]["p_value"] is None


def test_a_larger_model_is_a_baseline_of_its_own() -> None:
    """It has its own row and columns, is always tested against, and is never the best single expert."""
    scores = [replace(scored(f"{i}", 100 + i, 120, 90), larger={"big": scored("x", 80, 1, 1).experts["a"]})
              for i in range(8)]  # fmt: skip
    found = report.as_json(scores)
    entry = found["comparison"]["linear"]
    assert found["best_single"] == "a"
    assert np.isclose(entry["larger"]["big"]["relative"], 1 - 90 / 80)
    assert entry["larger"]["big"]["p_value"] < 0.05
    assert entry["p_value"] is None
    assert np.isclose(found["larger"]["big"]["bpb_own"], 0.8)
    rows = report.fused_rows(total(scores), found["comparison"])
    assert [len(row) for row in rows] == [len(report.fused_header(total(scores)))]
    assert [row[0] for row in report.expert_rows(total(scores))] == ["a", "b", "big (no member)"]


def test_every_picture_is_written(tmp_path: Path) -> None:
    """One PNG each for gain, weights and reliability, also where a domain has one document and so no interval."""
    scores = [scored(name, 100, 110, 90) for name in ("x", "y", "z")]
    compared = {score.domain: report.comparison([score], "a") for score in scores}
    paths = draw_all(scores, total(scores), {**compared, "all": report.comparison(scores, "a")}, tmp_path / "new")
    assert [path.name for path in paths] == ["gain.png", "weights.png", "reliability.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
