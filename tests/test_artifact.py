"""The artifact's runner on tiny random models: caching, missing and damaged weights, kills; and the rules of claims."""

import inspect
import json
import os
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
from artifact.context import Context
from artifact.locality import SECONDS
from artifact.runner import run_artifact
from artifact.steps import Effort
from lcs import evaluation, experiments, weights
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
        assert all(np.allclose(a[name], b[name], rtol=1e-4, atol=1e-6) for name in a if name != SECONDS)
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
    monkeypatch.setattr(Context, "count", lambda self, c, k, *with_: drawn.append(k) or count(self, c, k, *with_))
    run_tiny(tmp_path, tiny, "fig4")
    assert drawn == [3]
    assert json.loads((tmp_path / "results.json").read_text())["steps"]["fig4"]["numbers"] == whole


def test_a_step_is_drawn_when_all_it_shows_is_there_and_what_most_hangs_on_comes_first(tmp_path, tiny):
    sdxl, fig4, fig2 = (next(s for s in registry.STEPS if s.name == name) for name in ("sdxl", "fig4", "fig2"))
    settings = runner.check_settings(tmp_path, "tiny", "quick", "weights", None, "cpu", 0, tiny)
    jobs = ahead.find_jobs(settings, [fig4, fig2, sdxl], runner.draw_ahead)
    by_title = {job.title: job for job in jobs}
    assert jobs[0].arguments == (sdxl.name, settings)  # the longest, and it waits for nothing
    assert jobs[0].work is runner.draw_ahead
    assert not jobs[0].after
    assert by_title["fig4"].after == {title for title in by_title if "K = " in title}
    assert by_title["fig2"].after == {title for title in by_title if "locality" in title}
    for step in ("fig4", "fig2"):
        assert by_title[step].after
        assert all(jobs.index(by_title[title]) < jobs.index(by_title[step]) for title in by_title[step].after)


def test_jobs_wait_for_what_they_want_and_a_step_with_nothing_beside_it_is_left(tmp_path, tiny, monkeypatch, capsys):
    made, used, drawn = tmp_path / "made", tmp_path / "used", tmp_path / "drawn"
    use = ahead.Job("use", 9.0, os.rename, (made, used), frozenset({"make"}))  # fails if it comes before
    step = ahead.Job("step", 5.0, Path.mkdir, (drawn,), frozenset({"use"}), draws=True)
    make = ahead.Job("make", 1.0, Path.mkdir, (made,))
    settings = runner.check_settings(tmp_path, "tiny", "quick", "weights", None, "cpu", 0, tiny)
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(ahead, "find_jobs", lambda *_: [use, step, make])
    ahead.work_ahead(settings, [], runner.draw_ahead)
    assert used.is_dir()
    assert not drawn.exists()
    waits = ahead.Job("waits", 1.0, used.rename, (made,), frozenset({"step"}))
    monkeypatch.setattr(ahead, "find_jobs", lambda *_: [step, waits])
    ahead.work_ahead(settings, [], runner.draw_ahead)
    assert drawn.is_dir()
    assert made.is_dir()
    dies = ahead.Job("dies", 1.0, os._exit, (1,))
    monkeypatch.setattr(ahead, "find_jobs", lambda *_: [dies, waits])
    ahead.work_ahead(settings, [], runner.draw_ahead)
    assert "a process was killed" in capsys.readouterr().out


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
    assert {"cifar.py", "locality.py", "plots.py", "context.py"} <= names["fig12"]
    assert {"scatter.py", "tables.py", "locality.py", "paper.py"} <= names["scatter"]  # paper.py through tables.py
    assert not {"claims.py", "rules.py", "report.py", "runner.py"} & set.union(*names.values())  # they only look


def test_steps_have_names_of_their_own_and_figures_are_found_by_theirs():
    names = [name for step in registry.STEPS for name in (step.name, *step.also)]
    assert len(set(names)) == len(names)
    assert [s.name for s in runner.choose_steps("fig11, fig10,fig2")] == ["fig2", "fig5"]
    with pytest.raises(LcsError, match="unknown step 'fig99'"):
        runner.choose_steps("fig2,fig99")


def test_a_step_makes_what_it_declares(tmp_path, tiny):
    step = next(s for s in registry.STEPS if s.name == "fig9")
    settings = runner.check_settings(tmp_path, "tiny", "quick", "weights", None, "cpu", 0, tiny)
    with pytest.raises(LcsError, match="fig9 drew fig9, which it does not declare; it makes fig8"):
        runner.run_step(replace(step, makes=("fig8",)), settings, say=None)
    assert not (tmp_path / "fig9").exists()
    assert all(step.makes for step in registry.STEPS)


def test_standard_models_are_judged_on_as_many_samples_as_by_evaluate_and_local_ones_on_the_papers_eight():
    standard = steps.EFFORTS["standard"]
    checkpoints = [
        ("grid-all", 3, "late"),
        ("grid-single", 5, "late"),
        ("grid-all", 3, "early"),
        ("list-all-local", 3, "late"),
    ]
    asked = [standard.samples_of(steps.Checkpoint(get_run(name, m, "mini"), stage)) for name, m, stage in checkpoints]
    assert asked == [evaluation.SAMPLES] * 3 + [8]
