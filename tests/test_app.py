"""The app without a server: what is refused, what is offered, the compute lane, and what is drawn."""

import html
import os
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import gradio as gr
import numpy as np
import pytest
import torch
from app_site import make_results, make_weights

from lcs.app import checks, commands, compare, draw, inputs, length, maps, models, page, results
from lcs.app.models import Done, Models, stream
from lcs.app.sampling import Request, Sampled, as_data, caption, draw_samples, match_objects, sample_cards, sheet
from lcs.conditioning import get_conditioner
from lcs.counter.detector import Detections
from lcs.errors import LcsError
from lcs.experiments import TEST_LOCATIONS
from lcs.locality import Probe, trace_locality
from lcs.rule import match, match_colors
from lcs.sampling import sample_rgb
from lcs.scenes import world


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_weights(tmp_path_factory.mktemp("weights"))


def well_formed(markup: str) -> ElementTree.Element:
    """Raises if a tag is not closed: a browser would nest what follows and not draw it."""
    for name, sign in (("&minus;", "-"), ("&#963;", "s")):
        markup = markup.replace(name, sign)
    return ElementTree.fromstring(f"<div>{markup}</div>".replace(" disabled>", ' disabled="1">'))


# ---- checks ---------------------------------------------------------------------------------------

NUMBERS = [float("nan"), float("inf"), -1, 10**30, 1.5, "3", "", None, True, [], {}, [3], {"path": "/etc/passwd"}]


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
@pytest.mark.parametrize("check", [checks.seed, checks.steps, checks.samples], ids=lambda c: c.__name__)
def test_numbers_are_refused_by_value_and_type(check, value):
    with pytest.raises(LcsError, match="must be a whole number from"):
        check(value)


def test_limits_are_inclusive():
    assert checks.steps(checks.MAX_STEPS) == checks.MAX_STEPS
    assert checks.samples(1.0) == 1
    with pytest.raises(LcsError, match="from 1 to 8, got 9"):
        checks.samples(9)
    with pytest.raises(LcsError, match="from 1 to 64, got 0"):
        checks.steps(0)


@pytest.mark.parametrize("value", [float("nan"), 1, 1.0, -0.001, "0.5", None, True])
def test_places_lie_inside_the_image(value):
    with pytest.raises(LcsError, match="up to, but not including, 1"):
        checks.fraction(value, "x")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ()),
        ("0.65,0.65; 0.25,0.5", ((0.65, 0.65), (0.25, 0.5))),
        ("  .5 .25 \n 0,0 ;", ((0.5, 0.25), (0.0, 0.0))),
    ],
)
def test_locations_from_text(text, found):
    assert checks.conditions(text, "grid-all") == found
    assert checks.conditions(checks.as_text(found), "list-all") == found


@pytest.mark.parametrize(
    "text",
    ["nan,0.5", "1,0.5", "-0.1,0.5", "0.5", "0.1,0.2,0.3", "inf,0", "1e-1,0.5", "../../etc/passwd", "<script>",
     "0.5;0.5", "; ".join(["0.5,0.5"] * 13), "0.5,0.5;" * 200, 7, None, ["0.5,0.5"], {"path": "x"}],
)  # fmt: skip
def test_bad_locations_are_refused(text):
    with pytest.raises(LcsError):
        checks.conditions(text, "grid-all")


def test_colours_from_text():
    assert checks.conditions("red; blue, blue", "color") == ("red", "blue", "blue")
    for bad in ("pink", "0.5,0.5", "red " * 13, "/etc/passwd"):
        with pytest.raises(LcsError):
            checks.conditions(bad, "color")


def test_a_click_adds_a_location_and_a_second_one_removes_it():
    once = checks.toggled((), 0.51, 0.99)
    assert once == ((8.5 / 16, 15.5 / 16),)
    assert checks.toggled(once, 0.55, 0.95) == ()
    with pytest.raises(LcsError, match="already 12"):
        checks.toggled(tuple(TEST_LOCATIONS), 0.05, 0.05)
    with pytest.raises(LcsError):
        checks.toggled((), float("nan"), 0.5)


def test_a_click_on_a_colour():
    assert inputs.after_click({"color": "red"}, "red; blue", "color") == ("red", "blue", "red")
    assert inputs.after_click({"color": "red", "less": True}, "red; blue; red", "color") == ("red", "blue")
    for bad in ({"color": "<b>"}, {}, None, {"x": 0.5, "y": 0.5}):
        with pytest.raises(LcsError):
            inputs.after_click(bad, "", "color")


