"""Length generalization against conditional locality, over models and checkpoints (v2 Fig 2, right)."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import pearsonr, spearmanr

from artifact.context import Context
from artifact.locality import MAPPED, SOURCES, numbers_of, trace
from artifact.plots import COLORS, GRAY, new_figure
from artifact.steps import Checkpoint, Step
from artifact.tables import summary
from lcs.bootstrap import interval
from lcs.experiments import EXPERIMENTS, STAGED, get_run

MARKERS = {"early": "v", "mid": "s", "late": "o"}


def scattered(scale: str) -> list[Checkpoint]:
    """Every experiment with locations, trained on 1-3 objects; three of them also earlier in training."""
    names = (*MAPPED, "grid-random", "grid-drop-one")
    early = [Checkpoint(get_run(name, 3, scale), stage) for name in STAGED for stage in ("early", "mid")]
    return early + [Checkpoint(get_run(name, 3, scale)) for name in names]


def scatter(context: Context) -> dict:
    points = []
    for checkpoint in context.checkpoints:
        counts = context.counts(checkpoint)
        found, measured = summary(counts), numbers_of(trace(context, checkpoint))
        points.append({
            "experiment": checkpoint.run.experiment.name, "stage": checkpoint.stage,
            "conditional_locality": measured["conditional_locality"], "k_max": found["k_max"],
            "length": found["k_max"] - checkpoint.run.objects, "in_place_at_6": found["in_place"].get(6),
        })  # fmt: skip
    numbers = {"points": points, "learned": correlate([p for p in points if not EXPERIMENTS[p["experiment"]].local]),
               "all": correlate(points)}  # fmt: skip
    context.figure("scatter", draw_scatter(points, numbers), CAPTION_SCATTER)
    context.table("scatter", [{k: f"{v:.2f}" if isinstance(v, float) else v for k, v in p.items()} for p in points],
                  "The points of the scatter.")  # fmt: skip
    return numbers


CAPTION_SCATTER = (
    "Length generalization (K_max minus the largest number of objects in training) against conditional locality, for "
    "checkpoints early, midway and late in training on 1-3 objects. Hollow: local models, whose locality is that of "
    "their architecture; the correlation that counts is that of the others, which learned theirs. r: Pearson "
    "correlation; its 95% interval is a bootstrap over models, each with all of its checkpoints."
)


def correlate(points: list[dict]) -> dict:
    """Pearson's r with its interval, and Spearman's; only the number of points and models where there is none."""
    x, y = (np.array([p[name] for p in points], float) for name in ("conditional_locality", "length"))
    models = list(dict.fromkeys(p["experiment"] for p in points))
    numbers: dict = {"n": len(points), "models": len(models)}
    if len(points) < 3 or not (np.ptp(x) > 0 and np.ptp(y) > 0):
        return numbers
    members = [np.flatnonzero([p["experiment"] == model for p in points]) for model in models]

    def of_models(chosen: np.ndarray) -> float:
        index = np.concatenate([members[m] for m in chosen])
        return _pearson(x[index], y[index])

    low, high = interval(of_models, len(models), draws=2000)
    return numbers | {"pearson": _pearson(x, y), "spearman": float(spearmanr(x, y).statistic), "low": low, "high": high}


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    return float(pearsonr(x, y).statistic) if np.ptp(x) > 0 and np.ptp(y) > 0 else float("nan")


def draw_scatter(points: list[dict], numbers: dict) -> Figure:
    figure = new_figure(7.2, 4.4)
    axes = figure.subplots()
    for experiment in dict.fromkeys(p["experiment"] for p in points):
        own, color = [p for p in points if p["experiment"] == experiment], COLORS[experiment]
        own.sort(key=lambda p: list(MARKERS).index(p["stage"]))  # the line follows training
        axes.plot([p["conditional_locality"] for p in own], [p["length"] for p in own], "-", color=color, lw=0.8,
                  alpha=0.6)  # fmt: skip
        face = "white" if EXPERIMENTS[experiment].local else color
        for p in own:
            axes.scatter(p["conditional_locality"], p["length"], s=60, marker=MARKERS[p["stage"]], color=face,
                         edgecolor=color if face == "white" else "white", zorder=3)  # fmt: skip
        axes.scatter([], [], s=60, color=face, edgecolor=color, label=experiment)
    for stage, marker in MARKERS.items():
        axes.scatter([], [], s=40, marker=marker, color=GRAY, label=stage)
    axes.axhline(0, color="#bbbbbb", lw=0.8)
    axes.set(xlabel="conditional locality", ylabel="K_max minus trained count")
    texts = [f"{name}: r = {f['pearson']:.2f} [{f['low']:.2f}, {f['high']:.2f}], {f['n']} points, {f['models']} models"
             for name, f in (("learned locality", numbers["learned"]), ("with local models", numbers["all"]))
             if "pearson" in f]  # fmt: skip
    axes.set_title("\n".join(texts), fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


STEPS = [
    Step("scatter", "length generalization against conditional locality", "v2 Fig 2 right", scatter, scattered, 3,
         cost=10, counted=True, traced=True, sources=SOURCES, makes=("scatter",)),
]  # fmt: skip
