"""Training the counter on rendered scenes: seeded, resumable, about half an hour on one idle core.

Which images a step sees and how they are degraded depends on (seed, sample) alone, so the state of a run is
its tensors and the number of samples seen; a killed run continues to the same result.

    FOLDER/state.safetensors    weights, Adam moments, averaged weights
    FOLDER/final.safetensors    the averaged weights at the end
    FOLDER/loss.csv             samples, loss, heat map loss, learning rate, seconds
    FOLDER/recipe.json          settings, so that a folder is never continued with other ones
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from lcs.counter.data import SIZE, CounterData, DataSpec, open_folder, render_folder
from lcs.counter.degrade import IGNORED_ABOVE, Degraded, DegradeSettings, degrade
from lcs.counter.detector import BOX_UNIT, FIELDS, Architecture, Detector, export_counter
from lcs.counter.evaluate import choose_thresholds, measure
from lcs.data.files import as_json, read_json, write_json
from lcs.errors import LcsError
from lcs.rng import hashed_seeds
from lcs.scenes import world
from lcs.training import checkpoint
from lcs.training.batches import dataset_rows
from lcs.weights import WEIGHTS

DEGRADE_STREAM = 11  # of lcs.rng
TRAIN_IMAGES = 36_400
LOG_STEPS = 10  # steps between rows of the loss log
NEAR = 1.2  # pixels: so close to a centre, attributes and offsets are trained
IGNORE_RADIUS = 4.0  # pixels around the centre of a hopeless smear where the heat map is not trained
HEAT_SIGMA = {"large": 1.2, "small": 0.8}  # pixels


@dataclass(frozen=True)
class CounterRecipe:
    samples: int = 96_000
    batch: int = 32
    lr: float = 3e-3
    warmup: int = 3_000  # samples
    weight_decay: float = 1e-4
    ema: float = 0.998  # per step
    seed: int = 0
    architecture: Architecture = field(default_factory=Architecture)
    degrade: DegradeSettings = field(default_factory=DegradeSettings)


def learning_rate(recipe: CounterRecipe, samples: int) -> float:
    """Linear warm-up, then a half cosine to zero."""
    ramp = min((samples + recipe.batch) / max(recipe.warmup, 1), 1.0)
    return recipe.lr * ramp * 0.5 * (1 + math.cos(math.pi * min(samples / recipe.samples, 1.0)))


# ---- targets and loss -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Targets:
    """What the maps should be, for a batch. M positions (image, row, column) lie close to some centre."""

    heat: Tensor  # float32 [B, H, W]: 1 at centres, a Gaussian around them
    weight: Tensor  # float32 [B, H, W]: 0 where the heat map is not trained
    image: Tensor  # int64 [M]
    row: Tensor  # int64 [M]
    col: Tensor  # int64 [M]
    slot: Tensor  # int64 [M]: which object of its image
    offset: Tensor  # float32 [M, 2], in pixels
    box: Tensor  # float32 [M, 4], in units of BOX_UNIT pixels
    clean: Tensor  # float32 [M]: 1 - strength of damage


def make_targets(data: CounterData, degraded: Degraded) -> Targets:
    center = torch.from_numpy(data.table.locations) * SIZE  # [B, 12, 2] in pixels
    sigma = torch.tensor([HEAT_SIGMA[name] for name in world.SIZE_NAMES])[torch.from_numpy(data.table.sizes).long()]
    hopeless = degraded.present & (degraded.strength > IGNORED_ABOVE)
    valid = degraded.present & ~hopeless

    middle = torch.arange(SIZE) + 0.5
    dx = center[..., 0, None, None] - middle[None, None, None, :]  # [B, 12, 1, W]
    dy = center[..., 1, None, None] - middle[None, None, :, None]  # [B, 12, H, 1]
    square = dx**2 + dy**2  # [B, 12, H, W]
    bumps = torch.exp(-square / (2 * sigma[..., None, None] ** 2)) * valid[..., None, None]
    heat = bumps.amax(1)
    at = center.long().clamp(0, SIZE - 1)
    image, slot = valid.nonzero(as_tuple=True)
    heat[image, at[image, slot, 1], at[image, slot, 0]] = 1.0
    ignored = ((square < IGNORE_RADIUS**2) & hopeless[..., None, None]).any(1) & (heat < 0.1)

    far = torch.where(valid[..., None, None], square, torch.full((), 1e9))
    nearest, owner = far.min(1)  # [B, H, W]
    image, row, col = (nearest < NEAR**2).nonzero(as_tuple=True)
    slot = owner[image, row, col]
    own = center[image, slot]
    sides = torch.from_numpy(data.boxes)[image, slot] * SIZE
    return Targets(
        heat=heat,
        weight=(~ignored).float(),
        image=image,
        row=row,
        col=col,
        slot=slot,
        offset=own - torch.stack([middle[col], middle[row]], 1),
        box=torch.cat([own - sides[:, :2], sides[:, 2:] - own], 1) / BOX_UNIT,
        clean=1 - degraded.strength[image, slot],
    )


def loss_of(maps: dict[str, Tensor], data: CounterData, targets: Targets) -> tuple[Tensor, Tensor]:
    """The whole loss, and the heat map's part of it (CenterNet's penalty-reduced focal loss per object)."""
    logit = maps["heat"][:, 0]
    p = logit.sigmoid()
    center = targets.heat == 1
    positive = (1 - p) ** 2 * F.logsigmoid(logit) * center
    negative = (1 - targets.heat) ** 4 * p**2 * F.logsigmoid(-logit) * ~center
    heat = -((positive + negative) * targets.weight).sum() / center.sum().clamp(min=1)
    if not len(targets.slot):
        return heat, heat.detach()
    at = {name: maps[name][targets.image, :, targets.row, targets.col] for name in FIELDS}  # [M, channels]
    place = (at["offset"] - targets.offset).abs().sum(1) + 0.3 * (at["box"] - targets.box).abs().sum(1)
    loss = heat + (place * targets.clean).mean()
    weights = {"color": 1.0, "shape": 1.0, "size": 0.3, "material": 0.3}
    table = data.table
    columns = {"color": table.colors, "shape": table.shapes, "size": table.sizes, "material": table.materials}
    for name, weight in weights.items():
        truth = torch.from_numpy(columns[name]).long()[targets.image, targets.slot]
        loss = loss + weight * (F.cross_entropy(at[name], truth, reduction="none") * targets.clean).mean()
    loss = loss + F.binary_cross_entropy_with_logits(at["quality"][:, 0], targets.clean)
    return loss, heat.detach()


# ---- the loop -------------------------------------------------------------------------------------


def train_counter(
    data: CounterData,
    folder: Path,
    recipe: CounterRecipe = CounterRecipe(),  # noqa: B008
    progress: bool = True,
    checkpoint_seconds: float = 120.0,
    stop_after: int | None = None,
) -> Path:
    """Trains to the end in `folder`, resuming what is there; returns the path of the final weights."""
    folder = Path(folder)
    _check_folder(folder, recipe)
    torch.manual_seed(recipe.seed)  # initial weights
    model = Detector(recipe.architecture).to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=recipe.weight_decay)
    average = {name: t.detach().clone() for name, t in model.state_dict().items()}
    samples = 0
    if (folder / checkpoint.STATE).exists():
        tensors, meta = checkpoint.load_tensors(folder / checkpoint.STATE)
        average = checkpoint.restore_training_state(tensors, model, optimizer)
        samples = meta["samples"]
    checkpoint.truncate_loss_log(folder / "loss.csv", samples)
    total = heat_total = steps = 0.0
    started = last_save = time.monotonic()
    with tqdm(total=recipe.samples, initial=samples, unit="img", disable=not progress, desc="counter") as bar:
        while samples < recipe.samples:
            rate = learning_rate(recipe, samples)
            loss, heat = _step(model, optimizer, data, recipe, samples, rate)
            samples += recipe.batch
            _update_average(average, model, recipe, samples)
            total, heat_total, steps = total + loss, heat_total + heat, steps + 1
            bar.update(recipe.batch)
            if steps == LOG_STEPS:
                row = (samples, f"{total / steps:.5g}", f"{heat_total / steps:.5g}", f"{rate:.4g}")
                checkpoint.append_loss_log(folder / "loss.csv", (*row, f"{time.monotonic() - started:.1f}"))
                bar.set_postfix_str(f"loss {total / steps:.3f}, heat {heat_total / steps:.3f}", refresh=False)
                total = heat_total = steps = 0.0
            leave = samples >= recipe.samples or (stop_after is not None and samples >= stop_after)
            if leave or time.monotonic() - last_save > checkpoint_seconds:
                state = checkpoint.training_state(model, optimizer, average)
                checkpoint.save_tensors(folder / checkpoint.STATE, state, {"samples": samples})
                last_save = time.monotonic()
            if leave:
                break
    if samples >= recipe.samples:
        checkpoint.save_tensors(folder / "final.safetensors", average, {"samples": samples})
    return folder / "final.safetensors"


def _step(model, optimizer, data: CounterData, recipe: CounterRecipe, first: int, rate: float) -> tuple[float, float]:
    """One update with samples first..first+batch-1; the loss and its heat map part."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    rows = dataset_rows(recipe.seed, np.arange(first, first + recipe.batch), len(data))
    batch = data.rows(rows)
    generator = torch.Generator().manual_seed(int(hashed_seeds(recipe.seed, DEGRADE_STREAM, np.array([first]))[0]))
    degraded = degrade(batch, generator, recipe.degrade)
    maps = model(degraded.images.to(memory_format=torch.channels_last))
    loss, heat = loss_of(maps, batch, make_targets(batch, degraded))
    if not math.isfinite(loss.item()):
        raise LcsError(f"the counter's loss is {loss.item()} at {first} samples; try a lower learning rate")
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    return loss.item(), heat.item()


