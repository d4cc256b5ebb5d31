"""K_max and its parts against independent truth: brute force, closed forms, hand-made counts."""

import json
from itertools import permutations
from math import sqrt

import numpy as np
import pytest
from tiny import tiny_run

from lcs import evaluation, rule, weights
from lcs.counter.data import render_split
from lcs.counter.detector import Counter, Detector, Thresholds
from lcs.counter.matching import pairs_within
from lcs.errors import LcsError
from lcs.evaluation import evaluate_all, evaluate_run, summary_rows, to_markdown
from lcs.experiments import EXPERIMENTS, TEST_LOCATIONS, get_run
from lcs.model.build import build_model
from lcs.rule import (
    KRow,
    Match,
    k_max,
    k_max_interval,
    make_row,
    match,
    match_colors,
    spread,
    success,
    summarise,
    wilson,
)  # fmt: skip

# ---- matching -------------------------------------------------------------------------------------


def brute_force(asked, drawn, tolerance):
    """Most pairs within the tolerance, then the smallest total distance, over all assignments."""
    if len(asked) > len(drawn):
        asked, drawn = drawn, asked
    best = (0, 0.0)
    for chosen in permutations(range(len(drawn)), len(asked)):
        distances = [np.linalg.norm(asked[i] - drawn[j]) * 16 for i, j in enumerate(chosen)]
        inside = [d for d in distances if d <= tolerance]
        best = max(best, (len(inside), -sum(inside)))
    return best[0], -best[1]


@pytest.mark.parametrize("seed", range(40))
def test_hungarian_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    asked, drawn = rng.random((rng.integers(1, 6), 2)) * 0.4, rng.random((rng.integers(1, 6), 2)) * 0.4
    tolerance = rng.uniform(0.5, 3)
    rows, cols = pairs_within(asked, drawn, tolerance)
    assert len(set(rows)) == len(rows)
    assert len(set(cols)) == len(cols)
    count, total = brute_force(asked, drawn, tolerance)
    assert len(rows) == count
    assert np.sum(np.linalg.norm(asked[rows] - drawn[cols], axis=1) * 16) == pytest.approx(total)
    assert match(asked, drawn, tolerance) == Match(count, len(drawn) - count)


def test_matching_prefers_more_pairs_to_the_nearest_pair():
    # The nearest pair is (0, 0), but taking it leaves the others without a partner.
    asked, drawn = np.array([[0.50, 0.5], [0.58, 0.5]]), np.array([[0.51, 0.5], [0.43, 0.5]])
    assert match(asked, drawn, 1.5) == Match(2, 0)


def test_matching_of_nothing():
    some = np.array([[0.5, 0.5]])
    assert match(np.zeros((0, 2)), some) == Match(0, 1)
    assert match(some, np.zeros((0, 2))) == Match(0, 0)
    assert match([], []) == Match(0, 0)
    with pytest.raises(LcsError, match="tolerance"):
        match(some, some, 0.0)


def test_tolerance_is_in_cells():
    asked = np.array([[0.5, 0.5]])
    assert match(asked, asked + [[1.49 / 16, 0]], 1.5) == Match(1, 0)
    assert match(asked, asked + [[1.51 / 16, 0]], 1.5) == Match(0, 1)


def test_tolerance_keeps_test_locations_apart():
    points = np.array(TEST_LOCATIONS)
    nearest = min(np.linalg.norm(points[i] - points[j]) for i in range(12) for j in range(i)) * 16
    assert nearest == pytest.approx(0.1 * sqrt(2) * 16)
    assert nearest > rule.TOLERANCE_CELLS


def test_colors_are_a_multiset():
    assert match_colors(["blue", "red"], ["red", "red", "blue", "gray"]) == Match(2, 2)
    assert match_colors(["blue", "blue"], ["blue"]) == Match(1, 0)
    assert match_colors([], ["blue"]) == Match(0, 1)


