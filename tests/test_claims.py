"""The rules of claims, each on numbers made by hand: what comes out, partly, not, and what was not run."""

import numpy as np
import pytest

from artifact import claims, scatter
from artifact.claims import CAME_OUT, NOT, NOT_RUN, PARTLY, judge
from artifact.color import palette_rows


def numbers_of(k_max, objects=3, zero=(0, 0), samples=16, median=None):
    return {"k_max": k_max, "low": k_max - 1, "median": k_max if median is None else median, "high": k_max + 1,
            "label": str(k_max), "in_place_only": k_max + 1, "objects": objects, "samples": samples,
            "drawn_at_0": {"p5": zero[0], "p95": zero[1]}, "mean_at_0": [0.0, 0.2]}  # fmt: skip


def verdict_of(claim_id, numbers):
    return claims.judge_one(next(c for c in claims.CLAIMS if c.id == claim_id), numbers).verdict


@pytest.mark.parametrize(("k", "verdict"), [(9, CAME_OUT), (6, CAME_OUT), (5, PARTLY), (4, PARTLY), (3, NOT), (0, NOT)])
def test_reaching_rule(k, verdict):
    assert verdict_of("grid-all", {"table1": {"grid-all-m3": numbers_of(k)}}) == verdict


@pytest.mark.parametrize(("k", "verdict"), [(0, PARTLY), (1, CAME_OUT), (2, CAME_OUT), (3, PARTLY), (4, NOT)])
def test_failing_rule(k, verdict):
    assert verdict_of("grid-single", {"table2": {"grid-single-m3": numbers_of(k)}}) == verdict


def test_a_failure_that_the_interval_excludes_is_no_partly():
    """Two where one was expected: partly only if it could be one."""
    for low, verdict in ((1, PARTLY), (2, NOT)):
        found = numbers_of(2, 1) | {"low": low}
        assert verdict_of("single-object", {"table1": {"grid-all-m1": found}}) == verdict


def test_reaching_by_luck_is_only_partly():
    """Seven of eight samples at every K pass the rule, but that the true share does is unlikely for all of them."""
    assert verdict_of("local", {"table1": {"grid-single-local-m3": numbers_of(7, median=3)}}) == PARTLY
    assert verdict_of("local", {"table1": {"grid-single-local-m3": numbers_of(7, median=4)}}) == CAME_OUT


def test_drop_one_may_stay_at_its_training():
    assert verdict_of("drop-one", {"table2": {"grid-drop-one-m3": numbers_of(3)}}) == CAME_OUT
    assert verdict_of("drop-one", {"table2": {"grid-drop-one-m3": numbers_of(0)}}) == NOT


def test_what_is_in_place_is_said_where_extras_keep_k_max_lower():
    found, claim = numbers_of(3), next(c for c in claims.CLAIMS if c.id == "local")
    assert claims.judge_one(claim, {"table1": {"grid-single-local-m3": found}}).ours == "K_max 3; 4 in place"
    found["in_place_only"] = 3
    assert claims.judge_one(claim, {"table1": {"grid-single-local-m3": found}}).ours == "K_max 3"


def test_one_label_fails_at_every_m():
    tables = {"table1": {f"grid-single-m{m}": numbers_of(1 + m % 2, m) for m in (2, 3, 4)}}
    assert verdict_of("single-any", tables) == CAME_OUT
    for k, verdict in ((0, PARTLY), (3, PARTLY), (4, NOT)):
        assert verdict_of("single-any", {"table2": tables["table1"] | {"grid-single-m6": numbers_of(k, 6)}}) == verdict
    assert (
        verdict_of("single-any", {"table1": tables["table1"] | {"grid-single-m5": numbers_of(1, 5, samples=4)}})
        == PARTLY
    )
    assert verdict_of("single-any", {"table1": {"grid-single-m3": numbers_of(1)}}) == NOT_RUN
    assert verdict_of("single-any", {}) == NOT_RUN


def test_drop_one_grows_beyond_training_from_four_on():
    found = {f"grid-drop-one-m{m}": numbers_of(k, m) for m, k in ((3, 3), (4, 8), (5, 9), (6, 10))}
    assert verdict_of("more-objects-drop-one", {"table2": found}) == CAME_OUT
    assert verdict_of("more-objects-drop-one", {"table2": found | {"grid-drop-one-m4": numbers_of(4, 4)}}) == PARTLY
    assert verdict_of("more-objects-drop-one", {"table2": found | {"grid-drop-one-m6": numbers_of(3, 6)}}) == NOT


