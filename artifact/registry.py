"""All steps, in the order they run: cheap ones that need no weights first, so that mistakes show early."""

from __future__ import annotations

from artifact import cifar, color, conditioning, heed, locality, samples, scatter, sdxl, tables, theory, undone

STEPS = [
    *theory.STEPS, *conditioning.STEPS, *samples.STEPS, *tables.STEPS, *locality.STEPS, *scatter.STEPS, *color.STEPS,
    *cifar.STEPS, *undone.STEPS, *heed.STEPS, *sdxl.STEPS,
]  # fmt: skip
