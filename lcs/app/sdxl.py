"""Tab 4: which words a text-to-image model listens to at a place, and how its concepts lie in feature space."""

from __future__ import annotations

import html
from collections.abc import Iterator

import gradio as gr
import numpy as np

import lcs
from lcs.app import checks, draw, inputs, maps
from lcs.app.checks import guarded
from lcs.app.inputs import QUICK, Linked, Site
from lcs.app.models import LANE, Done, gpu, stream
from lcs.app.pipelines import Pipelines, cosines_by_layer, draw_both, subject, words_over_time
from lcs.errors import LcsError

TAB = "sdxl"
MAX_STEPS, STEPS, GUIDANCE, MAX_CONCEPTS = 50, 20, 3.0, 10
# Each places two things, so that the local intervention has regions to work with.
EXAMPLES = {
    "cube and sphere": "a large red cube on the left and a large blue sphere on the right",
    "the same, swapped": "a large blue sphere on the left and a large red cube on the right",
    "at night": "a large green cylinder on the left and a large yellow cube on the right at night",
}


# ---- what runs in the lane ------------------------------------------------------------------------


@gpu
def _draw(
    pipelines: Pipelines, name: str, prompt: str, seed: int, steps: int, guidance: float, local: bool
) -> Iterator:
    """(images, status, JSON, PNG button, JSON button), live."""

    def work(emit):
        emit((0.0, []))
        return draw_both(
            pipelines.get(name), prompt, seed, steps, guidance, local, lambda d, seen: emit((d, list(seen)))
        )

    keep = gr.skip()
    for event in stream(work):
        if not isinstance(event, Done):
            done, images = event
            yield _pictures(images) if images else keep, draw.progress(done, "drawing"), keep, keep, keep
            continue
        images = event.result
        data = {"lcs": lcs.__version__, "model": name, "prompt": prompt, "seed": seed, "steps": steps,
                "guidance": guidance, "local": local}  # fmt: skip
        said = draw.note(
            "Click on a picture: which word does the model listen to there?"
            + (" On the right every region attends only to its own words." if local else "")
        )
        png = draw.sheet(images, ["as trained", "local intervention"][: len(images)])
        yield _pictures(images), said, data, *inputs.offered(f"{TAB}-seed{seed}", png, data)


@gpu
def _words(pipelines: Pipelines, name: str, prompt: str, place, seed: int, steps: int, guidance: float) -> Iterator:
    def work(emit):
        emit(0.0)
        return words_over_time(pipelines.get(name), prompt, place, seed, steps, guidance, emit)

    for event in stream(work):
        if not isinstance(event, Done):
            yield draw.progress(event, "leaving out one word at a time"), gr.skip()
            continue
        data = {"prompt": prompt, "place": list(place), "seed": seed, "steps": steps, "guidance": guidance,
                "influence": {when: words for when, words, _ in event.result}}  # fmt: skip
        yield _bars(event.result, place), data


@gpu
def _concepts(pipelines: Pipelines, name: str, chosen: list[str], steps: int) -> Iterator:
    def work(emit):
        emit(0.0)
        known = subject(name)
        prompts = [known.concept(one).prompt for one in chosen]
        return cosines_by_layer(pipelines.get(name), prompts, steps, emit)

    for event in stream(work):
        if not isinstance(event, Done):
            yield draw.progress(event, "one prompt after another"), gr.skip(), gr.skip()
            continue
        layers = {layer: np.round(matrix, 4).tolist() for layer, matrix in event.result.items()}
        data = {"model": name, "concepts": chosen, "layers": layers}
        yield _matrices(event.result, chosen), gr.Slider(maximum=len(layers), value=len(layers) // 2 + 1), data


# ---- how it is shown ------------------------------------------------------------------------------


def _pictures(images: list[np.ndarray]) -> str:
    titles = ("as trained", "local intervention")
    parts = [
        f'<figure class="card"><div class="board plain">{draw.picture(image)}</div>'
        f"<figcaption>{title}</figcaption></figure>"
        for image, title in zip(images, titles, strict=False)
    ]
    return f'<div class="cards n2">{"".join(parts)}</div>'


def _bars(found: list[tuple[str, dict[str, float], np.ndarray]], place: tuple[float, float]) -> str:
    """Influence of every word at the place at three noise levels, and its map at the middle one."""
    parts = []
    for when, words, _ in found:
        most = max(words.values(), default=0) or 1.0
        rows = "".join(
            f'<div class="bar"><span>{html.escape(word)}</span><i style="width:{100 * value / most:.0f}%"></i></div>'
            for word, value in words.items()
        )
        parts.append(f'<div class="curve"><div class="curve-title">{when}</div>{rows}</div>')
    _, words, layers = found[1]
    cards = [
        draw.card(draw.heat(layer), html.escape(word), draw.cross(*place), "heat")
        for word, layer in zip(words, layers, strict=True)
    ]
    return (
        f'<div class="panel"><h4>What moves the place ({place[0]:.2f}, {place[1]:.2f})</h4>'
        f'<div class="curve-row">{"".join(parts)}</div></div>'
        f'<h4 class="over below">Where each word matters, at middle noise</h4>'
        f'<div class="cards n13">{"".join(cards)}</div>'
    )


def _matrices(layers: dict[str, np.ndarray], names: list[str]) -> str:
    frames = []
    for i, (layer, matrix) in enumerate(layers.items()):
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th>{''.join(_cell(v) for v in row)}</tr>"
            for name, row in zip(names, matrix, strict=True)
        )
        off = matrix[~np.eye(len(matrix), dtype=bool)]
        on = " on" if i == len(layers) // 2 else ""
        frames.append(
            f'<div class="frame{on}" data-i="{i}"><div class="note">Layer <b>{html.escape(layer)}</b>: mean cosine of '
            f"different concepts {off.mean():.2f}. Low means that they point in different directions.</div>"
            f'<div class="scroll"><table class="matrix"><tr><th></th>{head}</tr>{rows}</table></div></div>'
        )
    return "".join(frames)


