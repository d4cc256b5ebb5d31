"""What the tabs share: the model picker, the board on which conditions are placed, links and downloads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gradio as gr
from gradio.processing_utils import save_bytes_to_cache
from gradio.utils import get_upload_folder

from lcs.app import checks, draw
from lcs.app.checks import guarded
from lcs.app.models import Models
from lcs.conditioning import get_conditioner
from lcs.errors import LcsError
from lcs.experiments import EXPERIMENTS, Experiment

QUICK = {"queue": False, "api_visibility": "private", "preprocess": False, "show_progress": "hidden"}  # of clicks

# Sends clicks on a board to the server, as fractions of it or as a colour, and shows the cell under the pointer.
BOARD_JS = """
element.addEventListener('click', (e) => {
  const color = e.target.closest('[data-color]');
  if (color) { trigger('click', {color: color.dataset.color, less: color.dataset.less === '1'}); return; }
  const board = e.target.closest('.board');
  if (!board) return;
  const r = board.getBoundingClientRect();
  const at = (v) => Math.min(Math.max(v, 0), 0.999999);
  trigger('click', {x: at((e.clientX - r.left) / r.width), y: at((e.clientY - r.top) / r.height)});
});
element.addEventListener('pointermove', (e) => {
  const board = e.target.closest('.board'), cell = element.querySelector('.cell');
  if (!board || !cell) return;
  const r = board.getBoundingClientRect(), n = 16;
  cell.setAttribute('x', Math.floor((e.clientX - r.left) / r.width * n) * 100 / n);
  cell.setAttribute('y', Math.floor((e.clientY - r.top) / r.height * n) * 100 / n);
});
"""


@dataclass(frozen=True)
class Site:
    """What every tab needs to know."""

    models: Models
    results: Path  # folder of the artifact's stored results
    pipeline: Path  # folder of the small text-to-image pipeline


@dataclass(frozen=True)
class Linked:
    """The part of a tab that a link restores: field name -> component, and how updates follow from its query."""

    tab: str
    fields: dict[str, gr.components.Component]
    outputs: list[gr.components.Component]
    restore: Callable[[dict], list]  # checked query -> one update per output; {} gives the defaults
    button: str  # id of the button that a link presses


# ---- model picker ---------------------------------------------------------------------------------


def range_label(objects: int) -> str:
    return "1 object" if objects == 1 else f"1-{objects} objects" if objects else "CIFAR-10"


def experiment_choices(models: Models, conditional: bool = True) -> list[tuple[str, str]]:
    names = dict.fromkeys(run.experiment.name for run in models.runs(conditional).values())
    return [(experiment_label(EXPERIMENTS[name]), name) for name in names]


def experiment_label(experiment: Experiment) -> str:
    return f"{experiment.title} · {experiment.paper_name}"


def range_choices(models: Models, experiment: str) -> list[tuple[str, int]]:
    runs = models.runs(conditional=False).values()
    return [(range_label(run.objects), run.objects) for run in runs if run.experiment.name == experiment]


def run_choices(models: Models, conditional: bool = True) -> list[tuple[str, str]]:
    """Every checkpoint on its own, by the name of its run."""
    return [
        (f"{run.experiment.title} · {range_label(run.objects)}", name) for name, run in models.runs(conditional).items()
    ]


def default_choice(models: Models, wanted: str = "grid-all", objects: int = 3) -> tuple[str | None, int | None]:
    """The wanted checkpoint if it is shipped, else the first that is."""
    runs = list(models.runs().values())
    for run in runs:
        if (run.experiment.name, run.objects) == (wanted, objects):
            return wanted, objects
    return (runs[0].experiment.name, runs[0].objects) if runs else (None, None)


def missing_note(models: Models) -> str:
    """Which experiments of the paper have no checkpoint here; empty if all have."""
    there = {run.experiment.name for run in models.runs(conditional=False).values()}
    missing = [e.name for e in EXPERIMENTS.values() if e.name not in there and e.objects]
    if not missing:
        return ""
    names = ", ".join(missing)
    if not there:
        return draw.empty(
            "No checkpoint is here yet",
            "The demo draws with trained models, and this folder of weights holds none. Get one with",
            ["python -m lcs pull grid-all", "python -m lcs train grid-all --objects 3 --ship"],
        )
    return (
        f'<details class="missing"><summary>{len(missing)} of the paper\'s experiments are not shipped yet</summary>'
        f"{names}. Train one with <code>lcs train NAME --ship</code> or fetch it with <code>lcs pull NAME</code>."
        "</details>"
    )


# ---- board ----------------------------------------------------------------------------------------


def is_color(experiment) -> bool:
    return experiment == "color"


def board_html(found, color: bool, pixel: tuple[float, float] | None = None) -> str:
    return draw.color_board(found) if color else draw.grid_board(found, pixel)


def conditioner_of(experiment) -> str:
    """Name of the conditioner; conditions of unconditional models are read as locations and then not used."""
    if not isinstance(experiment, str) or experiment not in EXPERIMENTS:
        return "grid-all"
    name = EXPERIMENTS[experiment].conditioner
    return "grid-all" if name == "none" else name


def first_conditions(experiment, count: int):
    """The paper's first K."""
    known = get_conditioner(conditioner_of(experiment)).test_conditions
    return known[: min(count, len(known))]


