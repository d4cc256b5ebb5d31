"""The registry: every experiment of the paper and both scales. Everything else is derived from it.

An `Experiment` says *what* is studied (conditioner and architecture), a `Scale` says *how big*
(resolution, network, training length). A `Run` is one trained model: experiment x objects x scale;
its `name` is the file name, the table row, the model card and the entry in `weights/manifest.json`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lcs.errors import LcsError

MAIN_OBJECTS = 3  # most figures of the paper are of models trained on 1-3 objects
STAGED = ("grid-all", "grid-single", "list-all")  # of these early and mid checkpoints are shipped, too
# Trained right after those on 1-3 objects: one object only, the second colour model, CIFAR-10.
NEXT_NEEDED = ("grid-all-m1", "grid-single-local-m1", "color-m5", "cifar10")
GRID = 16  # cells per side of the location grid, in every experiment of the paper

# Test-time conditions (v1, section E.1): K locations are the first K, as fractions (x, y) of the image.
TEST_LOCATIONS = (
    (0.65, 0.65), (0.65, 0.25), (0.25, 0.65), (0.35, 0.35), (0.45, 0.65), (0.45, 0.25),
    (0.65, 0.45), (0.25, 0.45), (0.45, 0.45), (0.55, 0.55), (0.35, 0.55), (0.55, 0.35),
)  # fmt: skip
CIFAR_PIXELS = ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))  # mean, std of its training images
TEST_COLORS = ("blue", "brown", "cyan", "gray", "green", "purple", "red", "yellow")


@dataclass(frozen=True)
class Experiment:
    name: str
    conditioner: str  # key of lcs.conditioning.CONDITIONERS; "none" for unconditional
    local: bool  # True: patch model that sees (2k+1)^2 cells (v1 section E.3)
    title: str  # for tables and figures
    paper_name: str
    objects: tuple[int, ...]  # M values of the paper's tables: trained on 1..M objects


EXPERIMENTS = {
    e.name: e
    for e in (
        Experiment("grid-all", "grid-all", False, "grid, all labelled", "Exp 1", (1, 2, 3, 4, 5, 6)),
        Experiment("grid-single", "grid-single", False, "grid, one labelled", "Exp 2", (2, 3, 4, 5, 6)),
        Experiment("list-all", "list-all", False, "list, all labelled", "Exp 3 (v2)", (3,)),
        Experiment(
            "grid-single-local", "grid-single", True, "grid, one labelled, local", "Exp 3 (v1), 2L (v2)", (1, 3, 5)
        ),
        Experiment("list-all-local", "list-all", True, "list, all labelled, local", "Exp 3L (v2)", (3,)),
        Experiment("color", "color", False, "8 colour counts", "Color", (1, 3, 5)),
        Experiment("grid-random", "grid-random", False, "grid, random number labelled", "Table 2", (2, 3, 4, 5, 6)),
        Experiment("grid-drop-one", "grid-drop-one", False, "grid, all but one labelled", "Table 2", (3, 4, 5, 6)),
        Experiment("cifar10", "none", False, "CIFAR-10, unconditional", "Fig 12", (0,)),
    )
}


@dataclass(frozen=True)
class Network:
    """EDM2 U-Net settings; the defaults are edm2-img64-xs.

    What XS leaves as it is, is fixed in `lcs/model/edm2.py`: no dropout, a 2x2 box for resampling, a noise embedding as
    wide as the first level, the balances of sums and concatenations, clipping at 256.
    """

    channels: int = 128
    channel_mult: tuple[int, ...] = (1, 2, 3, 4)
    num_blocks: int = 3
    attn_resolutions: tuple[int, ...] = (16, 8)
    channels_per_head: int = 64
    unshuffle: int = 1  # space-to-depth factor of the stem
    channel_mult_emb: int | None = None  # width of the embedding over `channels`; None: as wide as the widest level


@dataclass(frozen=True)
class Recipe:
    """Optimisation settings; the defaults are the paper's."""

    batch: int = 2048
    samples: int = 128 * 2**20
    lr: float = 0.0120
    lr_decay_batches: int = 35_000  # inverse square root decay after this many batches
    lr_rampup_samples: int = 10_000_000
    lr_anneal: float = 0.0  # over this last share of training the rate also falls linearly to zero,
    anneal_average: bool = False  # from the averaged weights on, with a new optimizer: not from where the run just is
    optimizer: str = "adam"  # or muon, see lcs.training.optimizer
    betas: tuple[float, float] = (0.9, 0.99)
    p_mean: float = -0.8
    p_std: float = 1.6
    # The first so many samples are drawn at high noise: where objects go is decided there, and a network that has
    # nothing else to learn yet learns it many times faster.
    high_noise_samples: int = 0
    high_noise: tuple[float, float] = (1.4, 1.2)  # mean and standard deviation of ln sigma, then
    ema_stds: tuple[float, ...] = (0.05, 0.10)  # relative widths; the first average is the one in use


