"""The SDXL study plugs in here."""

from __future__ import annotations

from artifact.steps import Step

STEPS: list[Step] = []
