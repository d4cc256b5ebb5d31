"""Locality for the tabs: one pixel over the noise schedule, with progress, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gradio as gr
import numpy as np
import torch

from lcs.app import checks, draw
from lcs.app.inputs import QUICK
from lcs.app.models import LANE, Models, pulses
from lcs.experiments import GRID, Run
from lcs.locality import CHUNK, LocalityTrace, Probe, trace_locality
from lcs.training.batches import to_rgb

STEPS = 16  # of Heun's method
LEVELS = 10  # noise levels that are measured: with six conditions, a map of one pixel takes 2 to 3 s
NEAR = 1.5 / GRID  # a pixel belongs to a condition this close
FIRST = 5  # the frame that is shown first: noise about the size of the image's contrast

# Shows one frame of every panel and moves the cursors of its curves; the slider counts from 1.
FRAME_JS = """(at, root) => {
  document.querySelectorAll(root + ' .frame').forEach((f) => f.classList.toggle('on', Number(f.dataset.i) === at - 1));
  document.querySelectorAll(root + ' .curve svg').forEach((s) => {
    const d = s.dataset, n = Math.max(Number(d.count) - 1, 1);
    const x = Number(d.left) + (Number(d.right) - Number(d.left)) * Math.min(at - 1, n) / n;
    s.querySelector('.cursor').setAttribute('d', `M${x} 20V122`); });
}"""


def own_condition(conditions: checks.Conditions, pixel: tuple[float, float]) -> int | None:
    """The nearest location, if it is near enough to be what the pixel shows."""
    if not conditions or isinstance(conditions[0], str):
        return None
    distance = [float(np.hypot(x - pixel[0], y - pixel[1])) for x, y in conditions]
    nearest = int(np.argmin(distance))
    return nearest if distance[nearest] <= NEAR else None


def measure(
    models: Models, run: Run, conditions: checks.Conditions, pixel: tuple[float, float], seed: int,
    tell: Callable[[float], None], levels: int = LEVELS, steps: int = STEPS,
) -> LocalityTrace:  # fmt: skip
    """Runs in the compute lane; tell(share done) may raise to stop."""
    if run.experiment.conditioner == "none":
        conditions = ()
    probe = Probe("pixel", pixel, own_condition(conditions, pixel))
    record = sorted({round(i) for i in np.linspace(0, steps - 1, levels)})
    passes = 2 * steps - 1 + -(-levels // CHUNK) + -(-levels * (1 + len(conditions)) // CHUNK)
    tell(0.0)
    model = models.model(run)
    with pulses(model, lambda count: tell(count / passes)):
        return trace_locality(run, model, conditions, (seed,), steps, record, [probe])


# ---- how it is shown ------------------------------------------------------------------------------


def panel(run: Run, trace: LocalityTrace, title: str, top: float | None = None) -> str:
    """Frames over the noise levels, and curves. `top` makes the influence axes of two panels alike."""
    pixel = trace.probes[0].location
    side = 100 * trace.sides[:, 0] / trace.maps.shape[-1]
    influence = trace.influence[:, 0, :, 0]  # [T, K]
    images = to_rgb(torch.from_numpy(trace.x0hat), run)
    frames = []
    for t, sigma in enumerate(trace.sigmas):
        square = _square(trace, t)
        prediction = _influence_marks(trace.conditions, influence[t], float(influence.max(initial=0)))
        on = " on" if t == FIRST - 1 else ""
        frames.append(
            f'<div class="frame{on}" data-i="{t}"><div class="pair"><figure>'
            f"{draw.picture(draw.heat(trace.maps[t, 0]), square + draw.cross(*pixel), 'sharp')}"
            f"<figcaption>Pixels that matter at &#963; = {sigma:.2g}. The square holds 90% of the gradient: "
            f"{side[t]:.0f}% of the width.</figcaption></figure><figure>"
            f"{draw.picture(images[t], prediction + draw.cross(*pixel))}"
            f"<figcaption>{_words(trace, influence[t])}</figcaption></figure></div></div>"
        )
    rows = draw.curves(trace.sigmas, {"90% square": side}, "How far it looks", "% of the width", top=100)
    if influence.shape[1]:
        rows += draw.curves(
            trace.sigmas, _series(trace, influence), "What it listens to", "change at the pixel",
            top=top, strong=[OWN],
        )  # fmt: skip
    return f'<div class="panel"><h4>{title}</h4>{"".join(frames)}<div class="curve-row">{rows}</div></div>'


OWN = "the location here"


def _series(trace: LocalityTrace, influence: np.ndarray) -> dict[str, Sequence[float]]:
    """Influence curves: its own condition and the sum of the others; or all together if none is its own."""
    own = trace.probes[0].condition
    if own is None:
        return {"all conditions together": influence.sum(axis=1)}
    return {OWN: influence[:, own], "all others together": influence.sum(axis=1) - influence[:, own]}


def largest(trace: LocalityTrace) -> float:
    influence = trace.influence[:, 0, :, 0]
    return max((float(np.max(v)) for v in _series(trace, influence).values()), default=0.0) if influence.size else 0.0


def _square(trace: LocalityTrace, t: int) -> str:
    size, (x, y) = trace.maps.shape[-1], trace.probes[0].location
    half = trace.sides[t, 0] / 2
    left, top = int(x * size) + 0.5 - half, int(y * size) + 0.5 - half
    scale = 100 / size
    return (
        f'<rect class="square" x="{left * scale:.2f}" y="{top * scale:.2f}" width="{2 * half * scale:.2f}" '
        f'height="{2 * half * scale:.2f}"/>'
    )


def _influence_marks(conditions: checks.Conditions, influence: np.ndarray, most: float) -> str:
    """A disc per location, the larger the more it changes the pixel."""
    if not conditions or isinstance(conditions[0], str):
        return ""
    marks = []
    for (x, y), value in zip(conditions, influence, strict=True):
        share = float(value) / most if most > 0 else 0.0
        marks.append(
            f'<circle cx="{100 * x:.2f}" cy="{100 * y:.2f}" r="{1.4 + 7 * share**0.5:.2f}" fill="{draw.ASKED}" '
            f'fill-opacity="{0.25 + 0.6 * share:.2f}" stroke="#fff" stroke-width=".6"/>'
        )
    return "".join(marks)


def _words(trace: LocalityTrace, influence: np.ndarray) -> str:
    """The prediction's caption: how much of the influence comes from where."""
    if not len(influence):
        return "What the model predicts; it takes no conditions."
    total, own = float(influence.sum()), trace.probes[0].condition
    if total == 0:
        return "What the model predicts. No condition moves this pixel here."
    if own is None:
        return "What the model predicts. Discs: how much each condition moves the pixel."
    return f"What the model predicts. {100 * float(influence[own]) / total:.0f}% of the influence is the location here."


