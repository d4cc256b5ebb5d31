"""Sampling for the tabs: live previews, what the counter found, and the result as plain data."""

from __future__ import annotations

import time
from collections import Counter as Multiset
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

import lcs
from lcs.app import checks, draw
from lcs.app.models import Models, Often
from lcs.conditioning import get_conditioner
from lcs.counter.detector import Detections
from lcs.counter.matching import pairs_within
from lcs.errors import LcsError
from lcs.experiments import Run
from lcs.rule import LABELS_ALL, TOLERANCE_CELLS, allowed_extras
from lcs.sampling import sample
from lcs.scenes import world
from lcs.training.batches import to_rgb


@dataclass(frozen=True)
class Request:
    """A checked request for samples: image i starts from seed `seeds[i]` and is given `conditions[i]`."""

    run: Run
    conditions: tuple[checks.Conditions, ...]
    seeds: tuple[int, ...]
    steps: int
    solver: str


@dataclass(frozen=True)
class Sampled:
    request: Request
    images: np.ndarray  # uint8 [n, H, W, 3]
    found: list[Detections] | None  # None if no counter is shipped
    matched: list[list[int]]  # indices into `found` of the objects that were asked for
    seconds: float

    def in_place(self, i: int) -> int:
        return len(self.matched[i])

    def complete(self, i: int) -> bool:
        """All in place, and no more extras than the training labels may have left out."""
        extras = len(self.found[i]) - self.in_place(i)
        return self.in_place(i) == len(self.request.conditions[i]) and extras <= allowed_extras(self.request.run)


def draw_samples(models: Models, request: Request, emit: Callable[[object], None]) -> Sampled:
    """Runs in the compute lane; emits (step, preview images) as it goes."""
    began = time.monotonic()
    conditioner = get_conditioner(request.run.experiment.conditioner)
    labels = np.stack([conditioner.encode_conditions(c) for c in request.conditions])
    emit((0, None))
    model = models.model(request.run)
    due = Often()

    def preview(step: int, _x, _sigma: float, x0hat) -> None:
        emit((step + 1, to_rgb(x0hat, request.run)) if due() else (step + 1, None))

    x = sample(request.run, model, labels, request.seeds, request.steps, request.solver, preview)
    images = to_rgb(x, request.run)
    try:
        found = models.counter()(images)
    except LcsError:  # no counter in this folder of weights: the pictures are still worth showing
        found = None
    matched = [[] for _ in images] if found is None else list(map(match_objects, request.conditions, found))
    return Sampled(request, images, found, matched, time.monotonic() - began)


def match_objects(asked: checks.Conditions, found: Detections) -> list[int]:
    """Which found objects were asked for: the nearest within the tolerance, or by colour."""
    if asked and isinstance(asked[0], str):
        left, ours = Multiset(asked), []
        for i, color in enumerate(found.colors):
            if left[world.COLOR_NAMES[color]] > 0:
                left[world.COLOR_NAMES[color]] -= 1
                ours.append(i)
        return ours
    return [int(i) for i in pairs_within(np.array(asked).reshape(-1, 2), found.centers, TOLERANCE_CELLS)[1]]


# ---- how it is shown ------------------------------------------------------------------------------


def preview_cards(request: Request, images: np.ndarray, captions: Sequence[str] | None = None) -> str:
    """The denoiser's current guess, with the conditions on it."""
    captions = captions or [f"asked <b>{len(c)}</b>" for c in request.conditions]
    marks = [_marks(c) for c in request.conditions]
    return draw.cards([draw.card(*one) for one in zip(images, captions, marks, strict=True)])


def _marks(asked: checks.Conditions) -> str:
    return draw.dots(asked) if asked and not isinstance(asked[0], str) else ""


def caption(sampled: Sampled, i: int) -> str:
    """'asked 6, drawn 6, in place 6'"""
    asked = len(sampled.request.conditions[i])
    if sampled.found is None:
        return f"asked <b>{asked}</b>"
    where = "matching" if sampled.request.run.experiment.conditioner == "color" else "in place"
    drawn, in_place = len(sampled.found[i]), sampled.in_place(i)
    return f"asked <b>{asked}</b>, drawn <b>{drawn}</b>, {where} <b>{in_place}</b>"


def sample_cards(sampled: Sampled, title: str = "") -> str:
    items = []
    for i, image in enumerate(sampled.images):
        over = _marks(sampled.request.conditions[i])
        state = ""
        if sampled.found is not None:
            over = draw.boxes(sampled.found[i], sampled.matched[i]) + over
            state = "complete" if sampled.complete(i) else "failed"
        items.append(draw.card(image, caption(sampled, i), over, state))
    return draw.cards(items, title)


def verdict(sampled: Sampled) -> str:
    """One sentence about all samples."""
    run, n = sampled.request.run, len(sampled.images)
    if sampled.found is None:
        return draw.note("No counter is shipped here, so nobody has counted these pictures.")
    good = sum(sampled.complete(i) for i in range(n))
    most = max(map(len, sampled.request.conditions))
    seen = "never saw more than one object" if run.objects == 1 else f"never saw more than {run.objects} objects"
    beyond = f" The model {seen} in training." if most > run.objects else ""
    what = (
        "have exactly what was asked for" if LABELS_ALL[run.experiment.conditioner] else "have all that was asked for"
    )
    return draw.note(f"<b>{good} of {n}</b> {what}.{beyond}", "good" if 2 * good >= n else "bad")


def as_data(sampled: Sampled) -> dict:
    """Everything needed to make it again, and what came out."""
    request = sampled.request
    rows = []
    for i, asked in enumerate(request.conditions):
        row: dict = {"seed": request.seeds[i], "conditions": [c if isinstance(c, str) else list(c) for c in asked]}
        row["asked"] = len(asked)
        if sampled.found is not None:
            d = sampled.found[i]
            row |= {"drawn": len(d), "in_place": sampled.in_place(i), "complete": sampled.complete(i)}
            row["objects"] = [
                {"what": name, "center": [round(float(v), 4) for v in d.centers[j]],
                 "box": [round(float(v), 4) for v in d.boxes[j]], "asked_for": j in sampled.matched[i]}
                for j, name in enumerate(d.names())
            ]  # fmt: skip
        rows.append(row)
    return {
        "lcs": lcs.__version__, "run": request.run.name, "scale": request.run.scale.name,
        "experiment": request.run.experiment.name, "trained_on": list(range(1, request.run.objects + 1)),
        "steps": request.steps, "solver": request.solver, "seconds": round(sampled.seconds, 2), "samples": rows,
    }  # fmt: skip


def sheet(sampled: Sampled) -> bytes:
    plain = [caption(sampled, i).replace("<b>", "").replace("</b>", "") for i in range(len(sampled.images))]
    return draw.sheet(
        sampled.images, plain, sampled.request.conditions, sampled.found or (), sampled.matched,
        columns=4 if len(plain) != 13 else 5,
    )  # fmt: skip