def _cell(value: float) -> str:
    color = f"rgba(228,87,46,{min(abs(value), 1):.2f})" if value >= 0 else f"rgba(79,107,237,{min(abs(value), 1):.2f})"
    return f'<td style="background:{color}">{value:.2f}</td>'


# ---- checks ---------------------------------------------------------------------------------------


def _guidance(value) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 1 <= value <= 15:  # also refuses NaN
        raise LcsError(f"the guidance must be a number from 1 to 15, got {str(value)[:40]}")
    return float(value)


def _prompt(value) -> str:
    found = checks.prompt(value)
    if not found:
        raise LcsError("the prompt is empty; say what to draw")
    return found


def _steps(value) -> int:
    return checks.whole(value, "the number of steps", 2, MAX_STEPS)


def _chosen(value, name: str) -> list[str]:
    if not isinstance(value, list) or not 2 <= len(value) <= MAX_CONCEPTS:
        raise LcsError(f"choose 2 to {MAX_CONCEPTS} concepts")
    known = [concept.name for concept in subject(name).concepts]
    return [checks.choice(one, "the concept", known) for one in dict.fromkeys(map(str, value))]


def _known(pipelines: Pipelines, name) -> str:
    return checks.choice(name, "the model", pipelines.names())


# ---- the tab --------------------------------------------------------------------------------------


