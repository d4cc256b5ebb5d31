"""Beyond the paper: what a model leaves undone of K asked locations, measured at high noise without sampling."""

from __future__ import annotations

from matplotlib.ticker import PercentFormatter

from artifact.context import Context
from artifact.plots import COLORS, GRAY, new_figure
from artifact.steps import Checkpoint, Step
from lcs.experiments import get_run
from lcs.probe import SIGMA, probe

SHOWN = ("grid-all", "grid-random", "grid-drop-one", "grid-single", "list-all")
OBJECTS = 3
CAPTION = (
    f"What is left undone of K asked locations at noise level {SIGMA:g}, where the noisy image tells nothing: error of "
    "the denoised image on renders with objects at these locations, between what cannot be known (0%) and the same "
    "model without its label (100%; beyond, it draws something else than it was asked for). No sampling and no counter "
    "is involved. Gray: as many objects as in training."
)


def undone(context: Context) -> dict:
    found = {}
    for checkpoint in context.checkpoints:
        context.say(f"{checkpoint.run.name}: K = 1..12")
        found[checkpoint.run.name] = probe(
            checkpoint.run, context.model(checkpoint), renders=3 * context.effort.samples, seed=context.settings.seed
        )
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    axes.axvspan(0.5, OBJECTS + 0.5, color="#eeeeee", zorder=0)
    axes.axhline(1, color=GRAY, lw=0.8, ls=":")
    for checkpoint in context.checkpoints:
        rows = found[checkpoint.run.name]
        name = checkpoint.run.experiment.name
        axes.plot([r.k for r in rows], [r.unfollowed for r in rows], "o-", ms=3, color=COLORS[name], label=name)
    axes.set(xlabel="K asked locations", ylabel="left undone", ylim=(-0.1, 1.6), xlim=(0.5, 12.5))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(frameon=False, fontsize=8)
    context.figure("undone", figure, CAPTION)
    table = [{"experiment": name} | {f"K = {r.k}": f"{r.unfollowed:.0%}" for r in rows} for name, rows in found.items()]
    context.table("undone", table, "The numbers of the figure.")
    return {name: {str(r.k): r.unfollowed for r in rows} for name, rows in found.items()}


def shown(scale: str) -> list[Checkpoint]:
    return [Checkpoint(get_run(name, OBJECTS, scale)) for name in SHOWN]


STEPS = [
    Step("undone", "what is left undone at high noise", "beyond the paper", undone, shown, 1, cost=60,
         makes=("undone",), sources=("probe.py", "conditioning.py", "model/*.py", "render/*.py", "scenes/*.py")),
]  # fmt: skip
