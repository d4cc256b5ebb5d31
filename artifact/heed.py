"""Beyond the paper: do objects heed each other's colours? Measured without sampling."""

from __future__ import annotations

from matplotlib.ticker import PercentFormatter

from artifact.context import Context
from artifact.plots import GRAY, new_figure
from artifact.steps import Checkpoint, Step
from lcs.experiments import get_run
from lcs.heed import heed

CAPTION = (
    "Two objects, one of colour A and one of B, as the label says; how the denoised second object changes if "
    "only the first changes its colour to that of the second. 0%: nothing, each object takes any of the asked colours "
    "(a palette); 100%: it turns to the colour that is left, by Bayes' rule for somebody who sees all but the colours "
    "(a count; out of reach for who must guess shapes and places). Bars: 95% over scenes."
)
SHADES = {3: "#7b4b94", 5: "#c9aed6"}  # by objects in training


def draw(context: Context) -> dict:
    found = {}
    for checkpoint in context.checkpoints:
        context.say(f"{checkpoint.run.name}: x0hat of one object if the other changes")
        found[checkpoint.run.name] = heed(
            checkpoint.run, context.model(checkpoint), scenes=3 * context.effort.samples, seed=context.settings.seed
        )
    figure = new_figure(6.4, 3.4)
    axes = figure.subplots()
    for share, name in ((0, "palette"), (1, "count")):
        axes.axhline(share, color=GRAY, lw=0.8, ls=":")
        axes.annotate(name, (1, share), xycoords=("axes fraction", "data"), xytext=(4, -3), textcoords="offset points")
    for checkpoint in context.checkpoints:
        name, shade = checkpoint.run.name, SHADES[checkpoint.run.objects]
        rows = found[name]
        error = [[r.heed - r.interval[0] for r in rows], [r.interval[1] - r.heed for r in rows]]
        axes.errorbar([r.sigma for r in rows], [r.heed for r in rows], error, fmt="o-", ms=3, color=shade, label=name)
        axes.set_xscale("log")
        axes.set_xticks([r.sigma for r in rows], [f"{r.sigma:g}" for r in rows])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="noise level", ylabel="heed")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(frameon=False, fontsize=8)
    context.figure("heed", figure, CAPTION)
    table = [{"model": name} | {f"noise level {r.sigma:g}": "{:+.0%} ({:+.0%} to {:+.0%})".format(r.heed, *r.interval)
                                for r in rows} for name, rows in found.items()]  # fmt: skip
    context.table("heed", table, "The numbers of the figure, with 95% intervals over scenes.")
    return {name: {f"{r.sigma:g}": [r.heed, *r.interval] for r in rows} for name, rows in found.items()}


def shown(scale: str) -> list[Checkpoint]:
    """Those that have seen two objects."""
    return [Checkpoint(get_run("color", m, scale)) for m in SHADES]


STEPS = [
    Step("heed", "whether objects heed each other's colours", "beyond the paper", draw, shown, 1, cost=40,
         makes=("heed",), sources=("heed.py", "bootstrap.py", "conditioning.py", "model/*.py", "render/*.py",
                                   "scenes/*.py")),
]  # fmt: skip
