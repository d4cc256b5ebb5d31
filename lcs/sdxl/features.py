"""Feature-space structure of an SDXL-class model: hidden states and attention maps of every block.

Each concept's prompt is drawn from the same seeds as the empty prompt. A concept's vector at a layer is the mean over
seeds of what the layer computes for its prompt, minus the same for the empty prompt (the paper's mean difference),
flattened. Cosines between these vectors show which concepts share directions: high within a category and low
between categories is what composition in feature space asks for (the F-LCS heuristic).

hidden states   post-FFN output of every BasicTransformerBlock, at high noise (v2 Fig 5)
attention       the cross-attention map of the concept's one token (end of text for the empty prompt), at high, mid
                and low noise (v1 Fig 7 and 13)
latent, pixel   the finished sample: output spaces to compare with
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lcs.bootstrap import interval, mean_of_pairs
from lcs.errors import LcsError
from lcs.sdxl.concepts import Composition, Concept, Subject
from lcs.sdxl.hooks import capture_attention, capture_states, cross_attentions, group_of, transformer_blocks
from lcs.sdxl.kept import kept
from lcs.sdxl.sampling import Pipe, Step, decode, encode, initial_noise, sample
from lcs.sdxl.words import token_index


def cosine_matrix(vectors: np.ndarray) -> np.ndarray:
    """[P, P] from [P, D]; a zero vector has cosine 0 with everything."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return unit @ unit.T


def within_between(cosines: np.ndarray, categories: Sequence[str]) -> tuple[float, float]:
    """Mean cosine of different concepts of the same category, and of different categories."""
    same = np.equal.outer(np.asarray(categories), np.asarray(categories))
    off = ~np.eye(len(cosines), dtype=bool)
    if not (same & off).any() or not (~same).any():
        raise LcsError("need at least two categories, and one of them with at least two concepts")
    return float(cosines[same & off].mean()), float(cosines[~same].mean())


@dataclass(frozen=True)
class FeatureStudy:
    """P concepts, B blocks, A attention layers (one per block), T noise levels of the attention maps."""

    concepts: tuple[Concept, ...]
    blocks: tuple[str, ...]  # names of the transformer blocks, in running order
    hidden: np.ndarray  # [B, P, P] cosines of hidden states
    attention: np.ndarray  # [T, A, P, P] cosines of the concepts' attention maps
    attention_steps: tuple[int, ...]  # from 0
    latent: np.ndarray  # [P, P]
    pixel: np.ndarray  # [P, P]
    maps: list[np.ndarray]  # per attention layer [P, n, n]: the concepts' own maps at high noise
    composed: dict[str, np.ndarray]  # "red+cube: red" -> [P, A]: composed map against every concept's own, high noise
    samples: np.ndarray  # uint8 [P, H, W, 3]: the first seed of each concept

    @property
    def categories(self) -> list[str]:
        return [c.category for c in self.concepts]

    def group(self, name: str, space: str = "hidden") -> np.ndarray:
        """Cosines averaged over the blocks of 'down', 'mid' or 'up'."""
        stack = self.hidden if space == "hidden" else self.attention[0]
        return stack[[group_of(b) == name for b in self.blocks]].mean(0)

    def table(self) -> list[dict]:
        """Within, between, their gap and ratio for block groups and output spaces."""
        spaces = {f"{g} blocks": self.group(g) for g in ("down", "mid", "up")}
        rows = []
        for name, cosines in {**spaces, "latent": self.latent, "pixel": self.pixel}.items():
            within, between = within_between(cosines, self.categories)
            rows.append({"space": name, "within": within, "between": between, "gap": within - between,
                         "ratio": ratio(within, between)})  # fmt: skip
        return rows

    def ratios(self) -> np.ndarray:
        """[B]: within / between per block; NaN where the denominator is not positive."""
        return np.array([ratio(*within_between(c, self.categories)) for c in self.hidden])

    def gap_interval(self, cosines: np.ndarray, than: Sequence[np.ndarray] = ()) -> tuple[float, float]:
        """95% interval of within - between of cosines [P, P], less the largest of `than`: bootstrap over the concepts
        of each category."""

        def gap(matrix: np.ndarray, chosen: np.ndarray) -> float:
            within, between = (mean_of_pairs(matrix, chosen, self.categories, same) for same in (True, False))
            return within - between

        def statistic(chosen: np.ndarray) -> float:
            return gap(cosines, chosen) - max((gap(other, chosen) for other in than), default=0.0)

        return interval(statistic, self.categories)

    def gaps(self) -> np.ndarray:
        """[B]: within - between per block: unlike the ratio it exists everywhere."""
        pairs = [within_between(c, self.categories) for c in self.hidden]
        return np.array([a - b for a, b in pairs])

    def shown(self, names: Sequence[str], cosines: np.ndarray) -> np.ndarray:
        index = [[c.name for c in self.concepts].index(n) for n in names]
        return cosines[np.ix_(index, index)]


def ratio(within: float, between: float) -> float:
    """within / between; NaN unless `between` is clearly positive, because the ratio means nothing there."""
    return within / between if between > 0.01 else float("nan")


# ---- the whole study --------------------------------------------------------------------------------