# ---- the rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "trained", "in_place", "extras", "allowed", "passes", "strict"),
    [
        (3, 3, [3] * 32, [0] * 32, 0, True, True),
        (3, 3, [3] * 28 + [2] * 4, [0] * 32, 0, True, False),  # 28 of 32 is 7/8
        (3, 3, [3] * 27 + [2] * 5, [0] * 32, 0, False, False),
        (3, 3, [3] * 32, [0] * 27 + [1] * 5, 0, False, False),  # an extra object is not "exactly K"
        (3, 3, [3] * 32, [2] * 32, 2, True, True),  # ... unless the conditioner leaves objects unlabelled
        (3, 3, [3] * 32, [3] * 32, 2, False, False),  # but not more than that: a full image is no success
        (1, 3, [0] * 32, [1] * 32, 2, False, False),  # one object, but elsewhere
        (4, 3, [4] * 9 + [2] * 23, [0] * 32, 0, True, True),  # more than 25% complete, the rest K - 2
        (4, 3, [4] * 8 + [2] * 24, [0] * 32, 0, False, False),  # exactly 25% is not more
        (4, 3, [4] * 9 + [2] * 19 + [1] * 4, [0] * 32, 0, True, False),  # "always" K - 2: 28 of 32
        (4, 3, [4] * 9 + [2] * 18 + [1] * 5, [0] * 32, 0, False, False),
        (4, 3, [4] * 32, [1] * 24 + [0] * 8, 0, False, False),  # all in place, but 24 with an extra one
        (2, 1, [2] * 9 + [0] * 23, [0] * 32, 0, True, True),  # K - 2 = 0 is no demand at K = 2
        (9, 3, [9] * 3 + [7] * 5, [0] * 8, 0, True, True),  # 8 samples, as the paper: 3 of 8 is over 25%
        (9, 3, [9] * 2 + [7] * 6, [0] * 8, 0, False, False),
    ],
)
def test_success_rule(k, trained, in_place, extras, allowed, passes, strict):
    assert success(k, trained, in_place, extras, allowed) is passes
    assert success(k, trained, in_place, extras, allowed, always=1.0) is strict


def test_success_refuses_nonsense():
    with pytest.raises(LcsError, match="K >= 1"):
        success(0, 3, [0], [0])
    with pytest.raises(LcsError, match="at least one"):
        success(1, 3, [], [])
    with pytest.raises(LcsError, match="same samples"):
        success(1, 3, [1, 1], [0])


def test_k_max_stops_at_the_first_failure():
    assert k_max({1: True, 2: True, 3: False, 4: True}) == 2
    assert k_max({1: False, 2: True}) == 0
    assert k_max({2: True}) == 0  # K = 1 not tested
    assert k_max({}) == 0
    assert k_max({k: True for k in range(1, 13)}) == 12


def test_wilson_against_known_values():
    # Closed form at the ends: 0 of n reaches z^2 / (n + z^2); R's prop.test(x, n, correct = FALSE) otherwise.
    z2 = 1.959964**2
    assert wilson(0, 32) == (0.0, pytest.approx(z2 / (32 + z2)))
    assert wilson(32, 32) == (pytest.approx(32 / (32 + z2)), 1.0)
    assert wilson(5, 10) == (pytest.approx(0.2365931, abs=1e-6), pytest.approx(0.7634069, abs=1e-6))
    assert wilson(1, 10) == (pytest.approx(0.0178762, abs=1e-6), pytest.approx(0.4041500, abs=1e-6))
    # The interval's ends are the proportions whose score test is exactly at z.
    low, high = wilson(9, 32)
    for p in (low, high):
        assert abs(9 / 32 - p) / sqrt(p * (1 - p) / 32) == pytest.approx(1.959964)
    for bad in ((-1, 3), (4, 3), (0, 0)):
        with pytest.raises(LcsError, match="not possible"):
            wilson(*bad)


def test_spread_gives_values_that_occur():
    assert spread([0] * 31 + [7]) == {"min": 0, "max": 7, "p5": 0, "p95": 0}
    assert spread([0, 1, 2, 3] * 8) == {"min": 0, "max": 3, "p5": 0, "p95": 3}
    assert spread([2]) == {"min": 2, "max": 2, "p5": 2, "p95": 2}


# ---- runs -----------------------------------------------------------------------------------------


def row(k: int, trained: int, matches: list[Match], allowed: bool = False) -> KRow:
    return make_row(k, trained, matches, [0] * len(matches), allowed)


def test_summary_of_a_hand_made_run():
    run = get_run("grid-single", 3, "mini")
    rows = [
        row(0, 3, [Match(0, n % 4) for n in range(32)], 2),
        row(1, 3, [Match(1, n % 3) for n in range(32)], 2),
        row(2, 3, [Match(2, 3)] * 5 + [Match(2, 2)] * 27, 2),  # five of 32 with an object too many
        row(3, 3, [Match(3, 0)] * 32, 2),  # cannot rescue K = 2
        row(4, 3, [Match(2, 0)] * 25 + [Match(4, 9)] * 7, 2),  # too seldom all four
    ]
    result = summarise(run, rows, 2, {}, 1.0)
    assert (result.k_max, result.k_max_strict, result.k_max_in_place, result.k_tested) == (1, 1, 3, 4)
    assert result.label == "1 +(0-2)"
    assert result.drawn_at_0 == {"min": 0, "max": 3, "p5": 0, "p95": 3}
    table = to_markdown(summary_rows([json.loads(json.dumps(result.to_json())), {"run": "x-m2", "missing": "none"}]))
    assert "| grid-single-m3 | 1-3 | 1 +(0-2) | 1 | 3 | 0-3 |" in table
    assert "| x-m2 |  | missing |" in table
    part = summarise(run, rows[2:], 2, {}, 1.0)  # K = 1 was not tested: there is no K_max
    assert part.k_max is None
    assert part.label == "not tested"