def test_refusals_are_escaped_and_defects_hide_details():
    def refuses():
        raise LcsError("unknown '<img src=x onerror=alert(1)>'")

    def breaks():
        raise RuntimeError("/secret/path")
        yield

    with pytest.raises(gr.Error) as error:
        checks.guarded(refuses)()
    assert "<img" not in error.value.message
    assert html.unescape(error.value.message).startswith("unknown '<img")
    with pytest.raises(gr.Error) as error:
        list(checks.guarded(breaks)())
    assert "secret" not in error.value.message


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", {}),
        ("?tab=length&seed=7&steps=9&conditions=0.5%2C0.5&solver=heun&x=0.25", {
            "tab": "length", "seed": 7, "steps": 9, "conditions": "0.5,0.5", "solver": "heun", "x": 0.25}),
        ("?seed=-1&steps=999&samples=x&x=nan&y=1&solver=euler&experiment=../x&tab=<b>&local=1&unknown=1", {}),
        ("?" + "a=b&" * 30, {}),
    ],
)  # fmt: skip
def test_a_link_keeps_what_is_possible(query, found):
    assert page.parse_query(query) == found


def test_an_absurd_link_is_refused_whole():
    with pytest.raises(LcsError):
        page.parse_query("?" + "x" * 5000)


# ---- what is shipped ------------------------------------------------------------------------------


def test_only_what_is_shipped_is_offered(root):
    there = Models(root)
    assert list(there.runs()) == ["grid-all-m1", "grid-all-m3", "grid-single-m3", "grid-single-local-m3", "color-m3"]
    assert [name for _, name in inputs.experiment_choices(there)] == [
        "grid-all", "grid-single", "grid-single-local", "color"]  # fmt: skip
    assert [m for _, m in inputs.range_choices(there, "grid-all")] == [1, 3]
    assert list(compare.pairs(there)) == ["grid-single-m3"]
    assert "list-all" in inputs.missing_note(there)
    for experiment, objects in (("list-all", 3), ("grid-all", 2), ("grid-all", True), (None, 3), ("../x", 3), ([], [])):
        with pytest.raises(LcsError, match="shipped: grid-all with 1"):
            there.run(experiment, objects)


def test_an_empty_folder_says_how_to_fill_it(tmp_path):
    nothing = Models(tmp_path)
    assert nothing.runs() == {}
    assert inputs.default_choice(nothing) == (None, None)
    assert "lcs pull" in inputs.missing_note(nothing)
    with pytest.raises(LcsError, match="nothing yet"):
        nothing.run("grid-all", 3)
    assert isinstance(page.build(page.make_site(tmp_path, "mini", tmp_path / "none")), gr.Blocks)


def test_checkpoints_that_arrive_later_are_offered(tmp_path):
    there = Models(tmp_path)
    assert not there.runs()
    make_weights(tmp_path, (("color", 3),))
    assert list(there.runs()) == ["color-m3"]


def test_the_cache_of_models_is_bounded(root, monkeypatch):
    there = Models(root)
    runs = there.runs()
    first = there.model(runs["grid-all-m3"])
    assert there.model(runs["grid-all-m3"]) is first
    monkeypatch.setattr(models, "CACHE_BYTES", int(models._bytes(first) * 1.5))
    there.model(runs["grid-single-m3"])
    assert len(there._loaded) == 1
    assert there.model(runs["grid-all-m3"]) is not first


# ---- the lane -------------------------------------------------------------------------------------


def test_stream_yields_progress_and_then_the_result():
    def work(emit):
        for i in range(3):
            emit(i)
            time.sleep(0.05)
        return "done"

    events = list(stream(work))
    assert events[-1] == Done("done")
    assert events[:-1] == [0, 1, 2]


def test_closing_a_stream_stops_the_work():
    steps, ended = [], threading.Event()

    def work(emit):
        try:
            for i in range(1000):
                emit(i)
                steps.append(i)
                time.sleep(0.01)
        finally:
            ended.set()

    running = stream(work)
    next(running)
    running.close()
    assert ended.wait(5)
    assert len(steps) < 500
    assert list(stream(lambda emit: "next"))[-1] == Done("next")  # the lane is free again


def test_an_error_of_the_work_reaches_the_handler():
    def work(emit):
        raise LcsError("no")

    with pytest.raises(LcsError, match="no"):
        list(stream(work))


# ---- samples --------------------------------------------------------------------------------------


