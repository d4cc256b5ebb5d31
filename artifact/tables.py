"""Tables 1 and 2: K_max of every experiment and training range, and what is drawn for K = 0, beside the paper's."""

from __future__ import annotations

from collections.abc import Sequence

from scipy.stats import gamma

from artifact import paper
from artifact.context import Context
from artifact.plots import COLORS, new_figure
from artifact.steps import Checkpoint, Step
from lcs.experiments import paper_runs
from lcs.rule import KRow, k_max_interval

TABLE_1 = ("grid-all", "grid-single", "grid-single-local", "color", "list-all", "list-all-local")
NOT_SHIPPED = "not shipped"
TABLE_2 = ("grid-all", "grid-single", "grid-random", "grid-drop-one")


def checkpoints(scale: str, names: tuple[str, ...]) -> list[Checkpoint]:
    runs = [run for run in paper_runs(scale) if run.experiment.name in names]
    runs.sort(key=lambda run: (names.index(run.experiment.name), run.objects))
    return [Checkpoint(run) for run in runs]


def summary(counts: dict) -> dict:
    """What claims and the scatter need of one model's counts."""
    rows = [KRow(**row) for row in counts["rows"]]
    low, median, high = k_max_interval(rows, counts["objects"], counts["extras_allowed"])
    samples = counts["settings"]["samples"]
    return {
        "k_max": counts["k_max"], "low": low, "median": median, "high": high,
        "strict": counts["k_max_strict"], "in_place_only": counts["k_max_in_place"], "label": counts["label"],
        "tested": counts["k_tested"], "samples": samples, "objects": counts["objects"],
        "drawn_at_0": counts["drawn_at_0"], "extras": counts["extras"],
        "mean_at_0": mean_interval(next((row.extras for row in rows if row.k == 0), ())),
        "in_place": {row.k: sum(row.in_place) / len(row.in_place) for row in rows},
        "complete": {row.k: [row.complete, *row.complete_interval] for row in rows},
    }  # fmt: skip


def mean_interval(counts: Sequence[int]) -> tuple[float, float]:
    """95% interval of the mean of small counts, as of a Poisson rate (Jeffreys): wide if there are few of them."""
    if not counts:
        return 0.0, float("inf")
    low, high = gamma.ppf([0.025, 0.975], sum(counts) + 0.5, scale=1 / len(counts))
    return (float(low) if sum(counts) else 0.0), float(high)


def trained_on(objects: int) -> str:
    return "1" if objects == 1 else f"1-{objects}"


def table1(context: Context) -> dict:
    numbers = {c.run.name: summary(context.counts(c)) for c in context.checkpoints}
    wanted = [(c.run.experiment.name, c.run.objects) for c in checkpoints(context.settings.scale, TABLE_1)]
    wanted.insert(wanted.index(("grid-single", 2)), ("grid-single", 1))
    rows = []
    for name, objects in wanted:
        # With one object in every scene, "all locations" and "one location" are the same label.
        found = numbers.get("grid-all-m1" if (name, objects) == ("grid-single", 1) else f"{name}-m{objects}")
        rows.append({
            "experiment": name, "trained on": trained_on(objects),
            "paper": paper.K_MAX[name].get(objects, ""),
            "ours": found["label"] if found else NOT_SHIPPED,
            "95% interval": f"{found['low']}-{found['high']}" if found else "",
            "strict": found["strict"] if found else "",
            "in place": found["in_place_only"] if found else "",
            "samples per K": found["samples"] if found else "",
        })  # fmt: skip
    context.table(
        "table1", rows,
        "K_max: the largest K such that every K up to it succeeds by the paper's rule. Numbers after the plus are "
        "extra objects, where the conditioner leaves some unlabelled. The 95% interval is of the rule under the "
        "samples' posterior; strict: every single sample has to be right; in place: extras may be as many as they "
        "like. Our K goes up to 12 locations or 8 colours. Trained on one object, grid-single is grid-all: the two "
        "labels are the same.",
    )  # fmt: skip
    context.figure("in_place", draw_in_place(numbers), CAPTION_IN_PLACE)
    return numbers


