"""What a step of the artifact is, what it needs and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lcs.experiments import Run
from lcs.weights import entry_key

if TYPE_CHECKING:
    from artifact.context import Context


@dataclass(frozen=True)
class Checkpoint:
    run: Run
    stage: str = "late"

    @property
    def key(self) -> str:
        """As in the manifest of the weights."""
        return entry_key(self.run, self.stage)


@dataclass(frozen=True)
class Effort:
    """How much to compute: samples per K and the like. `standard` is what the default command runs."""

    name: str
    samples: int  # per K, standard models
    local_samples: int  # per K, local models: 25 times the work per image; the paper counted 8
    solver: str  # the multistep solver needs half the network calls of Heun's method for the same error
    steps: int
    locality_seeds: int
    locality_levels: int  # noise levels measured along a trajectory
    feature_samples: int  # per colour, for the cosine matrices
    pace: float  # how long a step takes, in units of the standard effort

    def samples_of(self, checkpoint: Checkpoint) -> int:
        """Images per K of a checkpoint."""
        return self.local_samples if checkpoint.run.experiment.local else self.samples


EFFORTS = {
    e.name: e
    for e in (
        Effort("quick", 4, 2, "dpmpp_2m", 10, 2, 6, 4, 0.2),
        Effort("standard", 32, 8, "dpmpp_2m", 20, 4, 12, 16, 1.0),  # samples and steps as `lcs evaluate`
        Effort("full", 32, 32, "heun", 32, 8, 16, 64, 5.0),  # the paper's sampler
    )
}


@dataclass(frozen=True)
class Step:
    """One table or figure. `make(context)` draws it and returns the numbers that claims are judged by."""

    name: str  # for --only
    title: str
    paper: str  # where it is in the paper
    make: Callable[[Context], dict]
    # What it draws from at a scale. A missing checkpoint is reported and left out; `least` of them must be there.
    needs: Callable[[str], list[Checkpoint]] = lambda scale: []
    least: int = 0
    cost: float = 10.0  # about how many seconds of one core at standard effort, counted samples and locality apart
    counted: bool = False  # it wants the counted samples of all its checkpoints
    traced: bool = False  # it wants the locality of all its checkpoints
    sources: tuple[str, ...] = ()  # further files of lcs/ whose change makes old results stale (patterns)
    makes: tuple[str, ...] = ()  # names of its figures and tables (patterns, where they depend on the checkpoints)
    also: tuple[str, ...] = ()  # further names for --only: figures of the paper that it draws, too


@dataclass
class Output:
    """What a step left behind; stored as step.json in its folder."""

    figures: list[dict] = field(default_factory=list)  # {"file", "caption"}, a PNG with a PDF beside it
    tables: list[dict] = field(default_factory=list)  # {"file", "caption"}, Markdown with a CSV beside it
    numbers: dict = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)  # keys of checkpoints that were not there
    seconds: float = 0.0  # drawing
    sampling: float = 0.0  # process seconds of the counted samples and locality it shows, which other steps show too
