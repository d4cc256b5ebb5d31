"""Tab 3: the same network problem with and without locality: same labels, same conditions, same noise."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import gradio as gr
import numpy as np
from PIL import Image

from lcs.app import checks, draw, inputs, maps, results
from lcs.app.checks import guarded
from lcs.app.inputs import Linked, Site
from lcs.app.models import Done, Models, gpu, stream
from lcs.app.sampling import Request, Sampled, as_data, draw_samples, preview_cards, sample_cards, sheet
from lcs.experiments import Run

TAB = "compare"
COUNT, SAMPLES, STEPS, LEVELS, MAP_STEPS = 6, 2, 12, 6, 10  # the local model costs five times the other


def pairs(models: Models) -> dict[str, tuple[Run, Run]]:
    """Standard and local model of the same labels and training range, where both are shipped."""
    runs = models.runs()
    return {
        name: (run, runs[local])
        for name, run in runs.items()
        if (local := f"{run.experiment.name}-local-m{run.objects}") in runs
    }


def pair_choices(models: Models) -> list[tuple[str, str]]:
    return [
        (f"{run.experiment.title}, {inputs.range_label(run.objects)}", name) for name, (run, _) in pairs(models).items()
    ]


@gpu
def _run(models: Models, runs: tuple[Run, Run], asked, seed: int, count: int, folder: Path) -> Iterator[tuple]:
    """(columns, status, JSON, PNG button, JSON button): first both samples, live, then both maps."""
    requests = [Request(run, (asked,) * count, tuple(range(seed, seed + count)), STEPS, "dpmpp_2m") for run in runs]
    pixel = asked[0] if asked else (0.5, 0.5)

    def work(emit):
        done: list[Sampled] = []
        for i, request in enumerate(requests):
            tell = lambda event, i=i: emit(("sampling", 0.35 * (i + event[0] / STEPS), list(done), event[1]))  # noqa: E731
            done.append(draw_samples(models, request, tell))
        traces = []
        for i, run in enumerate(runs):
            share = lambda d, i=i: emit(("measuring locality", 0.7 + 0.15 * (i + d), list(done), None))  # noqa: E731
            traces.append(maps.measure(models, run, asked, pixel, seed, share, LEVELS, MAP_STEPS))
        return done, traces

    keep = gr.skip()
    for event in stream(work):
        if not isinstance(event, Done):
            said, share, done, preview = event
            columns = [sample_cards(one) for one in done]
            if preview is not None:
                columns.append(preview_cards(requests[len(done)], preview))
            yield _columns(columns) if columns else keep, draw.progress(share, said), keep, keep, keep
            continue
        done, traces = event.result
        top = max(map(maps.largest, traces)) * 1.08 or None
        columns = [
            sample_cards(one) + maps.panel(run, trace, "Where it looks, and what it listens to", top)
            for run, one, trace in zip(runs, done, traces, strict=True)
        ]
        data = {"samples": [as_data(one) for one in done], "traces": [trace.as_dict() for trace in traces]}
        pictures = _joined([sheet(one) for one in done])
        yield _columns(columns), _verdict(done, folder), data, *inputs.offered(f"{TAB}-{runs[0].name}", pictures, data)


def _joined(sheets: list[bytes]) -> bytes:
    """The standard model's sheet above the local one's."""
    return draw.png_bytes(np.concatenate([np.asarray(Image.open(io.BytesIO(one))) for one in sheets]))


def _columns(columns: list[str]) -> str:
    titles = ("Standard: sees the whole image", "Local: sees 5 x 5 of 16 x 16 cells")
    parts = [f'<div><h4 class="over">{title}</h4>{part}</div>' for title, part in zip(titles, columns, strict=False)]
    return f'<div class="vs">{"".join(parts)}</div>'


def _verdict(done: list[Sampled], folder: Path) -> str:
    """What to see, in one sentence, and the rows of the artifact's table."""
    standard = done[0]
    asked = len(standard.request.conditions[0])
    if standard.found is None:
        return draw.note("No counter is shipped here, so nobody has counted these pictures.")
    mean = [sum(map(one.in_place, range(len(one.images)))) / len(one.images) for one in done]
    trained = inputs.range_label(standard.request.run.objects)
    said = (
        f"Both were trained on {trained} with the same labels. Asked for <b>{asked}</b>, the standard model puts "
        f"<b>{mean[0]:g}</b> in place on average and the one that can only look nearby <b>{mean[1]:g}</b>."
    )
    return draw.note(said, "good" if mean[1] > mean[0] else "") + table_rows([one.request.run for one in done], folder)


