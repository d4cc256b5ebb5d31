"""Does an image show what its prompt asked for? Judged by the project's own counter, never by eye.

An asked object is found if some detection has its colour and its shape (whichever of the two the prompt names);
every detection serves one object only. `right` asks that all objects are found; `strict` also that nothing else is
in the image and that objects stand from left to right in the order of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np

from lcs.counter.detector import Counter, Detections
from lcs.errors import LcsError
from lcs.rule import wilson
from lcs.scenes import world
from lcs.sdxl.captions import Thing, evaluation_prompts, place_of
from lcs.sdxl.generate import GUIDANCE, STEPS, generate_many
from lcs.sdxl.sampling import Pipe
from lcs.sdxl.views import look


@dataclass(frozen=True)
class Verdict:
    right: bool  # colour and shape of every asked object
    colors: bool  # colours alone
    shapes: bool  # shapes alone
    strict: bool  # right, nothing else, and in the order of the prompt
    count: bool  # as many objects as asked
    placed: bool  # right, and each at the asked place


def judge(asked: Sequence[Thing], seen: Detections) -> Verdict:
    """One image."""
    n = len(asked)
    full = _assignments(asked, seen, ("color", "shape"))
    there = _assignments(asked, seen, ("color", "shape", "place"))
    ordered = any(all(seen.centers[a][0] < seen.centers[b][0] for a, b in pairwise(p)) for p in full)
    count = len(seen) == n
    return Verdict(
        right=bool(full),
        colors=bool(_assignments(asked, seen, ("color",))),
        shapes=bool(_assignments(asked, seen, ("shape",))),
        strict=bool(full) and count and ordered,
        count=count,
        placed=bool(there),
    )


def _assignments(asked: Sequence[Thing], seen: Detections, by: Sequence[str]) -> list[tuple[int, ...]]:
    """All ways to give each asked object a detection of its own that agrees in the attributes of `by`."""
    columns = {"color": (seen.colors, world.COLOR_NAMES), "shape": (seen.shapes, world.SHAPES)}

    def fits(thing: Thing, i: int) -> bool:
        for attribute in by:
            wanted = getattr(thing, attribute)
            if attribute == "place":
                drawn = place_of(float(seen.centers[i][0]))
            else:
                indices, names = columns[attribute]
                drawn = names[indices[i]]
            if wanted is not None and drawn != wanted:
                return False
        return True

    return [
        p for p in permutations(range(len(seen)), len(asked)) if all(fits(t, i) for t, i in zip(asked, p, strict=True))
    ]


@dataclass(frozen=True)
class Obedience:
    """Verdicts on held-out prompts."""

    objects: int
    prompts: tuple[str, ...]
    asked: tuple[tuple[Thing, ...], ...]
    verdicts: tuple[Verdict, ...]
    images: np.ndarray  # uint8 [N, H, W, 3]
    steps: int
    guidance: float

    def count(self, what: str = "right") -> int:
        return sum(getattr(v, what) for v in self.verdicts)

    def row(self) -> dict:
        n = len(self.verdicts)
        low, high = wilson(self.count(), n)
        return {
            "objects": self.objects, "prompts": n, "right": self.count() / n, "low": low, "high": high,
            **{name: self.count(name) / n for name in ("colors", "shapes", "strict", "count", "placed")},
            "steps": self.steps, "guidance": self.guidance,
        }  # fmt: skip

    def by_size(self) -> dict[str, tuple[int, int]]:
        """'large', 'small' or 'free' (no small object asked, size left open) -> (right, prompts)."""
        table: dict[str, tuple[int, int]] = {}
        for things, verdict in zip(self.asked, self.verdicts, strict=True):
            sizes = {t.size for t in things}
            key = "small" if "small" in sizes else "large" if sizes == {"large"} else "free"
            right, n = table.get(key, (0, 0))
            table[key] = right + verdict.right, n + 1
        return table


def measure_obedience(
    pipe: Pipe,
    counter: Counter,
    objects: int,
    n: int = 200,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
    seed: int = 0,
    regions: str | None = None,
    done: Callable[[int], None] | None = None,
) -> Obedience:
    """`n` held-out prompts without style, one image each; image i starts from noise seed + i."""
    prompts, asked = zip(*evaluation_prompts(objects, n), strict=True)
    images = generate_many(pipe, prompts, range(seed, seed + n), steps, guidance, regions, done=done)
    verdicts = tuple(judge(things, seen) for things, seen in zip(asked, look(counter, images), strict=True))
    return Obedience(objects, prompts, tuple(map(tuple, asked)), verdicts, images, steps, guidance)


# ---- pairs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paired:
    """The same prompts and seeds with and without something: successes of either, and their difference."""

    n: int
    before: int
    after: int
    gained: int  # only after
    lost: int  # only before

    @property
    def difference(self) -> float:
        return (self.gained - self.lost) / self.n

    def interval(self, z: float = 1.959964) -> tuple[float, float]:
        """95% interval of the difference of paired proportions (Agresti and Min 2005): half a pair is added to each of
        the four outcomes, then d +- z sqrt(g + l - (g - l)^2 / n) / n. Not a point even if no pair differs."""
        g, l, n = self.gained + 0.5, self.lost + 0.5, self.n + 2  # noqa: E741
        half = z * (g + l - (g - l) ** 2 / n) ** 0.5 / n
        return (g - l) / n - half, (g - l) / n + half

    def p_value(self) -> float:
        """Exact McNemar test: are gains and losses equally likely?"""
        from scipy.stats import binomtest

        changed = self.gained + self.lost
        return float(binomtest(self.gained, changed).pvalue) if changed else 1.0

    def row(self) -> dict:
        low, high = self.interval()
        return {"n": self.n, "before": self.before / self.n, "after": self.after / self.n, "gained": self.gained,
                "lost": self.lost, "difference": self.difference, "low": low, "high": high,
                "p": self.p_value()}  # fmt: skip


def paired(before: Sequence[bool], after: Sequence[bool]) -> Paired:
    if len(before) != len(after) or not len(before):
        raise LcsError(f"need pairs, at least one; got {len(before)} and {len(after)}")
    a, b = np.asarray(before, bool), np.asarray(after, bool)
    return Paired(len(a), int(a.sum()), int(b.sum()), int((~a & b).sum()), int((a & ~b).sum()))