def test_few_samples_make_no_verdict():
    assert verdict_of("grid-all", {"table1": {"grid-all-m3": numbers_of(9, samples=2)}}) == PARTLY
    assert verdict_of("grid-single", {"table1": {"grid-single-m3": numbers_of(1, samples=2)}}) == PARTLY


@pytest.mark.parametrize(
    ("area", "cifar", "verdict"),
    [((0.03, 0.2, 0.01), 0.9, CAME_OUT), ((0.2, 0.2, 0.01), 0.9, PARTLY), ((0.4, 0.2, 0.01), 0.9, NOT),
     ((0.09, 0.2, 0.01), 0.1, PARTLY)],
)  # fmt: skip
def test_pixel_locality_at_high_noise_is_judged_against_cifar(area, cifar, verdict):
    high, between, low = area
    found = squares(high, low, between) | {"centre": squares(0.05, low)}
    maps = {"grid-all-m3": found, "grid-single-m3": found | {"area_high": 0.02}}
    numbers = {"fig2": maps, "fig12": squares(cifar, 0.01)}
    assert verdict_of("pixels", numbers) == verdict
    wide = maps | {"grid-single-m3": found | {"area_high": 0.9}}  # the paper says it of both models
    assert verdict_of("pixels", numbers | {"fig2": wide}) == NOT
    assert verdict_of("pixels-between", numbers) == (CAME_OUT if between > 2 * high else NOT)
    unasked = maps | {"grid-all-m3": found | {"centre": squares(0.4, low)}}  # wide where nothing is asked
    assert verdict_of("pixels", numbers | {"fig2": unasked}) == (PARTLY if verdict == CAME_OUT else verdict)
    few = {name: m | {"seeds": 3} for name, m in maps.items()}
    assert verdict_of("pixels", numbers | {"fig2": few}) in (PARTLY, NOT)
    assert verdict_of("pixels-between", numbers | {"fig2": few}) in (PARTLY, NOT)
    unmeasured = maps | {"grid-all-m3": found | {"area_low": None}}  # no noise level that low
    assert verdict_of("pixels", numbers | {"fig2": unmeasured}) == NOT_RUN


def test_rules_of_the_list_and_of_the_energy():
    grid, wide = squares(0.03, 0.0), squares(0.6, 0.0)
    cases = ((wide, CAME_OUT), (squares(0.1, 0.0), PARTLY), (squares(0.02, 0.0), NOT), (wide | {"seeds": 2}, PARTLY))
    for listed, verdict in cases:
        assert verdict_of("pixels-list", {"fig2": {"grid-all-m3": grid, "list-all-m3": listed}}) == verdict
    for low, single, verdict in ((9.0, 9.0, CAME_OUT), (9.0, 0.5, PARTLY), (0.5, 0.5, NOT), (None, 9.0, NOT_RUN)):
        maps = {"grid-all-m3": grid | {"energy_high": 1.0, "energy_low": low},
                "grid-single-m3": grid | {"energy_high": 1.0, "energy_low": single}}  # fmt: skip
        assert verdict_of("energy", {"fig2": maps}) == verdict


def squares(high, low, between=0.0, seeds=4):
    areas = {"area_high": high, "area_low": low, "area_between": between}
    return {"seeds": seeds} | areas | {f"{name}_interval": (value, value) for name, value in areas.items()}


def test_what_was_not_run_is_not_judged():
    assert {v.verdict for v in judge({})} == {NOT_RUN}


def test_a_number_that_a_step_did_not_return_is_an_error():
    """Only what was not run is "not run"."""
    with pytest.raises(KeyError):
        judge({"sdxl": {}})