def table_rows(runs: list[Run], folder: Path) -> str:
    """The rows of both models in the artifact's table 1, if it has been made."""
    stored = next((path for path in results.stored_tables(folder) if path.name.endswith("table1.md")), None)
    if stored is None:
        return (
            '<div class="missing">K_max of both, measured on many samples, comes with '
            "<code>python -m lcs artifact --keep artifact/results</code>.</div>"
        )
    wanted = {(run.experiment.name, "1" if run.objects == 1 else f"1-{run.objects}") for run in runs}
    rows = results.read_table(stored)
    return results.table_html([row for row in rows if (row.get("experiment"), row.get("trained on")) in wanted])


# ---- the tab --------------------------------------------------------------------------------------


def build(site: Site) -> Linked:
    models = site.models
    known = pair_choices(models)

    @guarded
    def compare(pair, conditions, seed, samples):
        """Samples and locality of a standard model and of the local one trained on the same labels."""
        runs = pairs(models).get(checks.choice(pair, "the pair", list(pairs(models))))
        asked = checks.conditions(conditions, runs[0].experiment.conditioner)
        count = checks.whole(samples, "the number of samples", 1, 4)
        yield from _run(models, runs, asked, checks.seed(seed), count, site.results)

    gr.HTML(
        '<p class="lead">Forcing the model to look only at a small patch, by architecture, restores what the labels '
        "took away. Both models below start from the same noise.</p>"
    )
    missing = gr.HTML("" if known else _nothing(), elem_id=f"{TAB}-missing")
    with gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=290):
            pair = gr.Dropdown(known, value=known[0][1] if known else None, label="Labels", elem_id=f"{TAB}-pair")
            gr.HTML('<div class="hint">Click on the board to place or remove an object.</div>')
            surface = inputs.board(f"{TAB}-board")
            count = gr.Slider(0, checks.MAX_CONDITIONS, COUNT, step=1, label="K: the paper's first K locations")
            with gr.Accordion("Sampling", open=False):
                with gr.Row():
                    seed = gr.Number(0, label="Seed", precision=0, min_width=90)
                    samples = gr.Slider(1, 4, SAMPLES, step=1, label="Samples of each", min_width=130)
                written = gr.Textbox(
                    checks.as_text(inputs.first_conditions("grid-single", COUNT)), label="Locations as text",
                    max_length=checks.MAX_TEXT,
                )  # fmt: skip
            with gr.Row(elem_classes="actions"):
                go = gr.Button("Compare", variant="primary", elem_id=f"{TAB}-go", min_width=90)
                stop = gr.Button("Stop", variant="stop", min_width=60)
        with gr.Column(scale=6, min_width=320):
            status = gr.HTML(
                draw.note(
                    "Press <b>Compare</b>: same labels in training, same conditions, same noise. Which column follows?"
                ),
                elem_id=f"{TAB}-status",
                label="message",
            )
            level = gr.Slider(1, LEVELS, 3, step=1, label="Noise level of the maps: from noise to picture", buttons=[])
            shown = gr.HTML(_columns([_ghosts()] * 2), elem_id=f"{TAB}-maps", label="samples and maps")
            png, numbers = inputs.downloads()
            fields = {"pair": pair, "conditions": written, "seed": seed, "samples": samples}
            inputs.link_row(TAB, fields)
            with gr.Accordion("Numbers", open=False):
                data = gr.JSON(label="numbers", show_label=False, max_height=320)

    maps.wire(TAB, compare, fields, [shown, status, data, png, numbers], go, stop, level)
    inputs.wire_board(surface, written, count, pair, lambda _: "grid-single")  # both pairs take locations

    restored = [*fields.values(), surface, count, missing]

    def restore(query: dict) -> list:
        choices = pair_choices(models)
        names = [name for _, name in choices]
        try:
            asked = checks.conditions(query.get("conditions"), "grid-single")
        except checks.LcsError:
            asked = inputs.first_conditions("grid-single", COUNT)
        chosen = query["pair"] if query.get("pair") in names else names[0] if names else None
        count_ = min(query.get("samples", SAMPLES), 4)
        return [
            gr.Dropdown(choices=choices, value=chosen), checks.as_text(asked), query.get("seed", 0), count_,
            inputs.board_html(asked, False), len(asked), "" if choices else _nothing(),
        ]  # fmt: skip

    return Linked(TAB, fields, restored, restore, f"{TAB}-go")


def _nothing() -> str:
    return draw.empty(
        "No pair is shipped yet",
        "This needs a standard and a local model trained on the same labels. Get one with",
        ["python -m lcs pull grid-single grid-single-local", "python -m lcs train grid-single-local --ship"],
    )


def _ghosts() -> str:
    return '<div class="cards n2">' + '<div class="card ghost"></div>' * 2 + "</div>"