def build(site: Site) -> Linked | None:
    pipelines = Pipelines(site.pipeline)
    names = pipelines.names()
    gr.HTML(
        '<p class="lead">The same question for text: at a place of the image, does the model listen only to the words '
        "<em>about that place</em>? And do its concepts point in <em>different directions</em> inside the network?</p>"
    )
    if not names:
        gr.HTML(
            draw.empty(
                "No text-to-image model is here yet",
                "mini-sdxl, a small model with SDXL's architecture, belongs into the folder <code>mini-sdxl</code> of "
                "the weights; SDXL base is offered if it is in the local Hugging Face cache and there is a GPU. Then "
                "start the app again.",
                ["python -m lcs sdxl --help"],
            ),
            elem_id=f"{TAB}-empty",
        )
        return None
    study = subject(names[0])

    @guarded
    def sdxl(model, prompt, seed, steps, guidance, local):
        """Draws a prompt; with `local` also with every region attending only to its own words."""
        name = _known(pipelines, model)
        values = _prompt(prompt), checks.seed(seed), _steps(steps), _guidance(guidance)
        yield from _draw(pipelines, name, *values, checks.flag(local, "local"))

    @guarded
    def sdxl_words(model, prompt, seed, steps, guidance, x, y):
        """How much leaving out each word changes the prediction at (x, y), at three noise levels."""
        name, place = _known(pipelines, model), (checks.fraction(x, "x"), checks.fraction(y, "y"))
        values = checks.seed(seed), _steps(steps), _guidance(guidance)
        yield from _words(pipelines, name, _prompt(prompt), place, *values)

    @guarded
    def sdxl_concepts(model, concepts, steps):
        """Cosines between the mean differences of concepts, for every transformer block."""
        name = _known(pipelines, model)
        yield from _concepts(pipelines, name, _chosen(concepts, name), _steps(steps))

    with gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=290):
            prompt = gr.Textbox(study.pixel_prompt, label="Prompt", lines=2, max_length=checks.MAX_TEXT,
                                elem_id=f"{TAB}-prompt")  # fmt: skip
            with gr.Row(elem_classes="examples"):
                examples = [gr.Button(name, size="sm", elem_classes="example", min_width=90) for name in EXAMPLES]
            local = gr.Checkbox(True, label="also with the local intervention", elem_id=f"{TAB}-local")
            with gr.Accordion("Sampling", open=False):
                model = gr.Radio(names, value=names[0], label="Model")
                with gr.Row():
                    seed = gr.Number(0, label="Seed", precision=0, min_width=80)
                    steps = gr.Slider(2, MAX_STEPS, STEPS, step=1, label="Steps", min_width=120)
                    guidance = gr.Slider(1, 15, GUIDANCE, step=0.5, label="Guidance", min_width=120)
                with gr.Row():
                    x = gr.Number(0.25, label="Place x", step=0.01, min_width=80)
                    y = gr.Number(0.55, label="Place y", step=0.01, min_width=80)
            with gr.Row(elem_classes="actions"):
                go = gr.Button("Draw", variant="primary", elem_id=f"{TAB}-go", min_width=80)
                ask = gr.Button("Explain place", elem_id=f"{TAB}-ask", min_width=110)
                stop = gr.Button("Stop", variant="stop", min_width=60)
        with gr.Column(scale=4, min_width=320):
            status = gr.HTML(draw.note("Press <b>Draw</b>."), elem_id=f"{TAB}-status", label="message")
            shown = gr.HTML('<div class="cards n2"><div class="card ghost"></div><div class="card ghost"></div></div>',
                            js_on_load=inputs.BOARD_JS, elem_id=f"{TAB}-images", label="images")  # fmt: skip
            words = gr.HTML("", elem_id=f"{TAB}-words", label="words")
            png, numbers = inputs.downloads()
            fields = {"prompt": prompt, "seed": seed, "steps": steps, "local": local, "x": x, "y": y}
            inputs.link_row(TAB, fields)
            with gr.Accordion("Numbers", open=False):
                data = gr.JSON(label="numbers", show_label=False, max_height=320)
    with gr.Accordion("Concepts in feature space", open=True), gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=290):
            chosen = gr.CheckboxGroup([c.name for c in study.concepts], value=list(study.shown),
                                      label=f"2 to {MAX_CONCEPTS} concepts", elem_id=f"{TAB}-concepts")  # fmt: skip
            measure = gr.Button("Measure cosines", elem_id=f"{TAB}-measure")
        with gr.Column(scale=4, min_width=320):
            layer = gr.Slider(1, 10, 5, step=1, label="Layer, from input to output", buttons=[])
            matrix = gr.HTML(
                draw.empty("No matrix yet", "One matrix of cosines per transformer block will be here."),
                elem_id=f"{TAB}-matrix", label="matrix",
            )  # fmt: skip
            cosines = gr.JSON(visible=False, label="cosines")

    options = {"preprocess": False, "show_progress": "minimal", **LANE}
    common = [model, prompt, seed, steps, guidance]
    drawn = go.click(sdxl, [*common, local], [shown, status, data, png, numbers], api_name="sdxl",
                     show_progress_on=[status], **options)  # fmt: skip
    asked = ask.click(sdxl_words, [*common, x, y], [words, data], api_name="sdxl_words", show_progress_on=[words],
                      **options)  # fmt: skip
    measured = measure.click(sdxl_concepts, [model, chosen, steps], [matrix, layer, cosines], api_name="sdxl_concepts",
                             show_progress_on=[matrix], **options)  # fmt: skip
    stop.click(None, cancels=[drawn, asked, measured], api_visibility="private").then(
        lambda: draw.note("Stopped."), None, status, **QUICK
    )
    layer.change(None, layer, None, js=f"(at) => ({maps.FRAME_JS})(at, '#{TAB}-matrix')", api_visibility="private")

    @guarded
    def placed(event_):
        at = event_._data if isinstance(event_._data, dict) else {}
        return round(checks.fraction(at.get("x"), "x"), 4), round(checks.fraction(at.get("y"), "y"), 4)

    def on_click(event: gr.EventData):
        return placed(event)

    shown.click(on_click, None, [x, y], **QUICK).success(None, js=inputs.press(f"{TAB}-ask"), api_visibility="private")
    for button, text in zip(examples, EXAMPLES.values(), strict=True):
        button.click(lambda text=text: text, None, prompt, **QUICK).success(
            None, js=inputs.press(f"{TAB}-go"), api_visibility="private"
        )

    def restore(query: dict) -> list:
        return [query.get("prompt", study.pixel_prompt), query.get("seed", 0), query.get("steps", STEPS),
                query.get("local", True), query.get("x", 0.25), query.get("y", 0.55)]  # fmt: skip

    return Linked(TAB, fields, list(fields.values()), restore, f"{TAB}-go")
