"""The counter's own error, on held-out renders whose truth is known; and the choice of its thresholds.

Thresholds are chosen on the validation scenes and on generated images that were counted by eye
(`weights/counter-labelled.*`), the error is measured on the test scenes and on other such images (`tests/data`); none
of these are ever shown to the counter in training.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy.stats import rankdata

from lcs.counter.data import CounterData, join, render_split
from lcs.counter.degrade import DegradeSettings, degrade
from lcs.counter.detector import Counter, Detections, Detector, Thresholds
from lcs.counter.matching import pairs_within
from lcs.data.files import read_json
from lcs.experiments import GRID
from lcs.scenes import world
from lcs.scenes.placement import MAX_OBJECTS
from lcs.weights import WEIGHTS

TEST_IMAGES = 2_000
LABELLED = "counter-labelled"  # in weights/: 196 images of earlier models
VALIDATION_IMAGES = 1_300
PAIR_TOLERANCE = 2.0  # cells; generous, so that the centre error is not cut off by the pairing itself
LOWEST_SCORE = 0.05  # candidates below are never objects
HALF_DAMAGED = 0.5  # quality where, by construction of the damages, an object turns into a smear
CLEAN_LOSS = 0.002  # share of clean objects the quality threshold may reject
UNDAMAGED = DegradeSettings(styled_images=1.0, damaged_images=0.0)
DAMAGED = DegradeSettings(
    styled_images=0.5, damaged_images=1.0, damaged_objects=0.5, removed_objects=0.0, min_damage=0.5
)

TARGETS = {"exact_1_6": 0.97, "exact_7_12": 0.90, "center_cells": 0.5, "color": 0.97, "shape": 0.90}


def render_many(split: str, images: int) -> CounterData:
    return join([render_split(split, range(at, min(at + 130, images))) for at in range(0, images, 130)])


def degraded_images(data: CounterData, settings: DegradeSettings, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [N, H, W, 3] and the damage of each object [N, 12]."""
    result = degrade(data, torch.Generator().manual_seed(seed), settings)
    return (result.images * 255).round().byte().permute(0, 2, 3, 1).numpy(), result.strength.numpy()


# ---- pairing detections with the truth ------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One row per true object of all images, and one number per image."""

    image: np.ndarray  # int64 [O]
    slot: np.ndarray  # int64 [O]
    found: np.ndarray  # bool [O]
    error: np.ndarray  # float64 [O]: distance of the centres in cells; nan if not found
    correct: dict[str, np.ndarray]  # color, shape, size, material: bool [O], False if not found
    quality: np.ndarray  # float64 [O]: 0 if not found
    drawn: np.ndarray  # int64 [N]: detections per image


def compare(data: CounterData, detections: list[Detections]) -> Outcome:
    table = data.table
    image, slot = np.nonzero(np.arange(MAX_OBJECTS) < table.counts[:, None])
    first = np.concatenate([[0], np.cumsum(table.counts.astype(np.int64))])
    size = len(image)
    found, error, quality = np.zeros(size, bool), np.full(size, np.nan), np.zeros(size)
    correct = {name: np.zeros(size, bool) for name in ("color", "shape", "size", "material")}
    truth = {"color": table.colors, "shape": table.shapes, "size": table.sizes, "material": table.materials}
    for n, seen in enumerate(detections):
        asked = table.locations[n, : table.counts[n]]
        true, own = pairs_within(asked, seen.centers, PAIR_TOLERANCE)
        at = first[n] + true
        found[at] = True
        error[at] = np.linalg.norm(asked[true] - seen.centers[own], axis=1) * GRID
        quality[at] = seen.quality[own]
        labels = {"color": seen.colors, "shape": seen.shapes, "size": seen.sizes, "material": seen.materials}
        for name, label in labels.items():
            correct[name][at] = label[own] == truth[name][n, true]
    return Outcome(image, slot, found, error, correct, quality, np.array([len(d) for d in detections], np.int64))


# ---- thresholds -----------------------------------------------------------------------------------