def board(elem_id: str) -> gr.HTML:
    return gr.HTML(board_html((), False), js_on_load=BOARD_JS, elem_id=elem_id, padding=False)


def after_click(event: dict, written, experiment) -> checks.Conditions:
    """The conditions after a click on the board; `event` is what the browser sent."""
    if not isinstance(event, dict):
        raise LcsError("a click on the board names a place or a colour")
    color = is_color(experiment)
    found = checks.conditions(written, conditioner_of(experiment))
    if not color:
        return checks.toggled(found, event.get("x"), event.get("y"))
    name = checks.check_color(event.get("color"))
    if event.get("less") is True:
        kept = list(found)
        if name in kept:
            kept.reverse()
            kept.remove(name)
            kept.reverse()
        return tuple(kept)
    if len(found) >= checks.MAX_CONDITIONS:
        raise LcsError(f"there are already {checks.MAX_CONDITIONS} objects; take one away first")
    return (*found, name)


def wire_board(
    surface: gr.HTML, written: gr.Textbox, count: gr.Slider, picker: gr.Dropdown, experiment_of: Callable
) -> None:
    """Board, text and K follow each other; the text is what counts. experiment_of(value of the picker) -> its name"""

    def clicked(written_, picked, event: gr.EventData):
        experiment = experiment_of(picked)
        found = after_click(event._data, written_, experiment)
        return checks.as_text(found), board_html(found, is_color(experiment)), len(found)

    def typed(written_, picked):
        experiment = experiment_of(picked)
        found = checks.conditions(written_, conditioner_of(experiment))
        return board_html(found, is_color(experiment)), len(found)

    def counted(count_, picked):
        experiment = experiment_of(picked)
        found = first_conditions(experiment, checks.whole(count_, "K", 0, checks.MAX_CONDITIONS))
        return checks.as_text(found), board_html(found, is_color(experiment))

    surface.click(with_event(clicked), [written, picker], [written, surface, count], trigger_mode="multiple", **QUICK)
    written.submit(guarded(typed), [written, picker], [surface, count], **QUICK)
    written.blur(guarded(typed), [written, picker], [surface, count], **QUICK)
    count.input(guarded(counted), [count, picker], [written, surface], trigger_mode="always_last", **QUICK)


def with_event(handler: Callable) -> Callable:
    """A guarded handler of two values and a click. Gradio hands the event only to an annotated parameter."""
    inner = guarded(handler)

    def clicked(first, second, event: gr.EventData):
        return inner(first, second, event)

    return clicked


# ---- links and downloads --------------------------------------------------------------------------


def link_row(tab: str, fields: dict[str, gr.components.Component]) -> None:
    """A button that makes, shows and copies a link with the state of the tab; it works without the server."""
    with gr.Row(elem_classes="link"):
        button = gr.Button("Copy link to this", size="sm", scale=0, min_width=150, elem_id=f"{tab}-link")
        shown = gr.Textbox(
            show_label=False, container=False, interactive=False, visible="hidden", elem_id=f"{tab}-link-text"
        )
    names = json.dumps(list(fields))
    code = f"""(...values) => {{
      const query = new URLSearchParams({{tab: {json.dumps(tab)}, go: '1'}});
      {names}.forEach((name, i) => {{
        const v = values[i]; if (v !== null && v !== undefined) query.set(name, String(v)); }});
      const url = location.origin + location.pathname + '?' + query;
      if (navigator.clipboard) navigator.clipboard.writeText(url).catch(() => {{}});
      return url; }}"""
    button.click(None, list(fields.values()), shown, js=code, api_visibility="private").then(
        lambda: gr.Textbox(visible=True), None, shown, **QUICK
    )


def downloads() -> tuple[gr.DownloadButton, gr.DownloadButton]:
    with gr.Row(elem_classes="downloads"):
        return (
            gr.DownloadButton("Picture (PNG)", size="sm", min_width=120),
            gr.DownloadButton("Numbers and settings (JSON)", size="sm", min_width=120),
        )


def offered(name: str, png: bytes, data: dict) -> tuple[str, str]:
    """Both files for the buttons; they lie in Gradio's cache, which is emptied by age."""
    cache, text = get_upload_folder(), json.dumps(data, indent=1)
    return save_bytes_to_cache(png, f"{name}.png", cache), save_bytes_to_cache(text.encode(), f"{name}.json", cache)


def press(elem_id: str) -> str:
    """JavaScript that presses a button, after the values it reads have arrived."""
    return f"() => {{ setTimeout(() => document.querySelector('#{elem_id}')?.click(), 60); }}"