def test_zero_and_order_rules():
    table = {
        "grid-all-m3": numbers_of(7),
        "grid-single-m3": numbers_of(1, zero=(0, 3)),
        "grid-random-m3": numbers_of(4),
    }
    assert verdict_of("zero-all", {"table1": table}) == CAME_OUT
    assert verdict_of("zero-single", {"table1": table}) == CAME_OUT
    assert verdict_of("random", {"table1": table}) == CAME_OUT
    assert verdict_of("zero-all", {"table1": table | {"grid-all-m3": numbers_of(7, samples=4)}}) == PARTLY
    lucky = table | {"grid-random-m3": numbers_of(4, median=1)}  # no more likely than grid-single's
    assert verdict_of("random", {"table1": lucky}) == PARTLY
    table["grid-random-m3"] = numbers_of(8)
    assert verdict_of("random", {"table1": table}) == PARTLY
    table["grid-all-m3"] = numbers_of(0, zero=(1, 2))
    assert verdict_of("zero-all", {"table1": table}) == NOT
    assert verdict_of("random", {"table1": table}) == NOT


def test_growth_rule_needs_three_models():
    some = {f"grid-all-m{m}": numbers_of(k, m) for m, k in ((1, 1), (2, 5), (3, 9))}
    assert verdict_of("more-objects", {"table1": some}) == CAME_OUT
    assert verdict_of("more-objects", {"table1": some | {"grid-all-m2": numbers_of(0, 2)}}) == PARTLY
    trained = {f"grid-all-m{m}": numbers_of(m, m) for m in (1, 2, 3)}  # grows, but nothing is beyond training
    assert verdict_of("more-objects", {"table1": trained}) == PARTLY
    lucky = some | {"grid-all-m3": numbers_of(9, 3, median=3)}  # the median falls from 5 to 3
    assert verdict_of("more-objects", {"table1": lucky}) == PARTLY
    few = {name: found | {"samples": 4} for name, found in some.items()}
    assert verdict_of("more-objects", {"table1": few}) == PARTLY
    some.pop("grid-all-m2")
    assert verdict_of("more-objects", {"table1": some}) == NOT_RUN


def test_locality_rule_wants_intervals_apart():
    a = {"conditional_locality": 0.8, "low": 0.7, "high": 0.9, "seeds": 4}
    near = {"conditional_locality": 0.75, "low": 0.7, "high": 0.8, "seeds": 4}
    far = {"conditional_locality": 0.4, "low": 0.3, "high": 0.5, "seeds": 4}
    for other, verdict in ((far, CAME_OUT), (near, PARTLY)):
        assert verdict_of("locality-list", {"fig2": {"grid-all-m3": a, "list-all-m3": other}}) == verdict
    assert verdict_of("locality-list", {"fig2": {"grid-all-m3": far, "list-all-m3": a}}) == NOT
    few = {"grid-all-m3": a | {"seeds": 2}, "list-all-m3": far}  # no interval worth its name
    assert verdict_of("locality-list", {"fig2": few}) == PARTLY


def test_scatter_rule_wants_enough_points():
    found = {"pearson": 0.9, "low": 0.5, "high": 1.0, "n": 6}

    def of(learned):  # whatever all points together say
        return verdict_of("scatter", {"scatter": {"learned": learned, "all": found}})

    assert of(found) == CAME_OUT
    assert of(found | {"n": 5}) == PARTLY
    assert of(found | {"low": -0.1}) == PARTLY
    assert of(found | {"pearson": -0.2, "low": -0.6}) == NOT
    assert of({"n": 2}) == NOT_RUN


