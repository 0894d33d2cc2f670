"""``run --show``: topics, grouping of steps into pieces, the numbers themselves."""

import numpy as np
import pytest

from gguf_fusion.cli._show import as_json, legend, line, topics_of
from gguf_fusion.errors import UsageError
from gguf_fusion.insight import mean, of_step
from gguf_fusion.records import Piece


def test_topics_are_checked():
    """Known topics in any number; another word is refused with those there are."""
    assert topics_of("gain, route") == ("gain", "route")
    with pytest.raises(UsageError, match="divergence,gain,route,entropy"):
        topics_of("gain,mood")
    with pytest.raises(UsageError, match="--show"):
        topics_of("")


def test_numbers_are_those_of_the_definitions():
    """KL both ways, Jensen-Shannon, entropies, gain over the lead, agreement and route, all in bits."""
    p = np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]])
    w = np.array([0.5, 0.5])
    f = w @ p
    told = of_step(np.log(p), np.log(f), w, np.array([0.4, 0.6]), 1, 0)
    kl = (p[0] * np.log2(p[0] / p[1])).sum()
    assert told.kl[0, 1] == pytest.approx(kl)
    assert told.kl[1, 0] == pytest.approx((p[1] * np.log2(p[1] / p[0])).sum())
    entropy = -(f * np.log2(f)).sum()
    assert told.entropy == pytest.approx(entropy)
    assert told.entropies.tolist() == pytest.approx([1.5, 1.5])
    assert told.jsd == pytest.approx(entropy - 1.5)
    assert told.gain == pytest.approx(np.log2(f[1] / p[0, 1]))
    assert (told.agreement, told.route) == (0.0, 1)


def test_copies_have_no_divergence_and_no_gain():
    """Identical experts: no divergence, no gain, full agreement."""
    row = np.log(np.full((3, 4), 0.25))
    told = of_step(row, row[0], np.full(3, 1 / 3), np.full(3, 1 / 3), 2, 0)
    assert told.jsd == pytest.approx(0.0, abs=1e-12)
    assert told.kl.max() == pytest.approx(0.0, abs=1e-12)
    assert told.gain == pytest.approx(0.0, abs=1e-12)
    assert told.agreement == 1.0


def test_steps_are_averaged_and_gains_added():
    """Over several steps divergences are means and gains sums; what is infinite becomes null."""
    with np.errstate(divide="ignore"):
        rows = [np.log(np.array([[1.0, 0.0], [0.5, 0.5]])), np.log(np.array([[0.5, 0.5], [0.5, 0.5]]))]
    parts = [of_step(r, np.log(np.full(2, 0.5)), np.full(2, 0.5), np.array([0.9, 0.1]), 0, 1) for r in rows]
    both = mean(parts)
    assert both.gain == pytest.approx(parts[0].gain + parts[1].gain)
    assert both.jsd == pytest.approx((parts[0].jsd + parts[1].jsd) / 2)
    told = as_json(both, ["a", "b"])
    assert told["kl"]["b || a"] is None
    assert told["route"] == "a"
    assert told["steps"] == 2


def test_lines_name_both_directions():
    """A line holds KL both ways in the order of its legend, and the expert that carried the piece."""
    p = np.array([[0.5, 0.5], [0.25, 0.75]])
    told = as_json(of_step(np.log(p), np.log(p.mean(axis=0)), np.full(2, 0.5), np.array([0.4, 0.6]), 1, 0), ["a", "b"])
    half = np.full(2, 0.5)
    piece = Piece(
        data=b"x", text="x", logprob=-1.0, expert_logprobs=-half, weights=half, responsibility=half, n_decodes=1,
        ghost_share=0.0,
    )  # fmt: skip
    assert legend(["a", "b"], ("divergence",)) == "experts: a, b; bits; KL 1||2, 2||1"
    shown = line(piece, told, ("divergence", "route"))
    assert f"(KL {told['kl']['a || b']:.2f}, {told['kl']['b || a']:.2f})" in shown
    assert shown.endswith("b")