def _means(
    pipe: Pipe, prompt: str, tokens: Sequence[int], seeds: Sequence[int], at: Sequence[int], steps: int,
    guidance: float, size: int | None, whole: bool, batch: int,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Means over seeds of one prompt: hidden/BLOCK at step 0 [n, C]; attention/LAYER [T, N, k], if `whole` at steps
    `at`, else only at the first; if `whole` also output/latent, output/pixel and output/sample, the first image."""
    total: dict[str, dict] = {"hidden": {}, "attention": {}, "output": {}}

    def add(kind: str, name: str, part: Tensor) -> None:
        total[kind][name] = total[kind].get(name, 0) + part / len(seeds)

    first = None
    for begin in range(0, len(seeds), batch):
        chosen = list(seeds[begin : begin + batch])
        n = len(chosen)
        with (
            capture_states(pipe.unet, last=n) as states,
            capture_attention(pipe.unet, tokens, last=n) as maps,
        ):
            states.on = maps.on = True

            def look(step: Step, states=states, maps=maps) -> None:  # called after the U-Net of step.index has run
                states.on, maps.on = False, step.index + 1 in at

            latents = sample(
                pipe, encode(pipe, [prompt], size).repeat(n), initial_noise(pipe, chosen, size), steps, guidance, look,
                stop_after=None if whole else 1,
            )  # fmt: skip
        for name, passes in states.records.items():
            add("hidden", name, passes[0].sum(0))  # [n, C]
        for name, passes in maps.records.items():
            add("attention", name, torch.stack([p.sum(0) for p in passes]))  # [T, N, k]
        if whole:
            images = decode(pipe, latents)
            add("output", "latent", latents.float().sum(0).cpu())
            add("output", "pixel", torch.from_numpy(images.sum(0, dtype=np.float32)))
            first = images[0] if first is None else first
    arrays = {f"{kind}/{name}": value.numpy() for kind, part in total.items() for name, value in part.items()}
    arrays |= {name: value.astype(np.float16) for name, value in arrays.items() if name.startswith("hidden/")}
    return arrays if first is None else arrays | {"output/sample": first}


def _square(attention: np.ndarray) -> np.ndarray:  # [N] -> [n, n]
    side = round(len(attention) ** 0.5)
    return attention.reshape(side, -1)


def find_tokens(tokenizer, subject: Subject, compositions: Sequence[Composition]) -> tuple[list[int], list[list[int]]]:
    """Where each concept's token stands in its prompt, and in each composition the tokens of its concepts.

    To be called before anything is drawn: a word that is not one token of this model must not cost an hour.
    """
    own = [token_index(tokenizer, c.prompt, c.token) for c in subject.concepts]
    inside = [[token_index(tokenizer, c.prompt, subject.concept(name).token) for name in c.concepts]
              for c in compositions]  # fmt: skip
    return own, inside


def run_feature_study(
    pipe: Pipe,
    subject: Subject,
    seeds: Sequence[int],
    steps: int | None = None,
    size: int | None = None,
    compositions: Sequence[Composition] | None = None,
    batch: int = 8,
    progress: bool = False,
) -> FeatureStudy:
    """Memory: one prompt's reduced hidden states are kept as fp16 until the end, 42 MB per prompt for SDXL base, and
    its mean image, 13 MB: 1.4 GB for its 25. Cosines of the images take another 0.6 GB for a moment."""
    steps = steps or subject.feature_steps
    at = tuple(dict.fromkeys((0, steps // 2 - 1 if steps > 2 else 0, steps - 1)))
    blocks = tuple(transformer_blocks(pipe.unet))
    attns = cross_attentions(pipe.unet)
    compositions = subject.compositions if compositions is None else compositions
    tokenizer = pipe.tokenizer

    def run(prompt: str, tokens: list[int], whole: bool) -> dict[str, np.ndarray]:
        facts = ["features", prompt, tokens, list(seeds), at, steps, subject.guidance, size, whole]
        return kept(facts, lambda: _means(pipe, prompt, tokens, seeds, at, steps, subject.guidance, size, whole, batch))

    own, inside = find_tokens(tokenizer, subject, compositions)
    jobs = 1 + len(subject.concepts) + len(compositions)
    bar = tqdm(total=jobs, disable=not progress, desc="feature space", unit="prompt")
    empty = run("", [token_index(tokenizer, "", None)], True)
    bar.update()
    found = []
    for concept, token in zip(subject.concepts, own, strict=True):
        found.append(run(concept.prompt, [token], True))
        bar.update()

    def differences(get: Callable[[dict], np.ndarray]) -> np.ndarray:
        base = np.asarray(get(empty), np.float32)
        return np.stack([(np.asarray(get(f), np.float32) - base).ravel() for f in found])

    hidden = np.stack([cosine_matrix(differences(lambda f, b=b: f[f"hidden/{b}"])) for b in blocks])
    maps = {a: differences(lambda f, a=a: f[f"attention/{a}"][..., 0]).reshape(len(found), len(at), -1) for a in attns}
    attention = np.stack([[cosine_matrix(maps[a][:, t]) for a in attns] for t in range(len(at))])
    composed: dict[str, np.ndarray] = {}
    for composition, tokens in zip(compositions, inside, strict=True):
        members = [subject.concept(name) for name in composition.concepts]
        result = run(composition.prompt, tokens, False)
        bar.update()
        for k, member in enumerate(members):
            columns = []
            for a in attns:
                here = (result[f"attention/{a}"][0, :, k] - empty[f"attention/{a}"][0, :, 0]).ravel()
                columns.append(cosine_matrix(np.concatenate([here[None], maps[a][:, 0]]))[0, 1:])
            composed[f"{composition.name}: {member.name}"] = np.stack(columns, 1)  # [P, A]
    bar.close()
    squares = [np.stack([_square(f[f"attention/{a}"][0, :, 0]) for f in found]) for a in attns]
    return FeatureStudy(
        subject.concepts, blocks, hidden, attention, at, cosine_matrix(differences(lambda f: f["output/latent"])),
        cosine_matrix(differences(lambda f: f["output/pixel"])), squares, composed,
        np.stack([f["output/sample"] for f in found]),
    )  # fmt: skip