def trace_sheet(traces: Sequence[LocalityTrace]) -> bytes:
    """All maps of one or two models as a PNG, a row of noise levels after another."""
    images = [draw.heat(trace.maps[t, 0]) for trace in traces for t in range(len(trace.sigmas))]
    said = [f"{trace.run}, sigma {sigma:.2g}" for trace in traces for sigma in trace.sigmas]
    return draw.sheet(images, said, columns=6)


def wire(
    tab: str, measured: Callable, fields: dict, outputs: list, go: gr.Button, stop: gr.Button, level: gr.Slider
) -> None:
    """The buttons of a tab with maps: `go` measures, `stop` cancels, `level` shows one noise level.

    `outputs` are the panels, the status line, the numbers and the two downloads.
    """
    status, show = outputs[1], f"(at) => ({FRAME_JS})(at, '#{tab}-maps')"
    event = go.click(
        measured, list(fields.values()), outputs, api_name=tab, preprocess=False,
        show_progress="minimal", show_progress_on=[status], **LANE,
    )  # fmt: skip
    event.success(None, level, None, js=show, api_visibility="private")
    level.change(None, level, None, js=show, api_visibility="private")
    stopped = stop.click(None, cancels=[event], api_visibility="private")
    stopped.then(lambda: draw.note("Stopped."), None, status, **QUICK)