def found_at(centers, colors=None) -> Detections:
    n = len(centers)
    c = np.array(centers, np.float32).reshape(-1, 2)
    zeros = np.zeros(n, np.int64)
    colors = zeros if colors is None else np.array([world.COLOR_NAMES.index(x) for x in colors])
    return Detections(c, np.concatenate([c - 0.05, c + 0.05], 1), colors, zeros, zeros, zeros, np.ones(n), np.ones(n))


def test_objects_are_matched_as_the_evaluation_does():
    rng = np.random.default_rng(0)
    for _ in range(20):
        asked = tuple(map(tuple, rng.random((rng.integers(0, 7), 2))))
        drawn = found_at(rng.random((rng.integers(0, 9), 2)))
        assert len(match_objects(asked, drawn)) == match(np.array(asked), drawn.centers).in_place
        names = list(rng.choice(world.COLOR_NAMES, len(drawn)))
        wanted = tuple(rng.choice(world.COLOR_NAMES, 4))
        ours = match_objects(wanted, found_at(drawn.centers, names))
        assert len(ours) == match_colors(wanted, names).in_place


def test_samples_are_those_of_the_library(root):
    there = Models(root)
    request = length.request_for(there, "grid-all", 3, "0.65,0.65; 0.25,0.65", 5, 3, "heun", 2)
    seen = []
    result = draw_samples(there, request, seen.append)
    label = get_conditioner("grid-all").test_conditions
    label = get_conditioner("grid-all").encode_conditions([label[0], label[2]])
    direct = sample_rgb(request.run, there.model(request.run), np.stack([label] * 2), (5, 6), steps=3, solver="heun")
    assert np.array_equal(result.images, direct)
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    assert any(images is not None and images.shape == (2, 64, 64, 3) for _, images in seen)
    data = as_data(result)
    assert data["samples"][1]["seed"] == 6
    assert data["samples"][0]["drawn"] == len(result.found[0])
    assert sheet(result)[:4] == b"\x89PNG"


def test_what_is_shown_is_well_formed_and_says_what_was_counted(root):
    run = Models(root).runs()["grid-all-m3"]
    asked = (TEST_LOCATIONS[:2],) * 2
    request = Request(run, asked, (0, 1), 4, "heun")
    found = [found_at(TEST_LOCATIONS[:3]), found_at(TEST_LOCATIONS[:2])]
    sampled = Sampled(request, np.zeros((2, 64, 64, 3), np.uint8), found, [[0, 1], [0, 1]], 1.0)
    assert caption(sampled, 0) == "asked <b>2</b>, drawn <b>3</b>, in place <b>2</b>"
    assert (sampled.complete(0), sampled.complete(1)) == (False, True)
    tree = well_formed(sample_cards(sampled))
    assert len(tree.findall(".//*[@class='found']")) == 5
    assert len(tree.findall(".//*[@class='asked']")) == 4


def test_a_box_that_is_inside_out_is_still_drawn(root):
    """The counter's four distances are free numbers: left may come out right of right."""
    request = Request(Models(root).runs()["grid-all-m3"], (TEST_LOCATIONS[:1],), (0,), 4, "heun")
    found = found_at(TEST_LOCATIONS[:1])
    odd = Detections(**found.__dict__ | {"boxes": found.boxes[:, [2, 3, 0, 1]]})
    sampled = Sampled(request, np.zeros((1, 64, 64, 3), np.uint8), [odd], [[0]], 1.0)
    assert sheet(sampled)[:4] == b"\x89PNG"
    assert 'width="-' not in sample_cards(sampled)


def test_every_k_uses_the_papers_conditions(root):
    there = Models(root)
    request = length.every_k_request(there, "color", 3, 0, 2, "heun")
    assert [len(c) for c in request.conditions] == list(range(9))
    assert len(length.every_k_request(there, "grid-all", 3, 0, 2, "heun").conditions) == 13


# ---- maps and pictures ----------------------------------------------------------------------------


def test_locality_is_that_of_the_library_and_tells_its_progress(root):
    there = Models(root)
    run, conditions, told = there.runs()["grid-single-local-m3"], TEST_LOCATIONS[:2], []
    trace = maps.measure(there, run, conditions, (0.65, 0.65), 0, told.append, levels=3, steps=4)
    probe = Probe("pixel", (0.65, 0.65), 0)
    direct = trace_locality(run, there.model(run), conditions, (0,), 4, [0, 2, 3], [probe])
    assert np.allclose(trace.maps, direct.maps)
    assert told == sorted(told)
    assert told[-1] == 8 / 9  # the last of nine passes begins
    tree = well_formed(maps.panel(run, trace, "title"))
    assert len(tree.findall(".//*[@data-i]")) == 3
    assert maps.trace_sheet([trace])[:4] == b"\x89PNG"


