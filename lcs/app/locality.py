"""Tab 2: which pixels a model looks at, and which condition it listens to, along the way from noise to picture."""

from __future__ import annotations

from collections.abc import Iterator

import gradio as gr

import lcs
from lcs.app import checks, draw, inputs, maps
from lcs.app.checks import guarded
from lcs.app.inputs import QUICK, Linked, Site
from lcs.app.models import Done, Models, gpu, stream
from lcs.errors import LcsError
from lcs.experiments import EXPERIMENTS, Run

TAB = "locality"
NONE = "none"
COUNT, PIXEL = 4, (0.65, 0.65)  # the paper's first four locations, seen from the first
PLACES = ("pixel", "location")


@gpu
def _run(models: Models, runs: list[Run], conditions, pixel, seed: int) -> Iterator[tuple]:
    """(panels, status, JSON, PNG button, JSON button), with progress."""

    def work(emit):
        share = 1 / len(runs)
        return [
            maps.measure(models, run, conditions, pixel, seed, lambda done, i=i: emit((i + done) * share))
            for i, run in enumerate(runs)
        ]

    keep = gr.skip()
    for event in stream(work):
        if not isinstance(event, Done):
            yield keep, draw.progress(event, "following the model from noise to picture"), keep, keep, keep
            continue
        traces = event.result
        top = max(map(maps.largest, traces)) * 1.08 or None
        panels = [maps.panel(run, t, _title(run), top) for run, t in zip(runs, traces, strict=True)]
        data = {"lcs": lcs.__version__, "seed": seed, "steps": maps.STEPS, "traces": [t.as_dict() for t in traces]}
        name = "locality-" + "-".join(run.name for run in runs)
        said = draw.note("Move the slider: left is pure noise, right is the finished picture.")
        files = inputs.offered(name, maps.trace_sheet(traces), data)
        yield f'<div class="panels">{"".join(panels)}</div>', said, data, *files


def _title(run: Run) -> str:
    return f"{run.experiment.title}, trained on {inputs.range_label(run.objects)}"


def runs_for(models: Models, model, other) -> list[Run]:
    runs = [models.named(model)]
    if other not in (None, "", NONE):
        runs.append(models.named(other))
    kinds = {run.experiment.conditioner == "color" for run in runs if run.experiment.conditioner != "none"}
    if len(kinds) > 1:
        raise LcsError("one of these models is told locations and the other colours; choose two of a kind")
    return runs


def experiment_of(name) -> str:
    """The experiment of a run's name; of anything else, one with locations."""
    experiment = name.rsplit("-m", 1)[0] if isinstance(name, str) else ""
    return experiment if experiment in EXPERIMENTS else "grid-all"


def _board(conditions: checks.Conditions, pixel: tuple[float, float]) -> str:
    locations = () if conditions and isinstance(conditions[0], str) else conditions
    return draw.grid_board(locations, pixel)