@dataclass(frozen=True)
class Scale:
    name: str
    resolution: int
    scenes_per_count: int
    network: Network
    local_network: Network
    recipe: Recipe
    local_recipe: Recipe
    labelled_recipe: Recipe | None = None  # of standard models with labels, if not `recipe`
    color_recipe: Recipe | None = None  # of those told colours, if not that
    # Of labelled standard models on more than `grown_beyond` objects: they begin with the weights of the next fewer,
    # whose scenes are among their own. None: all begin at random, as in the paper.
    grown_recipe: Recipe | None = None
    grown_beyond: int = MAIN_OBJECTS
    local_radius: int = 2  # k: a patch is (2k+1)^2 cells
    list_slots: int = 12
    packed: bool = False  # shipped as rows of int8 (lcs/packing.py), not fp16
    sigma_data: float = 0.5
    # Images of scenes enter the model as (rgb / 255 - mean) / std * sigma_data.
    pixel_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    pixel_std: tuple[float, float, float] = (0.25, 0.25, 0.25)  # with sigma_data 0.5: rgb / 127.5 - 1


MINI_LABELLED = Recipe(
    optimizer="muon",
    batch=32,
    samples=400_000,
    lr=0.02,
    lr_decay_batches=500,
    lr_rampup_samples=3_000,
    lr_anneal=0.375,  # from 250,000 samples on
    anneal_average=True,
    p_mean=0.8,
    p_std=1.6,
    high_noise_samples=30_000,
    # Averaged over a third of training, grid-all follows more locations than it saw; narrower, it did not.
    ema_stds=(0.15, 0.05),
)

SCALES = {
    s.name: s
    for s in (
        Scale(
            name="mini",
            packed=True,  # all models of the paper's tables have to fit into 100 MB
            resolution=64,
            pixel_mean=(0.498, 0.495, 0.490),  # of rendered scenes with 1-3 objects
            pixel_std=(0.075, 0.073, 0.073),
            scenes_per_count=100_000,
            network=Network(
                channels=32,
                channel_mult=(1, 1, 2, 3),
                num_blocks=1,
                attn_resolutions=(8,),
                channels_per_head=32,
                channel_mult_emb=12,  # 384: many locations at once must not collide in the embedding
                unshuffle=2,
            ),
            local_network=Network(
                channels=32,
                channel_mult=(1, 2),
                num_blocks=1,
                attn_resolutions=(),
                channels_per_head=32,
                channel_mult_emb=12,  # 384 here too: two labels in one patch must not cancel
                unshuffle=2,
            ),
            recipe=Recipe(
                optimizer="muon",
                batch=32,
                samples=300_000,
                lr=0.02,
                lr_decay_batches=500,
                lr_rampup_samples=10_000,
                lr_anneal=0.7,
                p_mean=-0.4,
                p_std=1.4,
            ),
            labelled_recipe=MINI_LABELLED,
            # A colour says nothing about where: it matters while objects are seen and their colours not yet. What it
            # asks for is learned more slowly than locations.
            color_recipe=replace(MINI_LABELLED, samples=560_000, high_noise=(2.2, 0.8)),
            # The rate at which the others' end begins, falling to zero from there.
            grown_recipe=replace(
                MINI_LABELLED,
                samples=96_000,  # 32,000 leave extra objects in crowded scenes
                lr=0.008,
                lr_decay_batches=10_000,
                lr_anneal=1.0,
                anneal_average=False,
                high_noise_samples=0,
            ),
            local_recipe=Recipe(
                optimizer="muon",
                batch=32,
                samples=500_000,  # in twice as many, two labels in one patch begin to cancel
                lr=0.02,
                lr_decay_batches=500,
                lr_rampup_samples=3_000,
                p_mean=0.4,
                p_std=1.6,
                ema_stds=(0.15, 0.05),
            ),
        ),
        Scale(
            name="paper",
            resolution=128,
            scenes_per_count=500_000,
            network=Network(),
            local_network=Network(),
            recipe=Recipe(),
            local_recipe=Recipe(),
        ),
    )
}


