"""Reports: the expert chosen on dev is the one compared with on test."""

from __future__ import annotations

import numpy as np

from gguf_fusion.evaluate import report
from gguf_fusion.evaluate.score import BridgeScore, DocumentScore, ExpertScore, FusedScore


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
        bits=fused, n_bytes=100, zero_hits=0, empty_pools=0, brier_sum=0.0,
        confidence=np.ones(1, np.float32), correct=np.ones(1, np.bool_),
    )  # fmt: skip
    return DocumentScore(
        name=name, domain=name, total_bytes=132, n_bytes=100, n_windows=1, seconds=0.0,
        experts=experts, oracle_bits=1.0, fused={"linear": law},
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
