"""Bias between strata: taken out of scores, warned of, and shown to steer training when it stays."""

import math
import random

import pytest

from mappa_graph.coach.calibration import Calibrator, by_stratum
from mappa_graph.coach.statistic import mean
from mappa_graph.errors import ConfigError


def groups(scores, strata):
    out = {}
    for score, name in zip(scores, strata, strict=True):
        if score is not None:
            out.setdefault(name, []).append(score)
    return out


def test_none_leaves_scores_alone():
    assert Calibrator("none")([1.0, None, 9.0], ["a", "a", "b"]) == [1.0, None, 9.0]


def test_stratum_means_become_equal_and_order_within_stays():
    scores, strata = [7.0, 8.0, 9.0, 3.0, None, 5.0], ["r", "r", "r", "c", "c", "c"]
    out = Calibrator()(scores, strata)
    means = {name: mean(values) for name, values in groups(out, strata).items()}
    assert means["r"] == pytest.approx(means["c"]) == pytest.approx(mean([7, 8, 9, 3, 5]))
    assert out[0] < out[1] < out[2] and out[3] < out[5]
    assert out[4] is None
    assert out[2] - out[1] == pytest.approx(1.0)


def test_calibrated_scores_stay_on_the_scale_without_losing_equality():
    rng = random.Random(0)
    strata = [rng.choice("abc") for _ in range(300)]
    scores = [min(10.0, max(0.0, rng.gauss({"a": 1, "b": 5, "c": 9}[s], 3))) for s in strata]
    out = Calibrator()(scores, strata)
    assert all(0 <= s <= 10 for s in out)
    means = [mean(v) for v in groups(out, strata).values()]
    assert max(means) - min(means) < 1e-9
    for name in "abc":
        inside = [(s, o) for s, o, n in zip(scores, out, strata, strict=True) if n == name]
        assert [o for _, o in sorted(inside)] == sorted(o for _, o in inside)


def test_a_batch_without_scores_stays_as_it_is():
    assert Calibrator()([None, None], ["a", "b"]) == [None, None]
    assert Calibrator()([], []) == []


def test_a_prior_keeps_a_tiny_stratum_from_being_flattened():
    scores, strata = [9.0, *[5.0] * 50], ["rare", *["common"] * 50]
    sure, unsure = Calibrator()(scores, strata), Calibrator(prior=9)(scores, strata)
    assert sure[0] == pytest.approx(sure[1])
    assert unsure[0] - unsure[1] > 3


def test_running_means_remember_what_a_small_batch_cannot_tell():
    running = Calibrator("running", decay=0.9)
    for _ in range(20):
        running([8.0, 6.0, 2.0, 4.0], ["r", "r", "c", "c"])
    out = running([8.0, 2.0], ["r", "c"])
    assert out[0] - out[1] == pytest.approx(2.0, abs=0.3)
    kept = Calibrator("running")
    kept.restore(running.state())
    assert kept([7.0, 3.0], ["r", "c"]) == running([7.0, 3.0], ["r", "c"])


@pytest.mark.parametrize("settings", [{"mode": "all"}, {"decay": 1.0}, {"decay": -0.1}, {"prior": -1}])
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ConfigError):
        Calibrator(**settings)


def test_scores_and_strata_must_match():
    with pytest.raises(ConfigError, match="2 scores and 1 strata"):
        Calibrator()([1.0, 2.0], ["a"])


def test_a_gap_that_outcomes_explain_is_no_bias_and_one_they_do_not_is():
    strata = ["r"] * 20 + ["c"] * 20
    scores = [8.0, 7.0] * 10 + [6.0, 5.0] * 10
    explained = by_stratum(scores, strata, [0.8, 0.7] * 10 + [0.6, 0.5] * 10)
    assert [s.warning for s in explained] == ["", ""]
    biased = {s.name: s for s in by_stratum(scores, strata, [0.6, 0.5] * 20)}
    assert biased["r"].excess == pytest.approx(2.0)
    assert "2.0 points higher" in biased["r"].warning
    assert "lower" in biased["c"].warning
    assert biased["r"].effect > 2


def test_without_outcomes_a_gap_is_told_as_a_gap():
    report = by_stratum([8.0, 7.0] * 5 + [5.0, 4.0] * 5 + [None], ["r"] * 10 + ["c"] * 10 + ["c"])
    assert "bias from skill" in report[0].warning
    assert [s.n for s in report] == [10, 10]


def test_few_scores_raise_no_warning():
    assert not any(s.warning for s in by_stratum([9.0, 8.0, 1.0, 2.0], ["r", "r", "c", "c"]))


# The drift seen when a coach scores regression work higher, on a toy: an engineer frames each data set as regression or as
# classification, and half of the data sets want each. The coach sees the framing, and only weakly whether it was right.

BIAS = 1.5
STEPS, BATCH, RATE = 250, 64, 0.3


def trained(calibrate, bias, seed):
    """Chance of framing rightly, by kind of data set, after REINFORCE with batch-normalised scores."""
    rng = random.Random(seed)
    logits = {"regression": 0.0, "classification": 0.0}  # log-odds of framing as regression, by kind
    calibrator = Calibrator(calibrate)
    for _ in range(STEPS):
        batch = []
        for _ in range(BATCH):
            kind = rng.choice(["regression", "classification"])
            p = 1 / (1 + math.exp(-logits[kind]))
            framing = "regression" if rng.random() < p else "classification"
            score = 4.5 + (1.0 if framing == kind else 0.0) + (bias if framing == "regression" else 0.0) + rng.gauss(0, 0.5)
            batch.append((kind, framing, p, min(10.0, max(0.0, score))))
        scores = calibrator([b[3] for b in batch], [b[1] for b in batch])
        centre = mean(scores)
        spread = max(math.sqrt(mean([(s - centre) ** 2 for s in scores])), 0.5)
        for (kind, framing, p, _), score in zip(batch, scores, strict=True):
            gradient = (1 - p) if framing == "regression" else -p
            logits[kind] += RATE * (score - centre) / spread * gradient / BATCH
    chance = {kind: 1 / (1 + math.exp(-logit)) for kind, logit in logits.items()}
    return chance["regression"], 1 - chance["classification"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_biased_coach_makes_classification_fall_and_calibration_stops_it(seed):
    fair = trained("none", 0.0, seed)
    biased = trained("none", BIAS, seed)
    mended = trained("stratum", BIAS, seed)
    running = trained("running", BIAS, seed)
    assert min(fair) > 0.9
    assert biased[0] > 0.9 and biased[1] < 0.3
    assert min(mended) > 0.9
    assert min(running) > 0.9