def test_extras_are_as_many_as_training_leaves_out():
    assert rule.allowed_extras(get_run("grid-all", 3, "mini")) == 0
    assert rule.allowed_extras(get_run("grid-single", 3, "mini")) == 2
    assert rule.allowed_extras(get_run("grid-single-local", 1, "mini")) == 0
    assert rule.allowed_extras(get_run("grid-drop-one", 6, "mini")) == 1


def test_every_conditioner_says_whether_it_labels_all():
    assert {e.conditioner for e in EXPERIMENTS.values()} - {"none"} == set(rule.LABELS_ALL)


class Oracle(Counter):
    """A counter that is told the truth."""

    def __init__(self, detections):
        super().__init__(Detector(), Thresholds(0.3, 0.5))
        object.__setattr__(self, "detections", detections)

    def candidates(self, images, chunk=64):
        return self.detections[: len(images)]


def test_evaluate_run_counts_smears_as_nothing(monkeypatch):
    from lcs.counter.detector import Detections

    places = np.array(TEST_LOCATIONS[:2], np.float32)
    ints, quality = np.zeros(2, np.int64), np.array([0.9, 0.2], np.float32)
    seen = Detections(places, np.zeros((2, 4), np.float32), ints, ints, ints, ints, np.ones(2, np.float32), quality)
    monkeypatch.setattr(evaluation, "sample_rgb", lambda *a, **k: np.zeros((len(a[3]), 8, 8, 3), np.uint8))
    shown = []
    result = evaluate_run(
        tiny_run("grid-all"), None, [2, 1, 0], 3, progress=False, counter=Oracle([seen] * 3),
        on_images=lambda k, images, objects: shown.append((k, len(images), [len(o) for o in objects])),
    )  # fmt: skip
    assert [r.k for r in result.rows] == [0, 1, 2]
    assert shown == [(k, 3, [1, 1, 1]) for k in range(3)]
    assert [r.in_place for r in result.rows] == [[0] * 3, [1] * 3, [1] * 3]
    assert [r.extras for r in result.rows] == [[1] * 3, [0] * 3, [0] * 3]
    assert result.rows[0].smears == [1, 1, 1]
    assert (result.rows[0].passed, result.rows[1].passed, result.rows[2].passed) == (None, True, False)
    assert result.k_max == 1


@pytest.mark.parametrize("experiment", ["grid-single", "color"])
def test_evaluate_run_end_to_end(experiment):
    run = tiny_run(experiment)
    counter = Counter(Detector().eval(), Thresholds(0.5, 0.5))
    model = build_model(run).eval()
    once = evaluate_run(run, model, [0, 2], 2, steps=2, progress=False, counter=counter, seed=5)
    again = evaluate_run(run, model, [0, 2], 2, steps=2, progress=False, counter=counter, seed=5)
    assert [r.extras for r in once.rows] == [r.extras for r in again.rows]
    assert json.loads(json.dumps(once.to_json()))["settings"]["samples"] == 2
    with pytest.raises(LcsError, match="K = 13"):
        evaluate_run(run, model, [13], 2, progress=False, counter=counter)
    with pytest.raises(LcsError, match="at least one sample"):
        evaluate_run(run, model, [1], 0, progress=False, counter=counter)


def test_unconditional_models_have_no_k_max():
    with pytest.raises(LcsError, match="no conditions"):
        evaluate_run(get_run("cifar10", 0, "mini"), None, progress=False)


def test_evaluate_all_names_missing_weights(monkeypatch, tmp_path):
    monkeypatch.setattr(evaluation, "load_counter", lambda root: None)
    results = evaluate_all("mini", ["grid-all", "list-all"], root=tmp_path, progress=False)
    assert {r["run"] for r in results} == {f"grid-all-m{m}" for m in range(1, 7)} | {"list-all-m3"}
    assert all("missing" in r for r in results)
    few = evaluate_all("mini", ["grid-all", "grid-single-local"], root=tmp_path, progress=False, objects=1)
    assert {r["run"] for r in few} == {"grid-all-m1", "grid-single-local-m1"}
    with pytest.raises(LcsError, match=r"no such run on 1\.\.2 objects"):
        evaluate_all("mini", ["list-all"], root=tmp_path, objects=2)
    with pytest.raises(LcsError, match="unknown experiment"):
        evaluate_all("mini", ["grid-none"], root=tmp_path)