@dataclass(frozen=True)
class Run:
    """One trained model: an experiment, trained on scenes with 1..`objects` objects, at a scale."""

    experiment: Experiment
    objects: int
    scale: Scale

    @property
    def name(self) -> str:
        return f"{self.experiment.name}-m{self.objects}" if self.objects else self.experiment.name

    @property
    def network(self) -> Network:
        if self.experiment.local:
            return self.scale.local_network
        if self.labelled:
            return self.scale.network
        # Without labels the embedding carries the noise level only and need not be wide.
        return replace(self.scale.network, channel_mult_emb=None)

    @property
    def labelled(self) -> bool:
        return self.experiment.conditioner != "none"

    @property
    def grown_from(self) -> Run | None:
        """The run whose final weights this one begins with: the same experiment on the next fewer objects."""
        scale = self.scale
        if scale.grown_recipe is None or self.objects <= scale.grown_beyond or self.experiment.local:
            return None
        return replace(self, objects=max(m for m in self.experiment.objects if m < self.objects))

    @property
    def recipe(self) -> Recipe:
        return getattr(self.scale, self.recipe_name)

    @property
    def recipe_name(self) -> str:
        """Which of the scale's recipes is this run's."""
        if self.experiment.local:
            return "local_recipe"
        if self.grown_from is not None:
            return "grown_recipe"
        own = ("color_recipe",) if self.experiment.conditioner == "color" else ()
        names = (*own, "labelled_recipe") if self.labelled else ()
        return next((name for name in names if getattr(self.scale, name) is not None), "recipe")

    @property
    def pixel_mean(self) -> tuple[float, float, float]:
        return CIFAR_PIXELS[0] if self.experiment.name == "cifar10" else self.scale.pixel_mean

    @property
    def pixel_std(self) -> tuple[float, float, float]:
        return CIFAR_PIXELS[1] if self.experiment.name == "cifar10" else self.scale.pixel_std


def get_experiment(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise LcsError(f"unknown experiment {name!r}; choose from {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]


def get_scale(name: str) -> Scale:
    if name not in SCALES:
        raise LcsError(f"unknown scale {name!r}; choose from {', '.join(SCALES)}")
    return SCALES[name]


def get_run(experiment: str, objects: int, scale: str) -> Run:
    exp = get_experiment(experiment)
    low = 0 if exp.conditioner == "none" else 1
    high = 0 if exp.conditioner == "none" else 6
    if not low <= objects <= high:
        raise LcsError(f"--objects {objects} is not possible for {experiment}; allowed: {low}..{high}")
    return Run(exp, objects, get_scale(scale))


def paper_runs(scale: str) -> list[Run]:
    """Every model of the paper's tables and figures at `scale`, the most needed first."""
    runs = [get_run(e.name, m, scale) for e in EXPERIMENTS.values() for m in e.objects]
    order = list(EXPERIMENTS)

    def place(run: Run) -> tuple:
        return run.objects != 3, run.name not in NEXT_NEEDED, order.index(run.experiment.name)

    return sorted(runs, key=place)


def with_samples(run: Run, samples: int) -> Run:
    """The run trained on another number of samples."""
    return replace(run, scale=replace(run.scale, **{run.recipe_name: replace(run.recipe, samples=samples)}))