def test_correlation_resamples_models_not_checkpoints():
    def points(model, *pairs):
        return [{"experiment": model, "conditional_locality": x, "length": y} for x, y in pairs]

    two = points("grid-all", (0.9, 4), (0.8, 3), (0.7, 3)) + points("list-all", (0.3, 0), (0.2, -1), (0.25, 0))
    found = scatter.correlate(two)
    x, y = ([p[name] for p in two] for name in ("conditional_locality", "length"))
    assert found["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert (found["n"], found["models"]) == (6, 2)
    # Only four draws of two models exist; those of one model alone have its own correlation.
    own = [np.corrcoef(x[part], y[part])[0, 1] for part in (slice(0, 3), slice(3, 6))]
    assert found["low"] == pytest.approx(min(own))
    assert "pearson" not in scatter.correlate(two[:2])
    assert "pearson" not in scatter.correlate(points("grid-all", (0.5, 1), (0.5, 2), (0.5, 3)))


@pytest.mark.parametrize(
    ("high", "low", "verdict"), [(0.6, 0.01, CAME_OUT), (0.3, 0.01, PARTLY), (0.03, 0.004, NOT), (0.6, 0.3, NOT)]
)
def test_locality_is_lost_only_if_most_of_the_image_matters(high, low, verdict):
    assert verdict_of("cifar", {"fig12": squares(high, low)}) == verdict
    assert verdict_of("cifar", {"fig12": squares(high, low, seeds=3)}) == (PARTLY if verdict == CAME_OUT else verdict)


@pytest.mark.parametrize(("feature", "image", "verdict"), [(0.1, 0.6, CAME_OUT), (0.5, 0.6, PARTLY), (0.7, 0.6, NOT)])
def test_color_feature_rule(feature, image, verdict):
    found = {"feature_space": feature, "image": image, "feature_space_interval": (0, 1), "image_interval": (0, 1)}
    assert verdict_of("color-features", {"fig5": {"color-m3": found}}) == verdict


def test_sdxl_rules():
    """A negative correlation of success and cosine is what the claim says: entangled concepts compose badly."""
    found = {"relation_spearman": -0.5, "relation_p": 0.01, "relation_interval": [-0.8, -0.1],
             "intervention_2_separate": 0.1,
             "intervention_2_separate_interval": [0.02, 0.2], "intervention_2_mask": 0.3,
             "intervention_2_mask_interval": [0.2, 0.4]}  # fmt: skip
    assert verdict_of("sdxl-relation", {"sdxl": found}) == CAME_OUT
    assert verdict_of("sdxl-relation", {"sdxl": found | {"relation_p": 0.2}}) == PARTLY
    assert verdict_of("sdxl-relation", {"sdxl": found | {"relation_spearman": 0.5}}) == NOT
    assert verdict_of("sdxl-local", {"sdxl": found}) == CAME_OUT
    worse = found | {"intervention_2_separate": -0.1, "intervention_2_separate_interval": [-0.2, 0.0]}
    assert verdict_of("sdxl-local", {"sdxl": worse}) == NOT  # whatever the other mode gives


def test_theory_claims_can_fail():
    good = {"lemma1_error": 1e-14, "lemma1_other": 1.0, "background_coupled": 0.5, "background_uncoupled": 1e-15,
            "lemma2_slack": 0.0, "claim1_falls": True, "claim1_slope_error": 1e-12, "lemma3_falls": True,
            "corollary1_error": 1e-14, "corollary1_pixels": 1.0, "claim2_holds": False, "claim2_names": ["a"],
            "claim2_falls_beyond": [None], "claim2_largest": [1.0]}  # fmt: skip
    assert verdict_of("lemma-1", {"theory": good}) == CAME_OUT
    assert verdict_of("lemma-1", {"theory": good | {"lemma1_error": 1e-3}}) == NOT
    assert verdict_of("lemma-2", {"theory": good | {"lemma2_slack": -0.1}}) == NOT
    assert verdict_of("claim-1", {"theory": good | {"claim1_slope_error": 0.1}}) == PARTLY
    assert verdict_of("claim-2", {"theory": good}) == NOT


def test_every_claim_states_its_rule():
    assert len({c.id for c in claims.CLAIMS}) == len(claims.CLAIMS)
    for claim in claims.CLAIMS:
        assert claim.rule and claim.paper and claim.claim  # noqa: PT018


def test_palette_looks_at_samples_with_the_right_number_of_objects():
    rows = [
        {"k": 0, "in_place": [0] * 4, "extras": [0] * 4},
        {"k": 1, "in_place": [1, 0, 1, 0], "extras": [0, 1, 2, 0]},
        {"k": 2, "in_place": [2, 1, 1, 2], "extras": [0, 1, 0, 0]},
        {"k": 3, "in_place": [0] * 4, "extras": [0] * 4},
        {"k": 4, "in_place": [4] * 4, "extras": [0] * 4},
    ]
    found = palette_rows([("color-m3", {"rows": rows, "objects": 3})])
    assert [(r["K"], r["right number"], r["each colour once"], r["share"]) for r in found] == [
        (1, 2, 1, "50%"), (2, 3, 2, "67%"), (3, 0, 0, "")
    ]  # fmt: skip
    assert [r["on their own"] for r in found] == ["100%", "50%", "22%"]