def build(site: Site) -> Linked:
    models = site.models

    @guarded
    def locality(model, other, conditions, x, y, seed):
        """Pixel gradients and conditional influence at (x, y) over the noise schedule, for one or two models."""
        runs = runs_for(models, model, other)
        kind = inputs.conditioner_of(runs[0].experiment.name)
        found = checks.conditions(conditions, kind)
        pixel = checks.fraction(x, "x"), checks.fraction(y, "y")
        yield from _run(models, runs, found, pixel, checks.seed(seed))

    gr.HTML(
        '<p class="lead">A model composes if, at each place, it looks only at <em>nearby pixels</em> and listens only '
        "to <em>the condition there</em>. Pick a pixel and see both, from pure noise to the finished picture.</p>"
    )
    first, _ = _defaults(models)
    with gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=290):
            model = gr.Dropdown(inputs.run_choices(models, False), value=first, label="Model", elem_id=f"{TAB}-model")
            other = gr.Dropdown(
                [("no other model", NONE), *inputs.run_choices(models, False)], value=NONE, label="Beside it",
                elem_id=f"{TAB}-other",
            )  # fmt: skip
            mode = gr.Radio(
                [("the pixel to explain", PLACES[0]), ("a location to ask for", PLACES[1])], value=PLACES[0],
                label="A click on the board sets", elem_id=f"{TAB}-mode",
            )  # fmt: skip
            surface = inputs.board(f"{TAB}-board")
            count = gr.Slider(0, checks.MAX_CONDITIONS, COUNT, step=1, label="K: the paper's first K conditions")
            with gr.Accordion("More", open=False):
                written = gr.Textbox(
                    checks.as_text(inputs.first_conditions("grid-all", COUNT)), label="Conditions as text",
                    max_length=checks.MAX_TEXT,
                )  # fmt: skip
                with gr.Row():
                    x = gr.Number(PIXEL[0], label="Pixel x", step=0.01, min_width=80)
                    y = gr.Number(PIXEL[1], label="Pixel y", step=0.01, min_width=80)
                    seed = gr.Number(0, label="Seed", precision=0, min_width=80)
            with gr.Row(elem_classes="actions"):
                go = gr.Button("Measure", variant="primary", elem_id=f"{TAB}-go", min_width=90)
                stop = gr.Button("Stop", variant="stop", min_width=60)
        with gr.Column(scale=4, min_width=320):
            status = gr.HTML(draw.note("Press <b>Measure</b>; one model takes a second or two."),
                             elem_id=f"{TAB}-status", label="message")  # fmt: skip
            level = gr.Slider(
                1, maps.LEVELS, maps.FIRST, step=1, label="From noise (left) to picture (right)",
                elem_id=f"{TAB}-level", buttons=[],
            )  # fmt: skip
            shown = gr.HTML(
                draw.empty("No map yet", "Maps of the pixel gradient, the influence of every condition and their "
                           "curves over the noise levels will be here."), elem_id=f"{TAB}-maps", label="maps"
            )  # fmt: skip
            png, numbers = inputs.downloads()
            fields = {"model": model, "other": other, "conditions": written, "x": x, "y": y, "seed": seed}
            inputs.link_row(TAB, fields)
            with gr.Accordion("Numbers", open=False):
                data = gr.JSON(label="numbers", show_label=False, max_height=320)

    maps.wire(TAB, locality, fields, [shown, status, data, png, numbers], go, stop, level)

    def clicked(state, _mode, event: gr.EventData):
        name, places, px, py = state
        at = event._data if isinstance(event._data, dict) else {}
        found = checks.conditions(places, inputs.conditioner_of(experiment_of(name)))
        pixel = checks.fraction(px, "x"), checks.fraction(py, "y")
        if _mode == PLACES[0] or (found and isinstance(found[0], str)):
            pixel = checks.fraction(at.get("x"), "x"), checks.fraction(at.get("y"), "y")
        else:
            found = checks.toggled(found, at.get("x"), at.get("y"))
        return checks.as_text(found), _board(found, pixel), len(found), round(pixel[0], 4), round(pixel[1], 4)

    inner = guarded(clicked)

    def on_click(name, places, px, py, mode_, event: gr.EventData):
        return inner((name, places, px, py), mode_, event)

    surface.click(on_click, [model, written, x, y, mode], [written, surface, count, x, y], trigger_mode="multiple",
                  **QUICK)  # fmt: skip

    @guarded
    def counted(count_, name, px, py):
        found = inputs.first_conditions(experiment_of(name), checks.whole(count_, "K", 0, checks.MAX_CONDITIONS))
        return checks.as_text(found), _board(found, (checks.fraction(px, "x"), checks.fraction(py, "y")))

    @guarded
    def typed(name, places, px, py):
        try:
            found = checks.conditions(places, inputs.conditioner_of(experiment_of(name)))
        except LcsError:  # the other kind of conditions
            found = inputs.first_conditions(experiment_of(name), COUNT)
        pixel = checks.fraction(px, "x"), checks.fraction(py, "y")
        return checks.as_text(found), _board(found, pixel), len(found)

    count.input(counted, [count, model, x, y], [written, surface], trigger_mode="always_last", **QUICK)
    for change in (written.submit, written.blur, x.blur, y.blur, model.input):
        change(typed, [model, written, x, y], [written, surface, count], **QUICK)

    restored = [*fields.values(), surface, count]

    def restore(query: dict) -> list:
        names, (first, second) = models.runs(conditional=False), _defaults(models)
        name = query["model"] if query.get("model") in names else first
        beside = query.get("other", second if not query else NONE)
        try:
            found = checks.conditions(query.get("conditions"), inputs.conditioner_of(experiment_of(name)))
        except LcsError:
            found = inputs.first_conditions(experiment_of(name), COUNT)
        pixel = query.get("x", PIXEL[0]), query.get("y", PIXEL[1])
        choices = inputs.run_choices(models, False)
        return [
            gr.Dropdown(choices=choices, value=name),
            gr.Dropdown(choices=[("no other model", NONE), *choices], value=beside if beside in names else NONE),
            checks.as_text(found), *pixel, query.get("seed", 0), _board(found, pixel), len(found),
        ]  # fmt: skip

    return Linked(TAB, fields, restored, restore, f"{TAB}-go")


def _defaults(models: Models) -> tuple[str | None, str]:
    """A model that should be local and one that should not, as far as they are shipped."""
    names = list(models.runs())
    first = "grid-all-m3" if "grid-all-m3" in names else names[0] if names else None
    second = next((n for n in ("grid-single-m3", "list-all-m3") if n in names and n != first), NONE)
    return first, second