def labelled_images(sheet: Path) -> tuple[np.ndarray, list[dict]]:
    """Generated images counted by eye: uint8 [N, S, S, 3] cut out of SHEET.png, and their rows in SHEET.json.

    A row says which run drew the image, for how many objects it was asked, and the count by eye.
    """
    about = read_json(sheet.with_suffix(".json"))
    size, columns = about["size"], about["columns"]
    pixels = np.asarray(Image.open(sheet.with_suffix(".png")).convert("RGB"))
    corners = [(i // columns * size, i % columns * size) for i in range(len(about["images"]))]
    return np.stack([pixels[y : y + size, x : x + size] for y, x in corners]), about["images"]


def choose_thresholds(
    detector: Detector, images: int = VALIDATION_IMAGES, seed: int = 1, sheet: Path = WEIGHTS / LABELLED
) -> Thresholds:
    """Quality: HALF_DAMAGED, or lower if that would reject more than CLEAN_LOSS of the undamaged validation objects.

    Score: the one that agrees with the eye on most of the labelled images, of those at which the exact counts of clean
    validation renders reach TARGETS by a standard error (if none does, of all); of several, the one that counts neither
    too many nor too few. Renders alone would choose a lower one, at which an object of two colours, which no render
    shows but generated images do, is counted twice.
    """
    data = render_many("validation", images)
    loose = Counter(detector, Thresholds(LOWEST_SCORE, 0.0))
    clean, styled = (loose.candidates(x) for x in (data.images, degraded_images(data, UNDAMAGED, seed)[0]))
    outcome = compare(join([data, data]), clean + styled)
    quality = min(HALF_DAMAGED, float(np.quantile(outcome.quality[outcome.found], CLEAN_LOSS)))
    quality = int(quality * 100) / 100
    generated, rows = labelled_images(sheet)
    drawn = loose.candidates(generated)
    grid = np.round(np.arange(0.10, 0.71, 0.01), 2)

    def too_many(seen: list[Detections], counts: np.ndarray) -> np.ndarray:  # int64 [score, image]
        kept = [d.scores[d.quality >= quality] for d in seen]
        return np.array([[(s >= score).sum() for s in kept] for score in grid]) - np.asarray(counts, np.int64)

    counts, right = data.table.counts, too_many(clean, data.table.counts) == 0
    allowed = np.ones(len(grid), bool)
    for wanted, among in (("exact_1_6", (counts >= 1) & (counts <= 6)), ("exact_7_12", counts >= 7)):
        share = right[:, among].mean(1)
        allowed &= share - np.sqrt(share * (1 - share) / among.sum()) >= TARGETS[wanted]
    excess = too_many(drawn, [row["count"] for row in rows])
    agreement = np.where(allowed | ~allowed.any(), (excess == 0).mean(1), -1)
    best = np.lexsort([np.abs(excess.sum(1)), -agreement])[0]
    return Thresholds(score=float(grid[best]), quality=quality)


# ---- the report -----------------------------------------------------------------------------------


def measure(detector: Detector, thresholds: Thresholds, images: int = TEST_IMAGES, seed: int = 2) -> dict:
    """The counter's error on held-out renders: rows by count and by size, totals, quality, robustness."""
    counter = Counter(detector, thresholds)
    data = render_many("test", images)
    outcome = compare(data, counter(data.images))
    counts = data.table.counts.astype(np.int64)
    groups = {str(c): np.array([c]) for c in range(MAX_OBJECTS + 1)}
    groups |= {"1-6": np.arange(1, 7), "7-12": np.arange(7, 13), "1-12": np.arange(1, 13)}
    by_count = {name: _row(outcome, counts, np.isin(counts, members)) for name, members in groups.items()}
    sizes = data.table.sizes[outcome.image, outcome.slot]
    by_size = {name: _object_numbers(outcome, sizes == number) for number, name in enumerate(world.SIZE_NAMES)}
    styled = compare(data, counter(degraded_images(data, UNDAMAGED, seed)[0]))
    exact_styled = {
        name: _share(styled.drawn == counts, np.isin(counts, groups[name])) for name in ("0", "1-6", "7-12")
    }
    return {
        "images": images,
        "thresholds": {"score": thresholds.score, "quality": thresholds.quality},
        "by_count": by_count,
        "by_size": by_size,
        "exact_count_styled": exact_styled,
        "quality": _quality(counter, data, seed),
        "targets": _targets(by_count),
    }


def _row(outcome: Outcome, counts: np.ndarray, images: np.ndarray) -> dict:
    difference = (outcome.drawn - counts)[images]
    return {
        "images": int(images.sum()),
        "exact": _share(outcome.drawn == counts, images),
        "within_1": float(np.mean(np.abs(difference) <= 1)) if len(difference) else None,
        "mean_difference": float(difference.mean()) if len(difference) else None,
        **_object_numbers(outcome, images[outcome.image]),
    }


def _object_numbers(outcome: Outcome, objects: np.ndarray) -> dict:
    """Over the true objects selected: recall, centre error, and attributes of those that were found."""
    found = objects & outcome.found
    errors = outcome.error[found]
    numbers = {
        "objects": int(objects.sum()),
        "found": _share(outcome.found, objects),
        "center_cells": float(errors.mean()) if len(errors) else None,
        "center_cells_95": float(np.quantile(errors, 0.95)) if len(errors) else None,
    }
    return numbers | {name: _share(right, found) for name, right in outcome.correct.items()}


def _quality(counter: Counter, data: CounterData, seed: int) -> dict:
    """How well quality tells undamaged from damaged objects, side by side in the same images.

    Damaged means a strength of at least a half. An object that was not even detected has quality 0.
    """
    images, strength = degraded_images(data, DAMAGED, seed)
    outcome = compare(data, counter.candidates(images))
    damage = strength[outcome.image, outcome.slot]
    clean, damaged = damage == 0, damage >= HALF_DAMAGED
    counted = outcome.quality >= counter.thresholds.quality
    bands = {"0.50-0.65": (0.5, 0.65), "0.65-0.80": (0.65, 0.8), "0.80-1.00": (0.8, 1.01)}
    return {
        "auc": auc(outcome.quality[clean], outcome.quality[damaged]),
        "clean_counted": _share(counted, clean),
        "damaged_counted": {
            name: _share(counted, (damage >= low) & (damage < high)) for name, (low, high) in bands.items()
        },
    }


def auc(high: np.ndarray, low: np.ndarray) -> float | None:
    """Probability that a value of `high` exceeds one of `low` (ties count half): the area under the ROC curve."""
    if not len(high) or not len(low):
        return None
    ranks = rankdata(np.concatenate([high, low]))
    return float((ranks[: len(high)].sum() - len(high) * (len(high) + 1) / 2) / (len(high) * len(low)))


def _share(flags: np.ndarray, among: np.ndarray) -> float | None:
    return float(flags[among].mean()) if among.any() else None


def _targets(by_count: dict) -> dict[str, bool]:
    """Which of the stated goals are reached."""
    whole = by_count["1-12"]
    reached = {
        "exact_1_6": by_count["1-6"]["exact"], "exact_7_12": by_count["7-12"]["exact"],
        "color": whole["color"], "shape": whole["shape"],
    }  # fmt: skip
    return {name: value >= TARGETS[name] for name, value in reached.items()} | {
        "center_cells": whole["center_cells"] < TARGETS["center_cells"]
    }


# ---- as a table -----------------------------------------------------------------------------------

COLUMNS = {
    "images": "images", "exact": "exact count", "within_1": "within 1", "found": "objects found",
    "center_cells": "centre error (cells)", "center_cells_95": "95% (cells)", "color": "colour", "shape": "shape",
    "size": "size", "material": "material",
}  # fmt: skip


def report_rows(report: dict) -> list[dict]:
    """One flat row per object count, per group of counts and per object size."""
    rows = [{"objects": name, **{c: row[c] for c in COLUMNS}} for name, row in report["by_count"].items()]
    return rows + [{"objects": name, **{c: row.get(c) for c in COLUMNS}} for name, row in report["by_size"].items()]


def to_csv(report: dict) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["objects", *COLUMNS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(report_rows(report))
    return text.getvalue()


def to_markdown(report: dict) -> str:
    def cell(name: str, value) -> str:
        if value is None:
            return ""
        if isinstance(value, float):
            return f"{value:.3f}" if name.startswith("center") else f"{100 * value:.1f}%"
        return str(value)

    lines = ["| objects | " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * (len(COLUMNS) + 1)]
    for row in report_rows(report):
        lines.append(f"| {row['objects']} | " + " | ".join(cell(c, row[c]) for c in COLUMNS) + " |")
    return "\n".join(lines) + "\n"