def test_the_hook_that_tells_progress_is_removed(root):
    there = Models(root)
    model = there.model(there.runs()["grid-all-m3"])
    with pytest.raises(ZeroDivisionError), models.pulses(model, lambda count: 1 / 0):
        model(torch.zeros(1, 3, 64, 64), 1.0, torch.zeros(1, 256))
    model(torch.zeros(1, 3, 64, 64), 1.0, torch.zeros(1, 256))


@pytest.mark.parametrize(
    "markup",
    [
        draw.grid_board(TEST_LOCATIONS, (0.5, 0.5)),
        draw.color_board(("red", "red")),
        draw.progress(0.3, "<b>"),
        draw.empty("a", "b", ["c < d"]),
        draw.curves([80.0, 1.0, 0.1], {"a": [0.0, 1.0, 2.0], "<b>": [1.0, 1.0, 0.0]}, "t", "y"),
        draw.curves([80.0], {"a": [0.0]}, "t", "y"),
    ],
)
def test_markup_is_well_formed(markup):
    well_formed(markup)


def test_heat_covers_its_range():
    values = np.linspace(0, 4, 256).reshape(16, 16)
    shown = draw.heat(values)
    assert shown.dtype == np.uint8
    assert shown[0, 0].sum() < 10
    assert shown[-1, -1].sum() > 600
    assert draw.heat(np.zeros((4, 4))).max() <= 4


# ---- results --------------------------------------------------------------------------------------


def test_stored_results_are_shown_and_stay_in_their_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "cache"))
    folder = make_results(tmp_path / "results")
    shown = results.claims_html(folder)
    assert "grid-all &lt;b&gt;composes" in shown
    assert "7 to 9" in shown
    assert "1+(0-2)" in shown  # a stored table
    well_formed(shown)
    figures = results.figures(folder)
    assert len(figures) == 1
    assert str(tmp_path / "cache") in figures[0][0]


def test_missing_or_broken_results_say_how_to_make_them(tmp_path):
    assert "python -m lcs artifact --keep artifact/results" in results.claims_html(tmp_path)
    (tmp_path / "claims.json").write_text("{broken")
    assert "python -m lcs artifact --keep artifact/results" in results.claims_html(tmp_path)
    (tmp_path / "claims.json").write_text('{"a": 1}')
    assert "python -m lcs artifact --keep artifact/results" in results.claims_html(tmp_path)


def test_table_rows_of_a_pair(tmp_path, root):
    folder = make_results(tmp_path / "results")
    runs = list(compare.pairs(Models(root))["grid-single-m3"])
    assert "1+(0-2)" in compare.table_rows(runs, folder)
    assert "python -m lcs artifact --keep artifact/results" in compare.table_rows(runs, tmp_path / "none")


# ---- the command ----------------------------------------------------------------------------------


def test_the_command_refuses_what_is_not_possible(tmp_path):
    for options in ({"port": 70000}, {"port": -1}, {"threads": 0}, {"weights": tmp_path / "none"}):
        with pytest.raises(LcsError):
            commands.app_command(**options)
    with pytest.raises(LcsError):
        commands.bench_command(clients=-1)


def test_the_folder_of_weights_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("LCS_WEIGHTS", str(tmp_path))
    assert page.make_site().models.root == tmp_path
    assert page.make_site(tmp_path / "other").models.root == tmp_path / "other"


@pytest.mark.slow
def test_the_benchmark_measures_a_server_of_its_own(root):
    from lcs.bench.app import bench_app

    result = bench_app(clients=4, weights=root)
    assert result["answered"] + result["refused_politely"] == 4
    assert result["failed"] == 0
    assert result["memory_peak_mb"] < 3000


def test_zerogpu_is_used_where_it_is_there(tmp_path):
    """A stand-in for Hugging Face's `spaces` sees every function that computes."""
    (tmp_path / "spaces.py").write_text(
        "marked = []\ndef GPU(duration):\n    return lambda function: marked.append(function.__module__) or function\n"
    )
    code = "import spaces, lcs.app.page; print(*spaces.marked)"
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert set(done.stdout.split()) >= {f"lcs.app.{tab}" for tab in ("length", "locality", "compare", "sdxl")}