def test_what_a_store_holds_is_not_sampled_again(monkeypatch, tmp_path):
    store, sampled = tmp_path / "kept.json", []

    def instead(run, model, ks, samples, *_):
        sampled.append((run.name, samples))
        if run.name == "list-all-m3" and len(sampled) < 3:
            raise KeyboardInterrupt
        return evaluation.summarise(run, [make_row(1, 3, [Match(1, 0)] * samples, [0] * samples, 0)], 0, {}, 1.0)

    monkeypatch.setattr(evaluation, "evaluate_run", instead)
    ask = {"experiments": ["list-all", "grid-all"], "objects": 3, "ks": [1], "store": store, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        evaluate_all("mini", samples=2, **ask)
    assert sampled == [("grid-all-m3", 2), ("list-all-m3", 2)]
    results = evaluate_all("mini", samples=2, **ask)
    assert sampled[2:] == [("list-all-m3", 2)]  # the first was kept
    assert [r["run"] for r in results] == ["grid-all-m3", "list-all-m3"]
    assert evaluate_all("mini", samples=2, **ask) == json.loads(json.dumps(results))
    assert len(sampled) == 3
    evaluate_all("mini", samples=3, **ask)
    assert len(sampled) == 5
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(LcsError, match="does not hold results"):
        evaluate_all("mini", **(ask | {"store": tmp_path / "other.json"}))
    with pytest.raises(LcsError, match="cannot write"):
        evaluate_all("mini", **(ask | {"store": tmp_path / "other.json" / "under.json"}))


def test_stored_results_are_of_the_shipped_weights(monkeypatch, tmp_path):
    """Else: `lcs evaluate NAME --store weights/evaluated.json` for what was trained anew, and its row in the README."""
    sampled = []

    def instead(run, *_):
        sampled.append(run.name)
        raise LcsError("not sampled here")

    monkeypatch.setattr(evaluation, "evaluate_run", instead)
    store = tmp_path / "copy.json"
    store.write_bytes((weights.WEIGHTS / "evaluated.json").read_bytes())
    standard = [e.name for e in EXPERIMENTS.values() if not e.local and e.conditioner != "none"]
    results = evaluate_all("mini", standard, samples=32, steps=20, solver="dpmpp_2m", store=store, progress=False)
    assert sampled == []
    shown = (weights.WEIGHTS / "README.md").read_text()
    assert [r["run"] for r in results if f"| `{r['run']}` | {r['label']} | {r['k_max_in_place']} |" not in shown] == []


def test_true_scenes_pass_their_own_test():
    """Truth from the renderer: rendered scenes matched with their own locations are complete, shipped counter."""
    counter = evaluation.load_counter(weights.WEIGHTS)
    data = render_split("test", [4000 + i for i in range(26) if (4000 + i) % 13 in (1, 2, 3, 4)])
    matches = [
        match(data.table.locations[n, : data.table.counts[n]], d.centers) for n, d in enumerate(counter(data.images))
    ]
    right = [m == Match(int(c), 0) for m, c in zip(matches, data.table.counts, strict=True)]
    assert sum(right) >= len(right) - 1
    assert sum(m.in_place for m in matches) >= data.table.counts.sum() - 1


# ---- the interval of K_max ------------------------------------------------------------------------


def rows_with(shares, n=32):
    """Row K has the given share of complete samples; the others miss everything."""
    rows = []
    for k, share in enumerate(shares, 1):
        complete = round(share * n)
        matches = [Match(k, 0)] * complete + [Match(0, 0)] * (n - complete)
        rows.append(make_row(k, 3, matches, [0] * n, False))
    return rows


def test_interval_is_a_point_when_many_samples_agree():
    assert k_max_interval(rows_with([1, 1, 1, 1, 0, 1]), 3, False) == (4, 4, 4)
    assert k_max_interval(rows_with([0, 1]), 3, False) == (0, 0, 0)
    assert k_max_interval(rows_with([1] * 12), 3, False) == (12, 12, 12)


def test_interval_is_wide_when_few_samples_agree():
    low, _, high = k_max_interval(rows_with([1, 1, 1, 1, 0], n=2), 3, False)
    assert low < 2
    assert high >= 4


def test_interval_holds_k_max_and_widens_at_the_threshold():
    rows = rows_with([1, 1, 28 / 32, 1, 0])  # exactly 7/8: half of the draws fail at 3
    low, _, high = k_max_interval(rows, 3, False)
    assert (low, high) == (2, 4)
    assert low <= k_max({row.k: row.passed for row in rows}) <= high


def test_interval_stops_where_a_k_was_not_tested():
    rows = [row for row in rows_with([1, 1, 1, 1, 1]) if row.k != 3]
    assert k_max_interval(rows, 3, False) == (2, 2, 2)