def _update_average(average: dict[str, Tensor], model: Detector, recipe: CounterRecipe, samples: int) -> None:
    """Exponential moving average of weights and of the normalisation's statistics."""
    steps = samples // recipe.batch
    keep = min(recipe.ema, (1 + steps) / (10 + steps))
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            average[name].lerp_(value, 1 - keep)
        else:
            average[name].copy_(value)


def _check_folder(folder: Path, recipe: CounterRecipe) -> None:
    wanted, path = as_json(asdict(recipe)), folder / "recipe.json"
    if not path.exists():
        write_json(path, wanted)
        return
    differs = [name for name, value in wanted.items() if read_json(path).get(name) != value]
    if differs:
        raise LcsError(f"{folder} was trained with other settings ({', '.join(differs)}); use another folder")


def load_trained(path: Path, recipe: CounterRecipe) -> Detector:
    """The detector with the weights of `train_counter`, rounded to fp16 as they are shipped."""
    detector = Detector(recipe.architecture)
    tensors, _ = checkpoint.load_tensors(path)
    detector.load_state_dict({n: t.half().float() if t.is_floating_point() else t for n, t in tensors.items()})
    return detector.eval().requires_grad_(False)


def retrain(
    data: Path,
    out: Path,
    recipe: CounterRecipe = CounterRecipe(),  # noqa: B008
    images: int = TRAIN_IMAGES,
    root: Path = WEIGHTS,
) -> dict:
    """Everything from scratch: render, train, choose thresholds, measure on held-out renders, ship to `root`.

    Returns the counter's measured error. Run it again to resume; takes about 50 minutes on one idle core.
    """
    render_folder(data, DataSpec("train", images, part=1_300))
    path = train_counter(open_folder(data), out, recipe)
    detector = load_trained(path, recipe)
    thresholds = choose_thresholds(detector)
    report = measure(detector, thresholds)
    settings = {"recipe": as_json(asdict(recipe)), "images": images}
    export_counter(detector, thresholds, settings, report, root)
    return report