CAPTION_IN_PLACE = (
    "Mean number of objects in place against the number asked for; the diagonal is perfect, the dotted line is the "
    "largest number seen in training."
)


def draw_in_place(numbers: dict):
    """One panel per training range, three in a row."""
    ranges = sorted({found["objects"] for found in numbers.values()})
    columns = min(len(ranges), 3)
    rows = -(-len(ranges) // columns)
    figure = new_figure(3.4 * columns + 1.6, 3.4 * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes in panels.flat[len(ranges) :]:
        axes.set_axis_off()
    for axes, objects in zip(panels.flat, ranges, strict=False):
        axes.plot([0, 12], [0, 12], color="#bbbbbb", lw=1)
        axes.axvline(objects, color="#888888", ls=":", lw=1)
        for name, found in numbers.items():
            if found["objects"] == objects:
                experiment = name.rsplit("-m", 1)[0]
                ks = sorted(int(k) for k in found["in_place"])
                values = [found["in_place"][k] if k in found["in_place"] else found["in_place"][str(k)] for k in ks]
                axes.plot(ks, values, "o-", ms=3, color=COLORS[experiment], label=experiment)
        title = f"trained on {trained_on(objects)} object{'s' * (objects > 1)}"
        axes.set(xlabel="K asked for", title=title, xlim=(0, 12.3), ylim=(0, 12.3))
        axes.legend(frameon=False, fontsize=7.5, loc="upper left")
    for axes in panels[:, 0]:
        axes.set_ylabel("objects in place")
    return figure


def table2(context: Context) -> dict:
    numbers = {c.run.name: summary(context.counts(c)) for c in context.checkpoints}

    def cell(name: str, objects: int, what: str) -> tuple[str, str]:
        found = numbers.get(f"{name}-m{objects}")
        if what == "K_max":
            theirs = "" if (name, objects) == ("grid-single", 1) else paper.K_MAX[name].get(objects, "")
            ours = f"{found['label']} [{found['low']}-{found['high']}]" if found else NOT_SHIPPED if theirs else ""
            return theirs, ours
        theirs = paper.DRAWN_AT_0.get(name, {}).get(objects, "")
        if found is None:
            return theirs, NOT_SHIPPED if theirs else ""
        zero, (low, high) = found["drawn_at_0"], found["mean_at_0"]
        span = str(zero["p5"]) if zero["p5"] == zero["p95"] else f"{zero['p5']}-{zero['p95']}"
        return theirs, f"{span} [{low:.1f}-{high:.1f}]"

    for what, caption in (
        ("K_max", "K_max by how much of the scene is labelled; in brackets the 95% interval."),
        (
            "K=0",
            "Number of objects drawn when none is asked for: 5th-95th percentile, and in brackets the 95% "
            "interval of the mean.",
        ),
    ):
        rows = []
        for objects in range(1, 7):
            row = {"trained on": trained_on(objects)}
            for name in TABLE_2:
                row[f"{name} (paper)"], row[f"{name} (ours)"] = cell(name, objects, what)
            rows.append(row)
        context.table("table2-" + ("top" if what == "K_max" else "bottom"), rows, caption)
    context.figure("in_place", draw_in_place(numbers), f"By how much of the scene is labelled. {CAPTION_IN_PLACE}")
    return numbers


STEPS = [
    Step("table1", "K_max of every experiment", "v1 Table 1, v2 in the text", table1,
         lambda scale: checkpoints(scale, TABLE_1), 1, cost=5, counted=True, makes=("table1", "in_place")),
    Step("table2", "K_max and K = 0 by how much is labelled", "v1 Table 2", table2,
         lambda scale: checkpoints(scale, TABLE_2), 1,
         cost=1, counted=True, makes=("table2-top", "table2-bottom", "in_place")),
]  # fmt: skip
