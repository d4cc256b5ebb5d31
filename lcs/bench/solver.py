"""Samplers on a trained model: how far from the exact flow, at how many network calls, and what the counter says.

Every sampler follows the same differential equation from the same noise, so its error is the distance to a solution
with very many steps. Pictures are compared as 8-bit values; counts by the shipped counter.
"""

from __future__ import annotations

import numpy as np

from lcs import weights
from lcs.conditioning import get_conditioner
from lcs.counter.detector import load_counter
from lcs.experiments import get_run
from lcs.sampling import sample_rgb

EXACT_STEPS = 200  # of Heun's method: 399 calls
FULL_STEPS = 32  # the paper's: 63 calls
ASKED = 3  # objects, as in training


def bench_solver(experiment: str = "grid-all", objects: int = 3, samples: int = 16, scale: str = "mini") -> dict:
    """RMS distance to the exact solution (of 255) and share of images with the same count, by solver and calls."""
    run = get_run(experiment, objects, scale)
    model, counter = weights.load(run), load_counter()
    label = get_conditioner(run.experiment.conditioner).test_vector(ASKED)
    seeds = range(samples)

    def pictures(steps: int, solver: str) -> np.ndarray:
        return sample_rgb(run, model, label, seeds, steps=steps, solver=solver)

    exact = pictures(EXACT_STEPS, "heun")
    counts = counter.counts(exact)
    result: dict = {"run": run.name, "samples": samples, "asked": ASKED}
    calls = 2 * FULL_STEPS - 1
    for name, steps, solver, used in (
        ("heun", FULL_STEPS, "heun", calls),
        ("heun_half", FULL_STEPS // 2, "heun", FULL_STEPS - 1),
        ("heun_quarter", FULL_STEPS // 4, "heun", FULL_STEPS // 2 - 1),
        ("multistep", calls, "dpmpp_2m", calls),
        ("multistep_half", FULL_STEPS, "dpmpp_2m", FULL_STEPS),
        ("multistep_quarter", FULL_STEPS // 2, "dpmpp_2m", FULL_STEPS // 2),
    ):
        drawn = pictures(steps, solver)
        rms = float(np.sqrt(np.square(drawn.astype(float) - exact).mean()))
        result |= {f"{name}_calls": used, f"{name}_rms": rms,
                   f"{name}_same_count": float((counter.counts(drawn) == counts).mean())}  # fmt: skip
    return result
