"""One picture per result of the theory. Every function takes results and returns a matplotlib `Figure`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lcs.theory import approximate, commuting, composition, exact, features, noise

COLORS = ("#1b6ca8", "#d1495b", "#edae49", "#5b8c5a", "#7b4b94")  # blue: what the theory says; red: what breaks it
GRAY = "#6b6b6b"
FLOOR = 1e-17  # rounding errors of exactly zero are drawn here


def draw_all() -> dict[str, Figure]:
    """Every check of the theory, run and drawn; a few seconds."""
    corollary = [features.check_corollary1(name) for name in ("orthogonal", "not orthogonal")]
    shown = [exact.dependencies(f, t=1.0) for f in (composition.every_object(), composition.any_object())]
    return {
        "lemma1": figure_lemma1(exact.check_lemma1(), shown),
        "converse": figure_converse(exact.check_converse()),
        "background": figure_background(exact.check_background()),
        "lemma2": figure_lemma2(approximate.check_lemma2()),
        "noise": figure_noise(noise.check_claim1(), noise.check_lemma3()),
        "corollary1": figure_corollary1(corollary),
        "heuristic": figure_heuristic(features.check_heuristic()),
        "claim2": figure_claim2(commuting.check_claim2()),
    }


# ---- Lemma 1 --------------------------------------------------------------------------------------------------------


def figure_lemma1(result: exact.Lemma1Result, shown: Sequence[exact.Dependencies]) -> Figure:
    """What the score depends on, for a composition and another family; how far the local score is from the true one."""
    figure = _figure(5.0 * len(shown) + 5.2, 4.3)
    *maps, curves = figure.subplots(1, len(shown) + 1, width_ratios=[*[1.25] * len(shown), 1])
    for axes, d in zip(maps, shown, strict=True):
        image = _dependence_map(axes, np.concatenate([d.pixels, np.full((len(d.pixels), 1), np.nan), d.conditions], 1))
        n, k = len(d.pixels), d.conditions.shape[1]
        axes.set_xticks([(n - 1) / 2, *range(n + 1, n + 1 + k)], ["pixels", *range(k)])
        axes.set_xlabel("conditions", loc="right")  # under their numbers
        for j, block in enumerate(composition.BLOCKS):
            _outline(axes, block[0] - 0.5, block[0] - 0.5, len(block), len(block))
            _outline(axes, n + 1 + j - 0.5, block[0] - 0.5, 1, len(block))
        places = [(block[1], f"place {j}") for j, block in enumerate(composition.BLOCKS)]
        rows = sorted(places + [(i, "background") for i in composition.BACKGROUND])
        axes.set_yticks([i for i, _ in rows], [name for _, name in rows])
        verdict = "local" if d.name == "every object" else "not local"
        axes.set_title(f'"{d.name}": the score is {verdict}')
    maps[0].set_ylabel("score at a pixel of ...")
    figure.colorbar(image, ax=maps, shrink=0.8, pad=0.01).set_label("... depends on (share of the largest)")

    for f, name in enumerate(result.names):
        color = COLORS[0] if f == 0 else COLORS[f]
        curves.loglog(result.noise_levels, np.maximum(result.largest[f], FLOOR), "o-", ms=3, color=color, label=name)
    curves.set_ylim(1e-17, 1e2)
    curves.text(0.02, 2e-16, "composition: equal to rounding", color=COLORS[0], fontsize=8)
    curves.set(xlabel="noise level t", ylabel="largest error / RMS score", title="Local score against true score")
    curves.legend(loc="center left", frameon=False)
    return figure


def figure_converse(result: exact.ConverseResult) -> Figure:
    """The violation of locality over noise, and its integral against the divergence."""
    figure = _figure(10, 4)
    left, right = figure.subplots(1, 2)
    shades = np.linspace(0.25, 1.0, len(result.correlations))
    for r, rho in enumerate(result.correlations):
        density = result.noise_levels**2 * result.violation[r]
        left.semilogx(result.noise_levels, density, color=COLORS[1], alpha=shades[r])
        if round(rho * 10) in (3, 5, 7, 8, 9):
            peak = int(density.argmax())
            left.annotate(f"{rho:g}", (result.noise_levels[peak], density[peak]), fontsize=8, ha="right", va="bottom")
    left.axhline(0, color=COLORS[0], lw=2, label="correlation 0: a composition")
    left.plot([], [], color=COLORS[1], label="correlation between the pixel sets (number)")
    left.set_xlim(5e-3, 1e2)
    left.set_ylim(-0.03, 1.25 * (result.noise_levels**2 * result.violation).max())
    left.set(xlabel="noise level t", ylabel="$t^2$ E |true - local score|$^2$", title="How far the score is from local")
    left.legend(loc="upper left", frameon=False)

    right.plot(result.correlations, result.kl, color=GRAY, lw=5, alpha=0.4, label="KL(p || composition), closed form")
    right.plot(result.correlations, result.integral, "o", color=COLORS[1], label="area under the curve on the left")
    right.set(xlabel="correlation", ylabel="nats", title="The areas are the divergence from a composition")
    right.legend(loc="upper left", frameon=False)
    return figure


def figure_background(result: exact.BackgroundResult) -> Figure:
    figure = _figure(6.5, 4)
    axes = figure.subplots()
    for values, color, label in (
        (result.lemma_subsets, COLORS[1], "subsets of Lemma 1: $N_i = M_j$ or $M_b$"),
        (result.joint_subsets, COLORS[0], "uncontrolled pixels see each other: $N_i = M_J^c$"),
    ):
        axes.semilogy(result.couplings, np.maximum(values, FLOOR), "o-", color=color, label=label)
    axes.set_ylim(1e-17, 1e3)
    axes.set(
        xlabel="variance that all uncontrolled pixels share",
        ylabel="largest error / RMS score",
        title="Definition 2 holds in all of these; Lemma 1 also needs\nan unconditional distribution without coupling",
    )
    axes.legend(loc="center right", frameon=False)
    return figure


# ---- Lemma 2, Claim 1, Lemma 3 --------------------------------------------------------------------------------------


def figure_lemma2(result: approximate.Lemma2Result, strength: float = 0.6) -> Figure:
    """Divergence under its bound: against coupling, against noise; and why Gaussians have no finite bound."""
    figure = _figure(14, 4)
    left, middle, right = figure.subplots(1, 3)
    s = int(np.abs(result.strengths - strength).argmin())
    for axes, x, bound, kl in (
        (left, result.strengths, result.bound[:, 0], result.kl[:, 0]),
        (middle, result.noise_levels, result.bound[s], result.kl[s]),
    ):
        axes.fill_between(x, kl, bound, color=COLORS[0], alpha=0.12, label="slack")
        axes.plot(x, bound, "o-", ms=4, color=COLORS[0], label="bound: sum of the errors")
        axes.plot(x, kl, "o-", ms=4, color=COLORS[1], label="KL(p || composition)")
    left.set(
        xlabel="strength of the shared light", ylabel="nats", title="Lemma 2 without noise: KL stays below the bound"
    )
    left.set_ylim(bottom=0)
    left.text(0.03, 0.25 * result.kl[0, 0], "shadows alone: the bound is tight", fontsize=8)
    left.legend(loc="upper left", frameon=False)
    middle.set_yscale("log")
    middle.set(xlabel="noise level t", ylabel="nats", title=f"Noise makes it more compositional (light {strength:g})")
    middle.legend(loc="upper right", frameon=False)

    radii = np.linspace(0, 12, 50)
    for rho, color in zip((0.1, 0.3, 0.5), COLORS[2:], strict=True):
        right.plot(radii, approximate.gaussian_error(rho, radii), color=color, label=f"correlation {rho:g}")
    right.set(xlabel="other pixel at most this far out", ylabel="error of Definition 3, nats")
    right.set_title("Two Gaussian pixels: the supremum is infinite")
    right.legend(loc="upper left", frameon=False)
    return figure


def figure_noise(claim: noise.Claim1Result, lemma: noise.Lemma3Result) -> Figure:
    figure = _figure(14, 4)
    left, middle, right = figure.subplots(1, 3)
    for i, name in enumerate(claim.names):
        left.loglog(claim.noise_levels, claim.kl[i], color=COLORS[i], label=name)
        middle.semilogx(claim.noise_levels, claim.slope[i] / claim.kl[i, 0], color=COLORS[i], lw=4, alpha=0.35)
        middle.semilogx(claim.noise_levels, claim.identity[i] / claim.kl[i, 0], ".", color=COLORS[i])
    left.set(xlabel="noise level t", ylabel="KL, nats", title="Claim 1: noise brings distributions together")
    left.legend(loc="lower left", frameon=False)
    middle.plot([], [], color=GRAY, lw=4, alpha=0.35, label="measured slope of KL")
    middle.plot([], [], ".", color=GRAY, label=r"$-t\,E\,|\nabla \log q/r|^2$")
    middle.axhline(0, color=GRAY, lw=0.6)
    middle.set(xlabel="noise level t", ylabel="slope / KL at the first t", title="... exactly as fast as it says")
    middle.legend(loc="lower right", frameon=False)

    for y, on in enumerate(lemma.neighbours[1:-1], start=1):
        right.loglog(lemma.noise_levels, lemma.conditional[y], color=GRAY, lw=1, alpha=0.3 + 0.2 * y)
        right.annotate(f"{on:g}", (lemma.noise_levels[0], lemma.conditional[y, 0]), fontsize=8, va="top")
    right.loglog(lemma.noise_levels, lemma.supremum, color=COLORS[0], lw=2, label="supremum (Lemma 3)")
    right.loglog(lemma.noise_levels, lemma.definition, "--", color=COLORS[3], label="sum of errors (Definition 3)")
    right.plot([], [], color=GRAY, label="given neighbours that make the\nlight certain to this degree")
    right.set_ylim(1e-4, 30)
    right.set(xlabel="noise level t", ylabel="KL, nats", title="Lemma 3: the errors fall with noise")
    right.legend(loc="lower left", frameon=False)
    return figure


# ---- feature space --------------------------------------------------------------------------------------------------


def figure_corollary1(results: Sequence[features.Corollary1Result]) -> Figure:
    """What the score depends on in pixels and in features; errors of local scores over noise, per transform."""
    figure = _figure(16, 4.2)
    axes = figure.subplots(1, 2 + len(results), width_ratios=[1, 1, *[1.25] * len(results)])
    first = results[0]
    order = [i for block in composition.BLOCKS for i in block] + list(composition.BACKGROUND)
    image = _dependence_map(axes[0], first.pixel_dependence)
    axes[0].set(title="Score in pixels: depends on all", xlabel="pixels", ylabel="pixels")
    _dependence_map(axes[1], first.feature_dependence[np.ix_(order, order)])
    axes[1].set(title="The same score in features: local", xlabel="features, sorted by set", ylabel="features")
    for start in range(0, len(order), 3):
        _outline(axes[1], start - 0.5, start - 0.5, 3, 3)
    figure.colorbar(image, ax=axes[:2], shrink=0.75, pad=0.01).set_label("dependence")
    for panel, r in zip(axes[2:], results, strict=True):
        panel.loglog(r.noise_levels, np.maximum(r.feature, FLOOR), "o-", ms=3, color=COLORS[0])
        panel.loglog(r.noise_levels, np.maximum(r.pulled_back, FLOOR), "s-", ms=3, color=COLORS[3])
        panel.loglog(r.noise_levels, r.pixel, "^-", ms=3, color=COLORS[1])
        panel.set_ylim(1e-17, 1e4)
        panel.set(xlabel="noise level t", ylabel="relative error of the score", title=f"Transform: {r.transform}")
    for color, marker, label in (
        (COLORS[1], "^", "local in pixels"),
        (COLORS[0], "o", "local in features (Corollary 1)"),
        (COLORS[3], "s", "the latter, pulled back to pixels"),
    ):
        axes[2].plot([], [], marker + "-", ms=3, color=color, label=label)
    axes[2].legend(loc="center", frameon=False, bbox_to_anchor=(0.5, 0.5))
    return figure


def figure_heuristic(result: features.HeuristicResult) -> Figure:
    figure = _figure(3.2 * len(result.names), 4.0)
    panels = figure.subplots(1, len(result.names))
    for i, axes in enumerate(panels):
        image = axes.imshow(result.cosines[i], cmap="RdBu_r", vmin=-1, vmax=1)
        for (y, x), value in np.ndenumerate(result.cosines[i]):
            ink = "white" if abs(value) > 0.6 else "black"
            axes.text(x, y, f"{value + 0.0:.2f}", ha="center", va="center", fontsize=9, color=ink)
        composed = result.distance[i] < 1e-9
        axes.set_title(f"{result.names[i]}\n{'a composition' if composed else 'not a composition'}")
        axes.set_xticks(range(3)), axes.set_yticks(range(3))
        axes.set_xlabel("condition")
    panels[0].set_ylabel("condition")
    figure.suptitle("Orthogonal mean differences: necessary for a composition, not sufficient", fontsize=12)
    figure.colorbar(image, ax=panels, shrink=0.8, pad=0.01).set_label("cosine of mean differences")
    return figure


def figure_claim2(result: commuting.Claim2Result) -> Figure:
    """How far noise and transform are from commuting, and the slope of that: measured, claimed, corrected."""
    figure = _figure(15, 4)
    left, *slopes = figure.subplots(1, 3)
    for i, name in enumerate(result.names):
        left.semilogx(result.noise_levels, result.kl[i], "o-", ms=3, color=COLORS[i], label=name)
    left.axhline(result.limit[1], color=COLORS[1], lw=0.8, ls="--")
    left.annotate("limit for $t \\to \\infty$", (result.noise_levels[0], result.limit[1]), fontsize=8, va="bottom")
    left.set(xlabel="noise level t", ylabel="KL between the two, nats")
    left.set_title("Noise after the transform, or before it")
    left.legend(loc="center right", frameon=False)
    for axes, i in zip(slopes, (1, 2), strict=True):
        axes.semilogx(result.noise_levels, result.slope[i], color=GRAY, lw=5, alpha=0.4, label="measured slope")
        axes.semilogx(
            result.noise_levels, result.paper[i], "--", color=COLORS[4], label="proof of Claim 2 (always < 0)"
        )
        axes.semilogx(result.noise_levels, result.corrected[i], "k.", label="with the missing term")
        axes.axhline(0, color=GRAY, lw=0.6)
        axes.set(xlabel="noise level t", ylabel="d KL / dt", title=result.names[i])
    slopes[0].set_ylim(top=2.6 * result.slope[1].max())
    slopes[0].legend(loc="upper right", frameon=False)
    return figure


# ---- shared ---------------------------------------------------------------------------------------------------------


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained", dpi=110)


def _dependence_map(axes: Axes, values: np.ndarray):
    """Shares from 1e-3 to 1 on a logarithmic scale; white is nothing (or below)."""
    image = axes.imshow(np.where(values < 1e-3, np.nan, values), cmap="viridis_r", norm=LogNorm(1e-3, 1))
    axes.set_facecolor("white")
    axes.set_xticks([]), axes.set_yticks([])
    return image


def _outline(axes: Axes, x: float, y: float, width: float, height: float) -> None:
    axes.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=COLORS[1], lw=1.5))
