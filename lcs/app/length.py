"""Tab 1: ask a model for more objects than it has ever seen, and count what it draws."""

from __future__ import annotations

from collections.abc import Iterator

import gradio as gr

from lcs.app import checks, draw, inputs
from lcs.app.checks import guarded
from lcs.app.inputs import QUICK, Linked, Site
from lcs.app.models import LANE, Done, Models, gpu, stream
from lcs.app.sampling import Request, as_data, draw_samples, preview_cards, sample_cards, sheet, verdict
from lcs.conditioning import get_conditioner
from lcs.sampling import SOLVERS

TAB = "length"
STEPS, SAMPLES, SOLVER, COUNT = 16, 4, "dpmpp_2m", 6
# One click each: what, experiment, training range, conditions (None: the paper's first K), K
EXAMPLES = (
    ("6 objects, trained on 1-3", "grid-all", 3, None, 6),
    ("the same, one labelled", "grid-single", 3, None, 6),
    ("rescued by locality", "grid-single-local", 3, None, 6),
    ("a list instead of a grid", "list-all", 3, None, 6),
    ("9 objects", "grid-all", 3, None, 9),
    ("a row of five", "grid-all", 3, "0.22,0.5; 0.36,0.5; 0.5,0.5; 0.64,0.5; 0.78,0.5", 5),
    ("five colours", "color", 3, None, 5),
)


# ---- what runs in the lane ------------------------------------------------------------------------


@gpu
def _run(models: Models, request: Request) -> Iterator[tuple]:
    """(cards, status, JSON, PNG button, JSON button), live."""
    keep = gr.skip()
    for event in stream(lambda emit: draw_samples(models, request, emit)):
        if isinstance(event, Done):
            result = event.result
            data = as_data(result)
            name = f"{request.run.name}-seed{request.seeds[0]}"
            yield sample_cards(result), verdict(result), data, *inputs.offered(name, sheet(result), data)
            return
        step, images = event
        said = draw.progress(step / request.steps, f"step {step} of {request.steps}" if step else "loading the model")
        cards = keep if images is None else preview_cards(request, images)
        yield cards, said, keep, keep, keep


def request_for(models: Models, experiment, objects, conditions, seed, steps, solver, samples) -> Request:
    run = models.run(experiment, objects)
    asked = checks.conditions(conditions, run.experiment.conditioner)
    first, count = checks.seed(seed), checks.samples(samples)
    seeds = tuple(range(first, first + count))
    return Request(run, (asked,) * count, seeds, checks.steps(steps), checks.solver(solver))


def every_k_request(models: Models, experiment, objects, seed, steps, solver) -> Request:
    run = models.run(experiment, objects)
    known = get_conditioner(inputs.conditioner_of(run.experiment.name)).test_conditions
    asked = tuple(known[:k] for k in range(len(known) + 1))
    return Request(run, asked, (checks.seed(seed),) * len(asked), checks.steps(steps), checks.solver(solver))


# ---- the tab --------------------------------------------------------------------------------------


