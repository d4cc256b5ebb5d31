"""The paper's lemmas and claims, checked on Gaussians and mixtures."""

from __future__ import annotations

import numpy as np

from artifact.context import Context
from artifact.steps import Step
from lcs.theory import approximate, commuting, composition, exact, features, figures, noise

CAPTIONS = {
    "lemma1": "Lemma 1: the score of a conditional projective composition is local; the local score equals the true "
    "one to "
    "rounding. For a family that is no composition it is not local, and the error is large.",
    "converse": "Its converse: what the score misses of being local, integrated over noise, is exactly the divergence "
    "from "
    "a composition.",
    "background": "A gap in Lemma 1: it also needs the unconditional distribution to be independent across the sets.",
    "lemma2": "Lemma 2: the divergence from a composition stays below the sum of the errors of Definition 3.",
    "noise": "Claim 1 and Lemma 3: divergence and errors fall with noise, at the rate that Claim 1 gives.",
    "corollary1": "Corollary 1: what is not local in pixels can be local in features.",
    "heuristic": "Equation 3: orthogonal mean differences are necessary for a composition, not sufficient.",
    "claim2": "Claim 2: transform and noise. Without noise the two distributions are equal, so their divergence must "
    "grow "
    "before it can fall; the claim says that it always falls.",
}


def theory(context: Context) -> dict:
    lemma1, converse, background = exact.check_lemma1(), exact.check_converse(), exact.check_background()
    lemma2, claim1, lemma3 = approximate.check_lemma2(), noise.check_claim1(), noise.check_lemma3()
    corollary = [features.check_corollary1(name) for name in ("orthogonal", "not orthogonal")]
    heuristic, claim2 = features.check_heuristic(), commuting.check_claim2()
    shown = [exact.dependencies(f, t=1.0) for f in (composition.every_object(), composition.any_object())]
    drawn = {
        "lemma1": figures.figure_lemma1(lemma1, shown), "converse": figures.figure_converse(converse),
        "background": figures.figure_background(background), "lemma2": figures.figure_lemma2(lemma2),
        "noise": figures.figure_noise(claim1, lemma3), "corollary1": figures.figure_corollary1(corollary),
        "heuristic": figures.figure_heuristic(heuristic), "claim2": figures.figure_claim2(claim2),
    }  # fmt: skip
    for name, figure in drawn.items():
        context.figure(name, figure, CAPTIONS[name])
    falls = np.diff(claim1.kl, axis=1) <= 0
    return {
        "lemma1_error": float(lemma1.largest[0].max()), "lemma1_other": float(lemma1.largest[1:].max()),
        "converse_error": float(np.abs(converse.integral - converse.kl).max()),
        "background_coupled": float(background.lemma_subsets[1:].max()),
        "background_uncoupled": float(background.lemma_subsets[0]),
        "lemma2_slack": float(lemma2.smallest_slack.min()), "lemma2_largest_kl": float(lemma2.kl.max()),
        "claim1_falls": bool(falls.all()),
        "claim1_slope_error": float((np.abs(claim1.slope - claim1.identity) / np.abs(claim1.slope).max()).max()),
        "lemma3_falls": bool((np.diff(lemma3.supremum) <= 1e-12).all() and (np.diff(lemma3.definition) <= 1e-12).all()),
        "corollary1_error": max(float(c.feature.max()) for c in corollary),
        "corollary1_pixels": min(float(c.pixel.max()) for c in corollary),
        "claim2_holds": all(holds or kl.max() < 1e-12 for holds, kl in zip(claim2.claim_holds, claim2.kl, strict=True)),
        "claim2_names": list(claim2.names), "claim2_largest": claim2.kl.max(axis=1).tolist(),
        "claim2_falls_beyond": [None if b is None or not np.isfinite(b) else float(b) for b in claim2.falls_beyond],
    }  # fmt: skip


STEPS = [Step("theory", "Lemmas 1-3, Claims 1-2, Corollary 1 on Gaussians and mixtures", "v1 sections 3-5, A-D", theory,
              cost=30, sources=("theory/*.py",), makes=tuple(CAPTIONS), also=("fig3",))]  # fmt: skip
