"""One picture per result of the SDXL study. Every function takes results and returns a matplotlib `Figure`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lcs.data.files import atomic_write
from lcs.sdxl.composition import InterventionResult, Relation
from lcs.sdxl.concepts import Composition, Subject
from lcs.sdxl.features import FeatureStudy
from lcs.sdxl.hooks import GROUPS, group_of, short_name
from lcs.sdxl.judge import Obedience
from lcs.sdxl.pixel import PixelStudy

COLORS = ("#1b6ca8", "#d1495b", "#edae49", "#5b8c5a", "#7b4b94", "#6b6b6b", "#2a9d8f", "#8a5a44", "#b5179e", "#3a5a40")
NOISE = ("high noise", "mid noise", "low noise")
MARKERS = ("o", "s", "^", "D", "v")


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """The figure as PNG and PDF."""
    paths = [Path(folder) / f"{name}.{kind}" for kind in ("png", "pdf")]
    for path in paths:
        with atomic_write(path) as temporary:
            figure.savefig(temporary, format=path.suffix[1:], dpi=150)
    return paths


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])


# ---- pixel space ------------------------------------------------------------------------------------


def dominant_label(words: list[str]) -> str:
    """More than three words that stand out together are no few."""
    return "no few words" if len(words) > 3 else ", ".join(words) or "none"


def figure_gradients(study: PixelStudy) -> Figure:
    """v1 Fig 6, v2 Fig 4 left and centre: the image with its locations; gradient maps at high, mid and low noise."""
    n = len(study.cells)
    figure = _figure(2.0 * (len(study.probed) + 1), 2.0 * n + 0.5)
    grid = figure.subplots(n, len(study.probed) + 1, squeeze=False)
    side, scale = study.gradients.shape[-1], study.images.shape[1] / study.gradients.shape[-1]
    for i, (row, column) in enumerate(study.cells):
        axes = grid[i, 0]
        axes.imshow(study.images[0])
        for m, (r, c) in enumerate(study.cells):
            style = {"color": "white", "ms": 11, "mew": 3} if m == i else {"color": "0.85", "ms": 6, "mew": 1}
            axes.plot((c + 0.5) * scale - 0.5, (r + 0.5) * scale - 0.5, "+", **style)
        axes.plot((column + 0.5) * scale - 0.5, (row + 0.5) * scale - 0.5, "+", color=COLORS[i], ms=9, mew=2)
        axes.set_ylabel(f"location {i + 1}")
        _bare(axes)
        for p, step in enumerate(study.probed):
            axes = grid[i, p + 1]
            axes.imshow(study.gradients[p, i] ** (1 / 3), cmap="magma", vmin=0)
            axes.plot(column, row, "+", color="cyan", ms=6, mew=1)
            _bare(axes)
            words = study.dominant(step, i)
            axes.set_xlabel(
                f"dominant: {dominant_label(words)}", fontsize=7, color="#b02a30" if 0 < len(words) <= 3 else "0.4"
            )
            if i == 0:
                axes.set_title(f"{NOISE[p]}, $\\sigma$ = {study.sigmas[step]:.2g}", fontsize=9)
    grid[0, 0].set_title("first seed", fontsize=9)
    figure.suptitle(
        f'"{study.prompt}"\nlatent gradients (cube root, each map by its own '
        f"largest), mean of {len(study.images)} seeds, {side} x {side}",
        fontsize=9,
    )
    return figure


def figure_influence(study: PixelStudy) -> Figure:
    """v2 Fig 4 right: each word's influence over the steps, one panel per location."""
    n = len(study.cells)
    figure = _figure(3.1 * n + 1.2, 3.4)
    panels = figure.subplots(1, n, squeeze=False)[0]
    steps = study.steps
    mean, error = study.influence.mean(0), study.influence.std(0) / max(1, len(study.images) - 1) ** 0.5
    for i, axes in enumerate(panels):
        for k, word in enumerate(study.words):
            color = COLORS[k % len(COLORS)]
            axes.plot(steps, mean[:, k, i], color=color, label=word, lw=1.5)
            axes.fill_between(
                steps, mean[:, k, i] - error[:, k, i], mean[:, k, i] + error[:, k, i], color=color, alpha=0.2
            )
        row, column = study.cells[i]
        axes.set(xlabel="step (noise falls)", ylim=(0, None))
        axes.set_title(f"location {i + 1} (latent row {row}, column {column})", fontsize=9)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel(r"influence $\|\hat x_0(C) - \hat x_0(C_{-k})\|$")
    panels[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(f'"{study.prompt}", mean and standard error of {len(study.images)} seeds', fontsize=9)
    return figure


def figure_word_maps(study: PixelStudy) -> Figure:
    """Where in the image each word has influence: one column per word, one row per noise level."""
    k = len(study.words)
    figure = _figure(1.5 * (k + 1), 1.55 * len(study.probed) + 0.3)
    grid = figure.subplots(len(study.probed), k + 1, squeeze=False)
    for p, step in enumerate(study.probed):
        for j, word in enumerate(study.words):
            drawn = grid[p, j].imshow(study.maps[p, j], cmap="viridis", vmin=0, vmax=study.maps[p].max())
            if p == 0:
                grid[p, j].set_title(word, fontsize=9)
        grid[p, 0].set_ylabel(f"{NOISE[p]}\n$\\sigma$ = {study.sigmas[step]:.2g}", fontsize=8)
        figure.colorbar(drawn, ax=grid[p, -2], shrink=0.8).ax.tick_params(labelsize=6)
        shown = min(p, len(study.images) - 1)
        grid[p, -1].imshow(study.images[shown])
        grid[p, -1].set_title(f"image of seed {shown + 1}", fontsize=8)
    for axes in grid.ravel():
        _bare(axes)
    figure.suptitle(f'"{study.prompt}": influence of a word, each row on its own scale', fontsize=9)
    return figure


# ---- feature space ----------------------------------------------------------------------------------


def _matrix(axes: Axes, cosines: np.ndarray, names: Sequence[str], title: str, labels: bool = True):
    image = axes.imshow(cosines, cmap="RdBu_r", vmin=-1, vmax=1)
    axes.set_title(title, fontsize=9)
    if labels:
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
        axes.set_yticks(range(len(names)), names, fontsize=6)
    else:
        _bare(axes)
    return image


def figure_disentanglement(study: FeatureStudy, subject: Subject) -> Figure:
    """v2 Fig 5: within against between, per block group and output space; gap and ratio per layer; small matrices."""
    figure = _figure(12.5, 6.2)
    top, bottom = figure.subfigures(2, 1, height_ratios=[1, 1])
    bars, curve = top.subplots(1, 2, width_ratios=[1, 1.4])
    rows = study.table()
    x = np.arange(len(rows))
    bars.bar(x - 0.2, [r["within"] for r in rows], 0.4, color=COLORS[0], label="within a category")
    bars.bar(x + 0.2, [r["between"] for r in rows], 0.4, color=COLORS[1], label="between categories")
    bars.set_xticks(x, [r["space"] for r in rows], fontsize=8)
    bars.set(ylabel="mean cosine", title="hidden states (high noise) and output spaces")
    bars.axhline(0, color="black", lw=0.6)
    bars.legend(fontsize=8)
    ratios, gaps = study.ratios(), study.gaps()
    at = np.arange(len(study.blocks))
    for g, name in enumerate(GROUPS):
        which = np.array([group_of(b) == name for b in study.blocks])
        curve.plot(at[which], gaps[which], "o-", color=COLORS[g], label=f"{name}: within - between", ms=4)
    curve.set_xticks(at[:: max(1, len(at) // 16)], [short_name(b) for b in study.blocks][:: max(1, len(at) // 16)],
                     rotation=45, fontsize=7)  # fmt: skip
    curve.set(ylabel="within - between", title="per transformer block, in running order")
    if np.isfinite(ratios).any():
        twin = curve.twinx()
        twin.plot(at, ratios, "x--", color="0.4", lw=0.8, ms=4)
        twin.set_ylabel("ratio within / between (x, dashed)")
    curve.legend(fontsize=7)
    curve.grid(alpha=0.3)
    spaces = {f"{g} blocks": study.group(g) for g in GROUPS} | {"latent": study.latent, "pixel": study.pixel}
    panels = bottom.subplots(1, len(spaces))
    for axes, (name, cosines) in zip(panels, spaces.items(), strict=True):
        image = _matrix(axes, study.shown(subject.shown, cosines), subject.shown, name)
    bottom.colorbar(image, ax=panels, shrink=0.8, label="cosine")
    return figure


def figure_all_concepts(study: FeatureStudy) -> Figure:
    """Cosines of all concepts in the three block groups and the output spaces."""
    names = [c.name for c in study.concepts]
    spaces = {f"{g} blocks": study.group(g) for g in GROUPS} | {"latent": study.latent, "pixel": study.pixel}
    figure = _figure(11, 7.4)
    grid = figure.subplots(2, 3)
    panels, spare = grid.ravel()[:-1], grid[-1, -1]
    for axes, (name, cosines) in zip(panels, spaces.items(), strict=True):
        image = _matrix(axes, cosines, names, name)
        for edge in np.flatnonzero([a != b for a, b in pairwise(study.categories)]):
            axes.axhline(edge + 0.5, color="black", lw=0.6)
            axes.axvline(edge + 0.5, color="black", lw=0.6)
    spare.axis("off")
    bar = spare.inset_axes([0.1, 0.1, 0.06, 0.8])  # inside its panel: the others keep their columns
    figure.colorbar(image, cax=bar, label="cosine")
    return figure


def figure_attention_maps(study: FeatureStudy, subject: Subject, columns: int = 12) -> Figure:
    """The cross-attention map of each shown concept's token, early in sampling: rows are concepts, columns layers."""
    layers = np.linspace(0, len(study.blocks) - 1, min(columns, len(study.blocks))).round().astype(int)
    names = [c.name for c in study.concepts]
    figure = _figure(1.0 * len(layers) + 0.6, 1.05 * len(subject.shown) + 0.4)
    grid = figure.subplots(len(subject.shown), len(layers), squeeze=False)
    for row, name in zip(grid, subject.shown, strict=True):
        row[0].set_ylabel(name, fontsize=8)
        for axes, layer in zip(row, layers, strict=True):
            of_layer = study.maps[layer][[names.index(n) for n in subject.shown]]
            axes.imshow(study.maps[layer][names.index(name)], cmap="magma", vmin=0, vmax=of_layer.max())
            _bare(axes)
    for axes, layer in zip(grid[0], layers, strict=True):
        top = study.maps[layer][[names.index(n) for n in subject.shown]].max()
        axes.set_title(f"{short_name(study.blocks[layer])}\n0 to {top:.2g}", fontsize=8)
    figure.suptitle("attention to the concept's token; one scale per layer", fontsize=9)
    return figure


def figure_attention(study: FeatureStudy, subject: Subject, columns: int = 12) -> Figure:
    """v1 Fig 13: cosines of the concepts' attention maps, every cross-attention layer, at three noise levels."""
    layers = len(study.blocks)
    columns = min(columns, layers)
    shown = np.unique(np.linspace(0, layers - 1, min(layers, 5 * columns)).round().astype(int))
    rows = -(-len(shown) // columns)
    levels = len(study.attention_steps)
    figure = _figure(1.25 * columns + 1, 1.35 * rows * levels + 0.6)
    grid = figure.subplots(rows * levels, columns, squeeze=False)
    for axes in grid.ravel():
        axes.set_axis_off()
    for t in range(levels):
        for i, a in enumerate(shown):
            axes = grid[t * rows + i // columns, i % columns]
            axes.set_axis_on()
            image = _matrix(
                axes, study.shown(subject.shown, study.attention[t, a]), (), short_name(study.blocks[a]), False
            )
            if i % columns == 0:
                axes.set_ylabel(f"step {study.attention_steps[t] + 1}")
    figure.colorbar(image, ax=grid, shrink=0.6, label="cosine")
    figure.suptitle("attention maps of one token: " + ", ".join(subject.shown), fontsize=9)
    return figure


def figure_composed_attention(study: FeatureStudy) -> Figure:
    """v1 Fig 7: a token's map inside a composed prompt, against the same concept alone (bar) and all others (dots)."""
    names = [c.name for c in study.concepts]
    keys = list(study.composed)
    figure = _figure(0.5 * len(keys) + 3.8, 3.6)
    axes = figure.subplots()
    for i, key in enumerate(keys):
        own = names.index(key.split(": ")[1])
        cosines = study.composed[key].mean(1)  # over layers
        axes.bar(i, cosines[own], color=COLORS[0], width=0.6, label="same concept alone" if i == 0 else None)
        others = np.delete(cosines, own)
        axes.plot(
            np.full(len(others), i), others, ".", color=COLORS[1], ms=4, label="other concepts" if i == 0 else None
        )
    axes.set_xticks(range(len(keys)), keys, rotation=60, ha="right", fontsize=7)
    axes.set(ylabel="cosine, mean over layers", title="attention of a token inside a composed prompt")
    axes.axhline(0, color="black", lw=0.6)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


# ---- composition ------------------------------------------------------------------------------------


def figure_relation(relation: Relation) -> Figure:
    """Composition success against the cosine of the two concepts in the middle block."""
    figure = _figure(6.2, 4.2)
    axes = figure.subplots()
    kinds = list(dict.fromkeys(p.kind for p in relation.pairs))
    for k, kind in enumerate(kinds):
        rows = [p.row() for p in relation.pairs if p.kind == kind]
        x, y = [r["cosine"] for r in rows], [r["success"] for r in rows]
        bars = [[max(0.0, r["success"] - r["low"]) for r in rows], [max(0.0, r["high"] - r["success"]) for r in rows]]
        axes.errorbar(x, y, bars, fmt=MARKERS[k % len(MARKERS)], color=COLORS[k], label=kind, ms=6, capsize=2, lw=0.8)
    rho, p = relation.spearman()
    axes.set(
        xlabel="cosine of the two concepts, middle block", ylabel="share of images that show both", ylim=(-0.03, 1.03),
    )  # fmt: skip
    axes.set_title(
        f"rank correlation within kinds of pairs {rho:.2f} (p = {p:.2g}), {len(relation.pairs)} pairs\n"
        "(below 0: what is disentangled composes better, as the paper suggests)", fontsize=9,
    )  # fmt: skip
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def figure_compositions(compositions: Sequence[Composition], images: np.ndarray, study: FeatureStudy) -> Figure:
    """v2 Fig 5 bottom: composed prompts, images uint8 [C, n, H, W, 3], with the mean cosine of their concepts."""
    names, middle = [c.name for c in study.concepts], study.group("mid")
    figure = _figure(1.35 * len(compositions) + 0.4, 1.3 * images.shape[1] + 0.8)
    grid = figure.subplots(images.shape[1], len(compositions), squeeze=False)
    for c, composition in enumerate(compositions):
        index = [names.index(name) for name in composition.concepts]
        cosine = np.mean([middle[a, b] for a in index for b in index if a < b])
        grid[0, c].set_title(f"{_wrap(composition.name.replace('+', ' + '), 20)}\ncosine {cosine:.2f}", fontsize=7)
        for n in range(images.shape[1]):
            grid[n, c].imshow(images[c, n])
            _bare(grid[n, c])
    figure.suptitle("composed prompts, three seeds; mean cosine of their concepts in the middle blocks", fontsize=9)
    return figure


def figure_intervention(results: Sequence[InterventionResult], shown: int = 5) -> Figure:
    """Success with and without the local intervention, and images from the same seeds."""
    figure = _figure(11, 4.4)
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.6])
    axes = left.subplots()
    ticks, at = [], 0
    for result in results:
        for what in ("right", "strict"):
            for m, mode in enumerate(result.local):
                row = result.paired(mode, what).row()
                axes.plot(at - 0.15, row["before"], "o", color="0.4")
                middle = row["before"] + row["difference"]
                axes.errorbar(at + 0.15, middle, [[row["difference"] - row["low"]], [row["high"] - row["difference"]]],
                              fmt="^", color=COLORS[m], capsize=3, lw=1)  # fmt: skip
                ticks.append(f"{result.objects} obj.\n{what}\n{mode}")
                at += 1
    axes.set_xticks(range(at), ticks, fontsize=6)
    axes.set(ylabel=f"share of {len(results[0].prompts)} prompts", ylim=(-0.04, 1.02), xlim=(-0.6, at - 0.4))
    axes.set_title(
        "circle: plain; triangle: each region sees only its own words\n(95% interval of the paired change)\n"
        "right: colour and shape of every object; strict: nothing else,\nin order; separate, mask: lcs/sdxl/regions.py",
        fontsize=8,
    )
    axes.grid(alpha=0.3, axis="y")
    first = results[0]
    names = ["plain", *first.local]
    grid = right.subplots(len(names), min(shown, len(first.prompts)), squeeze=False)
    for r, name in enumerate(names):
        for c in range(grid.shape[1]):
            grid[r, c].imshow(first.images[name][c])
            _bare(grid[r, c])
            verdict = first.plain[c] if name == "plain" else first.local[name][c]
            for spine in grid[r, c].spines.values():
                spine.set(color="#2a9d3a" if verdict.right else "#c0392b", linewidth=2, visible=True)
        grid[r, 0].set_ylabel(name, fontsize=8)
    for c in range(grid.shape[1]):
        grid[0, c].set_title(_wrap(first.prompts[c], 22), fontsize=6)
    shares = ", ".join(f"{name} {np.mean([v.right for v in verdicts]):.0%}" for name, verdicts in
                       (("plain", first.plain), *first.local.items()))  # fmt: skip
    right.suptitle(f"the first prompts; green: right (of all {len(first.prompts)}: {shares})", fontsize=8)
    return figure


def figure_samples(results: Sequence[Obedience], shown: int = 16) -> Figure:
    """The first held-out prompts with their images; the frame says whether colour and shape are right."""
    columns = 8
    rows = [-(-min(shown, len(r.prompts)) // columns) for r in results]
    figure = _figure(1.4 * columns, 1.85 * sum(rows) + 0.5)
    grid = figure.subplots(sum(rows), columns, squeeze=False)
    for axes in grid.ravel():
        axes.set_axis_off()
    base = 0
    for result, n in zip(results, rows, strict=True):
        for i in range(min(shown, len(result.prompts))):
            axes = grid[base + i // columns, i % columns]
            axes.set_axis_on()
            axes.imshow(result.images[i])
            _bare(axes)
            axes.set_title(_wrap(result.prompts[i], 24), fontsize=6.5)
            for spine in axes.spines.values():
                spine.set(color="#2a9d3a" if result.verdicts[i].right else "#c0392b", linewidth=2, visible=True)
        base += n
    shares = [
        f"{r.objects} object{'s' * (r.objects > 1)}: {r.row()['right']:.0%} right, {r.row()['strict']:.0%} also with "
        "nothing else and in order"
        for r in results
    ]
    figure.suptitle(
        "prompts never shown in training; green frame: colour and shape of every object right\n"
        f"{'; '.join(shares)} ({len(results[0].prompts)} prompts each)",
        fontsize=9,
    )
    return figure


def figure_concept_samples(study: FeatureStudy) -> Figure:
    """The first seed of every concept."""
    columns = min(10, len(study.concepts))
    rows = -(-len(study.concepts) // columns)
    figure = _figure(1.25 * columns, 1.55 * rows)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.ravel():
        axes.set_axis_off()
    for i, concept in enumerate(study.concepts):
        axes = grid[i // columns, i % columns]
        axes.set_axis_on()
        axes.imshow(study.samples[i])
        _bare(axes)
        axes.set_title(concept.name, fontsize=7)
    return figure


def _wrap(text: str, width: int = 26) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