def build(site: Site) -> Linked:
    models = site.models
    experiment_, objects_ = inputs.default_choice(models)

    @guarded
    def sample(experiment, objects, conditions, seed, steps, solver, samples):
        """Samples of one model for conditions such as "0.65,0.65; 0.25,0.65" (x,y) or "red; blue"."""
        yield from _run(models, request_for(models, experiment, objects, conditions, seed, steps, solver, samples))

    @guarded
    def sample_every_k(experiment, objects, seed, steps, solver):
        """One sample for each K = 0..12 of the paper's conditions (0..8 for colours), from the same noise."""
        yield from _run(models, every_k_request(models, experiment, objects, seed, steps, solver))

    def chosen(experiment_, objects_, written_):
        """Another experiment has other training ranges, and perhaps another kind of conditions."""
        ranges = inputs.range_choices(models, experiment_)
        values = [value for _, value in ranges]
        kept = objects_ if objects_ in values else (3 if 3 in values else values[0] if values else None)
        try:
            found = checks.conditions(written_, inputs.conditioner_of(experiment_))
        except checks.LcsError:  # locations for a model of colours, or the other way round
            found = inputs.first_conditions(experiment_, 4)
        shown = inputs.board_html(found, inputs.is_color(experiment_))
        return gr.Radio(choices=ranges, value=kept), checks.as_text(found), shown, len(found)

    gr.HTML(
        '<p class="lead">These models have only ever seen a few objects at once. Place more than that, and see whether '
        "the model draws them. Changing only <em>how training scenes were labelled</em> flips the answer.</p>"
    )
    with gr.Row(elem_classes="examples"):
        example_buttons = [
            gr.Button(label, size="sm", min_width=110, elem_classes="example", elem_id=f"{TAB}-example-{i}")
            for i, (label, *_) in enumerate(EXAMPLES)
        ]
    with gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=300):
            experiment = gr.Dropdown(
                inputs.experiment_choices(models), value=experiment_, label="Experiment: how scenes were labelled",
                elem_id=f"{TAB}-experiment",
            )  # fmt: skip
            objects = gr.Radio(
                inputs.range_choices(models, experiment_), value=objects_, label="Trained on scenes with",
                elem_id=f"{TAB}-objects",
            )  # fmt: skip
            gr.HTML('<div class="hint">Click on the board to place or remove an object.</div>')
            surface = inputs.board(f"{TAB}-board")
            count = gr.Slider(
                0, checks.MAX_CONDITIONS, COUNT, step=1, label="K: the paper's first K conditions", elem_id=f"{TAB}-k"
            )
            with gr.Accordion("Sampling", open=False):
                with gr.Row():
                    seed = gr.Number(0, label="Seed", precision=0, minimum=0, min_width=90, elem_id=f"{TAB}-seed")
                    samples = gr.Slider(1, checks.MAX_SAMPLES, SAMPLES, step=1, label="Samples", min_width=130)
                with gr.Row():
                    steps = gr.Slider(1, checks.MAX_STEPS, STEPS, step=1, label="Steps", min_width=130)
                    solver = gr.Dropdown(list(SOLVERS), value=SOLVER, label="Solver", min_width=130)
                written = gr.Textbox(
                    checks.as_text(inputs.first_conditions(experiment_, COUNT)), label="Conditions as text",
                    info="x,y; x,y as fractions of the image, or colours", max_length=checks.MAX_TEXT,
                    elem_id=f"{TAB}-conditions",
                )  # fmt: skip
            with gr.Row(elem_classes="actions"):
                go = gr.Button("Sample", variant="primary", elem_id=f"{TAB}-go", min_width=90)
                gallery = gr.Button("K = 0..12", elem_id=f"{TAB}-gallery", min_width=90)
                stop = gr.Button("Stop", variant="stop", elem_id=f"{TAB}-stop", min_width=60)
            missing = gr.HTML(inputs.missing_note(models))
        with gr.Column(scale=3, min_width=320):
            status = gr.HTML(
                draw.note("Press <b>Sample</b>, or one of the examples above."),
                elem_id=f"{TAB}-status",
                label="message",
            )
            shown = gr.HTML(_placeholder(), elem_id=f"{TAB}-samples", label="samples")
            layers = gr.CheckboxGroup(
                [("what was asked", "asked"), ("what was found", "found")], value=["asked", "found"],
                show_label=False, container=False, elem_classes="layers",
            )  # fmt: skip
            png, numbers = inputs.downloads()
            fields = {"experiment": experiment, "objects": objects, "conditions": written, "seed": seed,
                      "steps": steps, "solver": solver, "samples": samples}  # fmt: skip
            inputs.link_row(TAB, fields)
            with gr.Accordion("Numbers", open=False):
                data = gr.JSON(label="numbers", show_label=False, max_height=320)

    outputs = [shown, status, data, png, numbers]
    options = {"preprocess": False, "show_progress": "minimal", "show_progress_on": [status], **LANE}
    event = go.click(sample, list(fields.values()), outputs, api_name="sample", **options)
    every = gallery.click(
        sample_every_k, [experiment, objects, seed, steps, solver], outputs, api_name="sample_every_k", **options
    )
    stopped = stop.click(None, cancels=[event, every], api_visibility="private")
    stopped.then(lambda: draw.note("Stopped."), None, status, **QUICK)
    inputs.wire_board(surface, written, count, experiment, lambda name: name)
    experiment.input(guarded(chosen), [experiment, objects, written], [objects, written, surface, count], **QUICK)
    layers.input(
        None, layers, None, api_visibility="private",
        js=f"(on) => ['asked', 'found'].forEach((n) => "
        f"document.querySelector('#{TAB}-samples').classList.toggle('no-' + n, !on.includes(n)))",
    )  # fmt: skip

    restored = [*fields.values(), surface, count, missing]

    def restore(query: dict) -> list:
        """Also refreshes what is shipped: checkpoints may have been added since the server started."""
        name, trained = _known(models, query.get("experiment"), query.get("objects"))
        found = query.get("conditions")
        try:
            asked = checks.conditions(found, inputs.conditioner_of(name))
        except checks.LcsError:
            asked = inputs.first_conditions(name, COUNT)
        return [
            gr.Dropdown(choices=inputs.experiment_choices(models), value=name),
            gr.Radio(choices=inputs.range_choices(models, name), value=trained),
            checks.as_text(asked), query.get("seed", 0), query.get("steps", STEPS), query.get("solver", SOLVER),
            query.get("samples", SAMPLES), inputs.board_html(asked, inputs.is_color(name)), len(asked),
            inputs.missing_note(models),
        ]  # fmt: skip

    for button, (_, name, trained, places, k) in zip(example_buttons, EXAMPLES, strict=True):
        conditions = places or checks.as_text(inputs.first_conditions(name, k))
        query = {"experiment": name, "objects": trained, "conditions": conditions}

        def fill(query=query):
            if (query["experiment"], query["objects"]) != _known(models, query["experiment"], query["objects"]):
                raise checks.LcsError(
                    f"{query['experiment']} trained on 1-{query['objects']} objects is not shipped yet; get it with "
                    f"`lcs pull {query['experiment']}` or `lcs train {query['experiment']} --ship`"
                )
            return restore(query)

        filled = button.click(guarded(fill), None, restored, **QUICK)
        filled.success(None, js=inputs.press(f"{TAB}-go"), api_visibility="private")
    return Linked(TAB, fields, restored, restore, f"{TAB}-go")


def _known(models: Models, experiment, objects) -> tuple[str | None, int | None]:
    """The wanted choice if it is shipped, else the default."""
    try:
        run = models.run(experiment, objects)
        return run.experiment.name, run.objects
    except checks.LcsError:
        return inputs.default_choice(models)


def _placeholder() -> str:
    return '<div class="cards n4">' + '<div class="card ghost"></div>' * 4 + "</div>"
