"""The artifact's runner on tiny random models: caching, missing and damaged weights, kills; and the rules of claims."""

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tiny import SCALE
from typer.testing import CliRunner

from artifact import ahead, claims, registry, runner, steps
from artifact.claims import CAME_OUT, NOT, NOT_RUN, PARTLY, judge
from artifact.context import Context
from artifact.runner import run_artifact
from artifact.steps import Effort
from lcs import experiments, weights
from lcs.bench.compute import single_thread
from lcs.cli import app
from lcs.data.files import write_json
from lcs.errors import LcsError
from lcs.experiments import get_run
from lcs.model.build import build_model, trained_network
from lcs.training import checkpoint
from lcs.training.trainer import run_settings

RUNS = (("grid-all", 3), ("grid-single", 3), ("grid-single-local", 3), ("grid-all", 1), ("color", 3), ("cifar10", 0))


def ship(run, root, folder, seed=0, stage="late"):
    """Random weights whose output is not just the input, as if trained."""
    torch.manual_seed(seed)
    network = trained_network(build_model(run))
    with torch.no_grad():
        network.unet.out_gain.fill_(0.5)
        for name, p in network.named_parameters():
            if name.endswith("emb_gain"):
                p.fill_(0.3)
    meta = {"samples": 64, "ema_std": 0.05}
    checkpoint.save_tensors(folder / f"{stage}.safetensors", network.state_dict(), meta)
    write_json(folder / "run.json", run_settings(run, 0))
    return weights.export(run, folder, stage, root)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """A folder of weights at a scale "tiny"; the counter stays the shipped one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(experiments.SCALES, "tiny", SCALE)
        root = tmp_path_factory.mktemp("weights")
        for name, objects in RUNS:
            run = get_run(name, objects, "tiny")
            ship(run, root, tmp_path_factory.mktemp("run"))
        yield root


@pytest.fixture
def tiny(monkeypatch, shipped):
    monkeypatch.setitem(experiments.SCALES, "tiny", SCALE)
    monkeypatch.setitem(steps.EFFORTS, "quick", Effort("quick", 2, 1, "heun", 2, 2, 2, 2, 0.1))
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 1)  # other processes would take longer to start than to count
    return shipped


def run_tiny(out, root, only=None, **options):
    return run_artifact(out, "tiny", "quick", only, root=root, **options)


# ---- the runner -----------------------------------------------------------------------------------


def test_working_ahead_in_processes_gives_the_same(tmp_path, tiny, monkeypatch, capsys):
    with single_thread():  # as each of the processes: several threads round differently
        run_tiny(tmp_path / "alone", tiny, "fig4,fig2")
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 2)
    run_tiny(tmp_path / "together", tiny, "fig4,fig2")
    assert re.search(r"\d+ jobs in 2 processes", capsys.readouterr().out)
    alone, together = (sorted((tmp_path / name / "counts").glob("*/k*.json")) for name in ("alone", "together"))
    assert len(alone) == 13  # K = 0..12 of grid-all-m1; the local one is not there
    assert [p.parts[-2:] for p in alone] == [p.parts[-2:] for p in together]
    for a, b in zip(alone, together, strict=True):
        assert json.loads(a.read_text())["rows"] == json.loads(b.read_text())["rows"]
    alone, together = (sorted((tmp_path / name / "traces").glob("*.safetensors")) for name in ("alone", "together"))
    assert [p.name for p in alone] == [p.name for p in together] != []
    for a, b in zip(alone, together, strict=True):
        a, b = load_file(a), load_file(b)
        assert all(np.allclose(a[name], b[name], rtol=1e-4, atol=1e-6) for name in a)
    run_tiny(tmp_path / "together", tiny, "fig4,fig2")  # nothing is left to do
    assert "jobs in" not in capsys.readouterr().out


def test_a_killed_count_goes_on_with_the_k_that_are_missing(tmp_path, tiny, monkeypatch):
    run_tiny(tmp_path, tiny, "fig4")
    rows = sorted((tmp_path / "counts").glob("*/k*.json"))
    whole = json.loads((tmp_path / "results.json").read_text())["steps"]["fig4"]["numbers"]
    rows[3].unlink()
    (tmp_path / "fig4" / "step.json").unlink()
    drawn = []
    count = Context.count
    monkeypatch.setattr(Context, "count", lambda self, c, k, model=None: drawn.append(k) or count(self, c, k, model))
    run_tiny(tmp_path, tiny, "fig4")
    assert drawn == [3]
    assert json.loads((tmp_path / "results.json").read_text())["steps"]["fig4"]["numbers"] == whole


def test_a_step_that_stands_alone_is_drawn_beside_the_others(tmp_path, tiny, monkeypatch):
    sdxl = next(step for step in registry.STEPS if step.alone)
    fig4 = next(step for step in registry.STEPS if step.name == "fig4")
    settings = runner.check_settings(tmp_path, "tiny", "quick", "weights", None, "cpu", 0, tiny)
    jobs = ahead.find_jobs(settings, [fig4, sdxl], runner.draw_alone)
    assert jobs[0].arguments == (sdxl.name, settings)  # the longest first
    assert jobs[0].work is runner.draw_alone
    assert [job.seconds for job in jobs] == sorted((job.seconds for job in jobs), reverse=True)


def test_everything_is_drawn_and_reported(tmp_path, tiny, capsys, monkeypatch):
    cheap = [s for s in registry.STEPS if s.name not in ("theory", "sdxl")]
    monkeypatch.setattr(runner, "STEPS", cheap)
    complete = run_tiny(tmp_path / "out", tiny, keep=tmp_path / "small")
    assert not complete  # most runs of the tables are not there
    out = capsys.readouterr().out
    assert "missing: tiny/list-all-m3/late" in out
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(results["steps"]) | set(results["failures"]) == {s.name for s in cheap}
    assert set(results["failures"]) <= {"scatter"}  # needs three checkpoints with stages
    report = (tmp_path / "out" / "report.html").read_text()
    assert report.count("data:image/png;base64,") == sum(len(s["figures"]) for s in results["steps"].values())
    assert not re.search(r"(src|href)='(?!data:|#)", report)  # self-contained
    assert report.count("<figure") == report.count("</figure>") > 0
    assert report.count("<table") == report.count("</table>") > 0
    for name, step in results["steps"].items():
        for figure in step["figures"]:
            assert (tmp_path / "out" / name / figure["file"]).exists()
            assert (tmp_path / "out" / name / figure["file"]).with_suffix(".pdf").exists()
            assert f"--only {name}" in report
        for table in step["tables"]:
            assert (tmp_path / "out" / name / table["file"]).with_suffix(".csv").exists()
    kept = json.loads((tmp_path / "small" / "figures.json").read_text())
    assert all((tmp_path / "small" / item["file"]).exists() for item in kept)
    assert len(json.loads((tmp_path / "small" / "claims.json").read_text())) == len(claims.CLAIMS)


def test_unchanged_steps_are_not_drawn_again(tmp_path, tiny, capsys):
    run_tiny(tmp_path, tiny, "fig4")
    first = (tmp_path / "fig4" / "fig4.png").stat().st_mtime_ns
    run_tiny(tmp_path, tiny, "fig4")
    assert "unchanged" in capsys.readouterr().out
    assert (tmp_path / "fig4" / "fig4.png").stat().st_mtime_ns == first
    run_tiny(tmp_path, tiny, "fig4", seed=1)
    assert (tmp_path / "fig4" / "fig4.png").stat().st_mtime_ns != first


def test_other_weights_make_a_step_stale(tmp_path, tiny, capsys):
    root = tmp_path / "weights"
    run = get_run("grid-all", 1, "tiny")
    ship(run, root, tmp_path / "a")
    run_tiny(tmp_path / "out", root, "fig4")
    ship(run, root, tmp_path / "b", seed=5)
    capsys.readouterr()
    run_tiny(tmp_path / "out", root, "fig4")
    assert "unchanged" not in capsys.readouterr().out


def test_counts_are_shared_between_steps(tmp_path, tiny, monkeypatch):
    run_tiny(tmp_path, tiny, "fig8")
    import artifact.context as context

    def fail(*args, **kwargs):
        raise AssertionError("sampled again")

    monkeypatch.setattr(context, "evaluate_run", fail)
    (tmp_path / "fig8" / "step.json").unlink()  # the figure must be drawn again, from the stored counts
    run_tiny(tmp_path, tiny, "fig4,fig8")
    assert json.loads((tmp_path / "results.json").read_text())["failures"] == {}


def test_a_step_that_fails_leaves_the_old_result_and_the_others_run(tmp_path, tiny, monkeypatch, capsys):
    run_tiny(tmp_path, tiny, "fig4,fig9")
    old = (tmp_path / "fig4" / "fig4.png").read_bytes()

    def half(context):
        context.folder.mkdir(parents=True)
        (context.folder / "fig4.png").write_text("half")
        raise RuntimeError("stopped in the middle")

    broken = [replace(s, make=half) if s.name == "fig4" else s for s in registry.STEPS]
    monkeypatch.setattr(runner, "STEPS", broken)
    assert not run_tiny(tmp_path, tiny, "fig4,fig9", seed=3)
    assert (tmp_path / "fig4" / "fig4.png").read_bytes() == old
    assert "stopped in the middle" in capsys.readouterr().out
    assert (tmp_path / "fig9" / "fig9.png").exists()


def test_damaged_weights_stop_it_before_anything_is_drawn(tmp_path, tiny):
    root = tmp_path / "weights"
    path = ship(get_run("grid-all", 1, "tiny"), root, tmp_path / "run")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(LcsError, match="does not match its sha256"):
        run_tiny(tmp_path / "out", root, "fig4")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "fig99"], "unknown step 'fig99'"),
        (["--only", " , "], "names no step"),
        (["--effort", "heroic"], "unknown effort"),
        (["--scale", "giant"], "unknown scale"),
        (["--from", "thin air"], "choose weights or train"),
        (["--samples", "0"], "not possible"),
        (["--device", "abacus"], "cannot be used"),
        (["--out", "/proc/nowhere"], "cannot write"),
    ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["artifact", "--only", "fig9", *arguments])
    assert isinstance(result.exception, LcsError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_missing_checkpoints_are_trained_if_asked_to(tmp_path, tiny, monkeypatch):
    trained = []

    def fake_trainer(out, stage, root, data, cifar, seed, cpu):
        return lambda run: trained.append(run.name) or ship(run, root, tmp_path / f"run-{run.name}", stage=stage)

    monkeypatch.setattr(runner, "trainer", fake_trainer)
    assert run_tiny(tmp_path / "out", tmp_path / "empty", "fig4", source="train")
    assert trained == ["grid-all-m1", "grid-single-local-m1"]
    assert (tmp_path / "out" / "fig4" / "fig4.png").exists()


def test_a_step_depends_on_the_files_it_imports():
    names = {
        s.name: {p.name for p in runner.imported_here(Path(inspect.getsourcefile(s.make)))} for s in registry.STEPS
    }
    assert names["sdxl"] == {"sdxl.py", "context.py", "steps.py"}  # its minutes are not lost with a label elsewhere
    assert {"cifar.py", "locality.py", "tables.py", "paper.py", "plots.py"} <= names["fig12"]  # through locality.py
    assert not {"claims.py", "rules.py", "report.py", "runner.py"} & set.union(*names.values())  # they only look


# ---- claims ---------------------------------------------------------------------------------------


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
    found = squares(high, low, between)
    maps = {"grid-all-m3": found, "grid-single-m3": found | {"area_high": 0.02}}
    numbers = {"fig2": maps, "fig12": squares(cifar, 0.01)}
    assert verdict_of("pixels", numbers) == verdict
    wide = maps | {"grid-single-m3": found | {"area_high": 0.9}}  # the paper says it of both models
    assert verdict_of("pixels", numbers | {"fig2": wide}) == NOT
    assert verdict_of("pixels-between", numbers) == (CAME_OUT if between > 2 * high else NOT)
    few = {name: m | {"seeds": 3} for name, m in maps.items()}
    assert verdict_of("pixels", numbers | {"fig2": few}) in (PARTLY, NOT)
    assert verdict_of("pixels-between", numbers | {"fig2": few}) in (PARTLY, NOT)
    unmeasured = maps | {"grid-all-m3": found | {"area_low": None}}  # no noise level that low
    assert verdict_of("pixels", numbers | {"fig2": unmeasured}) == NOT_RUN


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
    table["grid-random-m3"] = numbers_of(8)
    assert verdict_of("random", {"table1": table}) == PARTLY
    table["grid-all-m3"] = numbers_of(0, zero=(1, 2))
    assert verdict_of("zero-all", {"table1": table}) == NOT
    assert verdict_of("random", {"table1": table}) == NOT


def test_growth_rule_needs_three_models():
    some = {f"grid-all-m{m}": numbers_of(k, m) for m, k in ((1, 1), (2, 5), (3, 9))}
    assert verdict_of("more-objects", {"table1": some}) == CAME_OUT
    assert verdict_of("more-objects", {"table1": some | {"grid-all-m2": numbers_of(0, 2)}}) == PARTLY
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
    assert verdict_of("scatter", {"scatter": found}) == CAME_OUT
    assert verdict_of("scatter", {"scatter": found | {"n": 5}}) == PARTLY
    assert verdict_of("scatter", {"scatter": found | {"low": -0.1}}) == PARTLY
    assert verdict_of("scatter", {"scatter": found | {"pearson": -0.2, "low": -0.6}}) == NOT
    assert verdict_of("scatter", {"scatter": {"n": 2}}) == NOT_RUN


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
    assert np.unique([s.name for s in registry.STEPS]).size == len(registry.STEPS)
