"""Do concepts that are disentangled in feature space compose better? (v2 Fig 5, bottom; here with numbers)

For pairs of mini-sdxl's concepts the composed prompt is drawn from several seeds and judged by the counter; the
share of successes stands against the cosine of the two concepts in the middle block. Prompts are worded so that
training never shows them, where such a wording exists (`held_out_wording`). And the local intervention:
composition success of two-object prompts with and without it, on the same prompts and seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from lcs.bootstrap import quantiles, resamples
from lcs.counter.detector import Counter
from lcs.rule import wilson
from lcs.sdxl.captions import Thing, evaluation_prompts, held_out, held_out_wording
from lcs.sdxl.features import FeatureStudy
from lcs.sdxl.generate import GUIDANCE, STEPS, generate_many
from lcs.sdxl.judge import Paired, Verdict, judge, paired
from lcs.sdxl.sampling import Pipe
from lcs.sdxl.views import look

# Pairs of concepts with what the composed prompt asks for; categories differ in the first three kinds.
PAIRS: dict[str, tuple[tuple[str, str, tuple[Thing, ...]], ...]] = {
    "colour + shape": tuple(
        (c, s, (Thing(color=c, shape=s),))
        for c, s in (("red", "cube"), ("blue", "sphere"), ("green", "cylinder"), ("yellow", "cube"),
                     ("purple", "sphere"), ("brown", "cylinder"))
    ),
    "colour + place": tuple(
        (c, p, (Thing(color=c, place=p),)) for c, p in (("red", "left"), ("blue", "right"), ("green", "middle"))
    ),
    "shape + place": tuple(
        (s, p, (Thing(shape=s, place=p),)) for s, p in (("cube", "left"), ("sphere", "right"), ("cylinder", "middle"))
    ),
    "colour + colour": tuple(
        (a, b, (Thing(color=a), Thing(color=b)))
        for a, b in (("red", "blue"), ("green", "purple"), ("yellow", "cyan"), ("gray", "brown"), ("blue", "green"))
    ),
    "shape + shape": tuple(
        (a, b, (Thing(shape=a), Thing(shape=b)))
        for a, b in (("cube", "sphere"), ("sphere", "cylinder"), ("cylinder", "cube"))
    ),
}  # fmt: skip


@dataclass(frozen=True)
class PairResult:
    kind: str
    first: str
    second: str
    prompt: str
    cosine: float  # of the two concepts, mean over the middle block's transformer blocks
    successes: int
    trials: int

    def row(self) -> dict:
        low, high = wilson(self.successes, self.trials)
        return {"kind": self.kind, "pair": f"{self.first}+{self.second}", "cosine": self.cosine,
                "success": self.successes / self.trials, "low": low, "high": high, "n": self.trials,
                "prompt": self.prompt, "never shown": held_out(self.prompt)}  # fmt: skip


@dataclass(frozen=True)
class Relation:
    pairs: tuple[PairResult, ...]

    def interval(self) -> tuple[float, float]:
        """95% interval of the rank correlation: bootstrap over the pairs of each kind."""
        ranks = [Relation(tuple(self.pairs[i] for i in chosen)).spearman(permutations=0)[0]
                 for chosen in resamples([p.kind for p in self.pairs])]  # fmt: skip
        return quantiles(ranks)

    def spearman(self, permutations: int = 10_000, seed: int = 0) -> tuple[float, float]:
        """Rank correlation of cosine and success within kinds of pairs, and its p-value; NaN if one is constant.

        Kinds differ in how hard they are (two objects or one) and in their cosines, so only what differs within a
        kind is compared: ranks over all pairs, less their mean in the kind. The p-value is the share of shuffles
        within kinds that correlate as strongly.
        """
        kinds = np.unique([p.kind for p in self.pairs], return_inverse=True)[1]
        same = kinds[:, None] == kinds
        share = same / same.sum(1, keepdims=True)  # [pair, pair]: times a vector, the mean of each pair's kind
        cosine, success = (
            rankdata(values) for values in zip(*((p.cosine, p.successes / p.trials) for p in self.pairs), strict=True)
        )
        x, y = cosine - share @ cosine, success - share @ success
        size = np.linalg.norm(x) * np.linalg.norm(y)
        if size < 1e-9:
            return float("nan"), float("nan")
        rng = np.random.default_rng(seed)
        order = np.argsort(rng.random((permutations, len(y))) + kinds, axis=1)  # positions, kind by kind
        shuffled = np.empty((permutations, len(y)))
        shuffled[:, np.argsort(kinds, kind="stable")] = y[order]
        strong = np.abs(shuffled @ x) >= abs(y @ x) - 1e-9
        return float(x @ y / size), float((strong.sum() + 1) / (permutations + 1))


def relate(
    pipe: Pipe, counter: Counter, study: FeatureStudy, seeds: Sequence[int], steps: int = STEPS,
    guidance: float = GUIDANCE, done: Callable[[int], None] | None = None,
) -> Relation:  # fmt: skip
    """Success of every pair in PAIRS against the cosine of its concepts in the middle block."""
    names, middle = [c.name for c in study.concepts], study.group("mid")
    jobs = [(kind, *pair) for kind, pairs in PAIRS.items() for pair in pairs]
    prompts = [held_out_wording(list(asked)) for *_, asked in jobs]
    repeated = [prompt for prompt in prompts for _ in seeds]
    images = generate_many(pipe, repeated, list(seeds) * len(jobs), steps, guidance, done=done)
    seen = look(counter, images)
    results = []
    for j, (kind, first, second, asked) in enumerate(jobs):
        verdicts = [judge(asked, d) for d in seen[j * len(seeds) : (j + 1) * len(seeds)]]
        cosine = float(middle[names.index(first), names.index(second)])
        successes = sum(v.placed for v in verdicts)  # 'placed' is 'right' where no place is asked
        results.append(PairResult(kind, first, second, prompts[j], cosine, successes, len(seeds)))
    return Relation(tuple(results))


# ---- the local intervention -------------------------------------------------------------------------


@dataclass(frozen=True)
class InterventionResult:
    """Two- and three-object prompts with places, drawn without and with the intervention from the same seeds."""

    objects: int
    prompts: tuple[str, ...]
    plain: tuple[Verdict, ...]
    local: dict[str, tuple[Verdict, ...]]  # by mode
    images: dict[str, np.ndarray]  # "plain" and each mode: uint8 [N, H, W, 3]

    def paired(self, mode: str, what: str = "right") -> Paired:
        return paired([getattr(v, what) for v in self.plain], [getattr(v, what) for v in self.local[mode]])

    def rows(self) -> list[dict]:
        return [
            {"objects": self.objects, "mode": mode, "criterion": what, **self.paired(mode, what).row()}
            for mode in self.local
            for what in ("right", "strict")
        ]


def measure_intervention(
    pipe: Pipe, counter: Counter, objects: int = 2, n: int = 200, modes: Sequence[str] = ("separate", "mask"),
    steps: int = STEPS, guidance: float = GUIDANCE, seed: int = 0, plain_images: np.ndarray | None = None,
    done: Callable[[int], None] | None = None,
) -> InterventionResult:  # fmt: skip
    """`n` held-out prompts; `plain_images` saves drawing those without intervention again (same prompts and seeds)."""
    prompts, asked = zip(*evaluation_prompts(objects, n), strict=True)
    seeds = range(seed, seed + n)
    images = {"plain": plain_images}
    if plain_images is None:
        images["plain"] = generate_many(pipe, prompts, seeds, steps, guidance, done=done)
    for mode in modes:
        images[mode] = generate_many(pipe, prompts, seeds, steps, guidance, mode, done=done)
    verdicts = {
        name: tuple(judge(things, seen) for things, seen in zip(asked, look(counter, drawn), strict=True))
        for name, drawn in images.items()
    }
    return InterventionResult(objects, prompts, verdicts.pop("plain"), verdicts, images)
