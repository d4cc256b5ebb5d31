"""The training loop: one code path from a laptop core to many GPUs.

A step takes the next `recipe.batch` samples. They are cut into micro-batches which the processes share;
gradients are sums over samples divided by the batch, so the result does not depend on how many
processes there are. After the optimizer's update the weights are renormalised (the paper's one change to EDM2)
and the EMAs advance. All randomness is keyed by the sample index (`batches.py`), hence the whole state
of a run is its tensors and its step, and a killed run continues to the same result.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from torch import nn
from tqdm import tqdm

import lcs
from lcs.data.files import as_json, read_json, sha256_of, write_json
from lcs.diffusion.loss import edm2_loss
from lcs.errors import LcsError
from lcs.experiments import Recipe, Run
from lcs.model.build import build_model, resolution_of, trained_network
from lcs.model.layers import normalize_weights_
from lcs.packing import unpack
from lcs.training import checkpoint
from lcs.training.batches import Batch, make_batch
from lcs.training.ema import PowerEMA
from lcs.training.optimizer import build_optimizer

STAGES = {"early": 0.1, "mid": 0.4, "late": 1.0}  # fractions of training at which weights are kept
SNAPSHOTS = 8  # per run, for post-hoc EMA
MAX_SKIPPED = 20  # steps with infinite gradients in succession, fp16
LOG_SAMPLES = 1_000  # samples between rows of the loss log
ORIGIN = ("continued_at", "grown_from")  # settings that say where the first weights come from


@dataclass(frozen=True)
class TrainSettings:
    """How to run, as opposed to what to train: none of these changes the result beyond rounding."""

    micro_batch: int | None = None  # samples at once on a device; default: the whole share of the batch
    mixed_precision: str | None = None  # no, bf16 or fp16; None: what `accelerate launch` was told, else no
    cpu: bool = False
    checkpoint_seconds: float = 300.0
    stop_after_samples: int | None = None  # leave early, as if interrupted at a checkpoint
    progress: bool = True
    compile: bool = False  # torch.compile: a minute or two at the start, then faster steps, with bf16 above all


def learning_rate(recipe: Recipe, samples: int, begun: int = 0) -> float:
    """EDM2's schedule: linear ramp-up, constant, then inverse square root decay of the batch number; an end, if any.

    A run that continues from bare weights has begun at `begun` samples: its optimizer starts anew, and the ramp; so it
    is where the end begins from the average.
    """
    if recipe.anneal_average and samples >= anneal_begins(recipe):
        begun = anneal_begins(recipe)
    batches = samples / recipe.batch
    rate = recipe.lr / math.sqrt(max(batches / recipe.lr_decay_batches, 1.0))
    ramp = min((samples - begun) / max(recipe.lr_rampup_samples, 1), 1.0)
    end = min((recipe.samples - samples) / max(recipe.lr_anneal * recipe.samples, 1), 1.0)
    return rate * ramp * end


def anneal_begins(recipe: Recipe) -> int:
    """Samples seen before the first batch whose rate falls towards the end: a batch's rate is its first sample's."""
    return math.ceil((1 - recipe.lr_anneal) * recipe.samples / recipe.batch) * recipe.batch


def train(
    run: Run,
    source,
    folder: Path,
    seed: int = 0,
    settings: TrainSettings = TrainSettings(),  # noqa: B008
    continued: Path | None = None,
    grown: Path | None = None,
) -> Path:
    """Trains `run` to its end in `folder`, resuming what is there; returns the path of the final weights.

    `continued` is a weights file of this very run, e.g. the shipped one, to go on from when its training state is no
    longer there. `grown` is the weights file of `run.grown_from`, to begin with.
    """
    folder = Path(folder)
    dynamo = TorchDynamoPlugin(backend="inductor", dynamic=False) if settings.compile else None  # None: as launched
    accelerator = Accelerator(cpu=settings.cpu, mixed_precision=settings.mixed_precision, dynamo_plugin=dynamo)
    main = accelerator.is_main_process
    if main:
        _check_folder(folder, run, seed, _origin(run, continued, grown), source)
        for orphan in (*folder.glob(".*.tmp"), *folder.glob("*.tmp")):  # of a killed process
            orphan.unlink(missing_ok=True)
    accelerator.wait_for_everyone()
    settled = read_json(folder / "run.json")
    origin = {key: settled[key] for key in ORIGIN if key in settled}
    begun = origin.get("continued_at", [0])[-1]
    if is_finished(folder, run):
        return folder / "late.safetensors"

    torch.manual_seed(seed)  # initial weights
    whole = build_model(run)
    network = trained_network(whole)
    if origin and not (folder / checkpoint.STATE).exists():
        _copy_weights(network, continued or grown)
    normalize_weights_(network)
    network.to(accelerator.device, memory_format=torch.channels_last).train()
    optimizer = build_optimizer(network, run.recipe)
    ema = PowerEMA(network.state_dict(), run.recipe.ema_stds)
    samples, ema.step = begun, begun // run.recipe.batch
    if (folder / checkpoint.STATE).exists():
        tensors, meta = checkpoint.load_tensors(folder / checkpoint.STATE)
        ema.load_state_dict(checkpoint.restore_training_state(tensors, network, optimizer), meta["ema_steps"])
        samples = meta["samples"]
    if main:
        checkpoint.truncate_loss_log(folder / "loss.csv", samples)
    model, optimizer = accelerator.prepare(network, optimizer)

    step = _Step(run, whole, source, seed, accelerator, model, network, optimizer, settings)
    bar = tqdm(
        total=run.recipe.samples, initial=samples, unit="smp", unit_scale=True, smoothing=0.05,
        disable=not (main and settings.progress), desc=run.name, mininterval=2.0,
    )  # fmt: skip
    saver = _Saver(run, folder, network, optimizer, ema, origin)
    log = _LossLog(folder / "loss.csv", samples)
    last_save = time.monotonic()
    if main:
        saver.make_up_for(samples)
    with bar:
        while samples < run.recipe.samples:
            if run.recipe.anneal_average and samples == anneal_begins(run.recipe):
                network.load_state_dict(ema.average(run.recipe.ema_stds[0]))
                normalize_weights_(network)
                getattr(optimizer, "optimizer", optimizer).state.clear()  # accelerate wraps it
            loss, error = step(samples, learning_rate(run.recipe, samples, begun))
            if not math.isfinite(loss):
                raise LcsError(
                    f"{run.name}: loss, gradient or weights are {loss} at {samples} samples; stopped, not saved. "
                    f"The last good checkpoint is {folder / checkpoint.STATE}; try a lower learning rate"
                )
            ema.update(network.state_dict())
            before, samples = samples, samples + run.recipe.batch
            bar.update(run.recipe.batch)
            if main:
                if log.add(samples, loss, error, learning_rate(run.recipe, before, begun)):
                    bar.set_postfix_str(f"loss {log.last_loss:+.3f}, error {log.last_error:.4f}", refresh=False)
                saver.keep_stages(before, samples)
            leave = settings.stop_after_samples is not None and samples >= settings.stop_after_samples
            if leave or samples >= run.recipe.samples or time.monotonic() - last_save > settings.checkpoint_seconds:
                if main:
                    saver.save_state(samples)
                last_save = time.monotonic()
            if leave:
                break
    accelerator.wait_for_everyone()
    return folder / "late.safetensors"


def _copy_weights(network: nn.Module, path: Path) -> None:
    tensors, _ = checkpoint.load_tensors(path)
    try:
        network.load_state_dict(unpack(tensors))
    except RuntimeError as error:
        raise LcsError(f"{path} is of another network: {str(error).splitlines()[-1].strip()}") from None


@torch.no_grad()
def _all_finite(tensors: list[torch.Tensor]) -> bool:
    return bool(torch.stack(torch._foreach_norm(tensors)).isfinite().all())


class _Step:
    """One optimizer step over a global batch, shared by all processes."""

    def __init__(self, run, whole, source, seed, accelerator, model, network, optimizer, settings: TrainSettings):
        self.run, self.whole, self.source, self.seed = run, whole, source, seed
        self.accelerator, self.model, self.network, self.optimizer = accelerator, model, network, optimizer
        world = accelerator.num_processes
        if run.recipe.batch % world:
            raise LcsError(f"batch {run.recipe.batch} cannot be shared by {world} processes; use a divisor of it")
        self.share, self.skipped = run.recipe.batch // world, 0
        self.micro = min(settings.micro_batch or self.share, self.share)

    def __call__(self, first: int, rate: float) -> tuple[float, float]:
        """Updates the weights with samples first..first+batch-1; mean loss and mean weighted error."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        begin = first + self.accelerator.process_index * self.share
        mine = np.arange(begin, begin + self.share)
        parts = np.array_split(mine, -(-self.share // self.micro))
        totals = torch.zeros(2, device=self.accelerator.device)
        for k, part in enumerate(parts):
            last = k == len(parts) - 1
            batch = make_batch(self.run, self.whole, self.source, self.seed, part, self.accelerator.device)
            hold = contextlib.nullcontext() if last else self.accelerator.no_sync(self.model)
            with hold:
                losses, errors = self._losses(batch)
                # Processes average their gradients, so the mean over my share is the mean over the batch.
                self.accelerator.backward(losses.sum() / (self.share * len(losses) / len(part)))
            totals += torch.stack([losses.detach().mean(), errors.mean()]) * (len(part) / self.share)
        loss, error = self.accelerator.reduce(totals, "mean").tolist()
        if math.isfinite(loss) and not self._finite_gradients():
            loss = math.nan
        if math.isfinite(loss):
            self.optimizer.step()
            normalize_weights_(self.network)
            loss = loss if _all_finite(list(self.network.parameters())) else math.nan
        self.optimizer.zero_grad(set_to_none=True)
        return loss, error

    def _finite_gradients(self) -> bool:
        """A finite loss can have infinite gradients. In fp16 that is normal now and then: the loss scaler skips such
        steps and halves its scale, which MAX_SKIPPED times in succession cannot cure."""
        finite = _all_finite([p.grad for p in self.network.parameters() if p.grad is not None])
        self.skipped = 0 if finite else self.skipped + 1
        return finite or (self.accelerator.mixed_precision == "fp16" and self.skipped <= MAX_SKIPPED)

    def _losses(self, batch: Batch):
        """Uncertainty-weighted loss, and the plain weighted squared error for the log."""
        with self.accelerator.autocast():
            losses = edm2_loss(
                self.model, batch.images, batch.labels, batch.sigma, batch.noise, self.run.scale.sigma_data
            )  # [B]
        with torch.no_grad():
            u = self.network.logvar(batch.sigma).flatten()
            errors = (losses.detach() - u) * u.exp()
        return losses, errors


class _Saver:
    """Writes the state, the three stages and the EMA snapshots of one run."""

    def __init__(self, run: Run, folder: Path, network: nn.Module, optimizer, ema: PowerEMA, origin: dict) -> None:
        self.run, self.folder, self.network, self.ema, self.origin = run, folder, network, ema, origin
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it

    def save_state(self, samples: int) -> None:
        tensors = checkpoint.training_state(self.network, self.optimizer, self.ema.state_dict())
        meta = {"samples": samples, "ema_steps": self.ema.step, "run": self.run.name, "version": lcs.__version__}
        checkpoint.save_tensors(self.folder / checkpoint.STATE, tensors, meta)
        checkpoint.plot_loss(self.folder / "loss.csv", self.folder / "loss.png", self.run.name)

    def keep_stages(self, before: int, samples: int) -> None:
        """EMA weights whenever a stage or snapshot time lies in (before, samples]."""
        total = self.run.recipe.samples
        for name, fraction in STAGES.items():
            if before < fraction * total <= samples or (fraction == 1.0 and samples >= total > before):
                self._save_ema(self.folder / f"{name}.safetensors", samples, stage=name)
        if samples * SNAPSHOTS // total > before * SNAPSHOTS // total:
            checkpoint.save_snapshot(self.folder, samples, self.ema)

    def make_up_for(self, samples: int) -> None:
        """What a run of another length has not kept: the end, if it is there already; stages that have gone by.

        The stages are taken from the nearest snapshots. Those kept at about the right time are left alone.
        """
        total, width = self.run.recipe.samples, self.run.recipe.ema_stds[0]
        if samples >= total:
            self._save_ema(self.folder / "late.safetensors", samples, "late")
            checkpoint.save_snapshot(self.folder, samples, self.ema)
        for name, fraction in STAGES.items():
            path, due = self.folder / f"{name}.safetensors", fraction * total
            kept = checkpoint.load_meta(path)["samples"] if path.exists() else 0
            if name == "late" or due > samples or abs(kept - due) <= total / SNAPSHOTS:
                continue
            if checkpoint.snapshots(self.folder):
                tensors, at = checkpoint.posthoc_ema(self.folder, width, round(due))
                checkpoint.save_tensors(path, tensors, stage_meta(self.run, name, at, width, self.origin))

    def _save_ema(self, path: Path, samples: int, stage: str) -> None:
        width = self.run.recipe.ema_stds[0]
        checkpoint.save_tensors(path, self.ema.average(width), stage_meta(self.run, stage, samples, width, self.origin))


def stage_meta(run: Run, stage: str, samples: int, width: float, origin: dict) -> dict:
    """What is written into the file of a stage's EMA weights."""
    return origin | {
        "run": run.name, "scale": run.scale.name, "stage": stage, "samples": samples,
        "ema_std": width, "version": lcs.__version__,
        "continued_at": [at for at in origin.get("continued_at", []) if at < samples],
    }  # fmt: skip


class _LossLog:
    """Averages losses over LOG_SAMPLES samples and appends a row to the CSV."""

    def __init__(self, path: Path, samples: int):
        self.path, self.next_row = path, _next_row(samples)
        self.sum_loss = self.sum_error = 0.0
        self.steps = 0
        self.started = time.monotonic()
        self.last_loss = self.last_error = math.nan

    def add(self, samples: int, loss: float, error: float, rate: float) -> bool:
        self.sum_loss, self.sum_error, self.steps = self.sum_loss + loss, self.sum_error + error, self.steps + 1
        if samples < self.next_row:
            return False
        self.last_loss, self.last_error = self.sum_loss / self.steps, self.sum_error / self.steps
        seconds = time.monotonic() - self.started
        checkpoint.append_loss_log(
            self.path, (samples, f"{self.last_loss:.6g}", f"{self.last_error:.6g}", f"{rate:.6g}", f"{seconds:.1f}")
        )
        self.sum_loss = self.sum_error = 0.0
        self.steps, self.next_row = 0, _next_row(samples)
        return True


def _next_row(samples: int) -> int:
    """Rows stand at the same places however often a run was stopped."""
    return (samples // LOG_SAMPLES + 1) * LOG_SAMPLES


def run_folder(out: Path, run: Run) -> Path:
    return Path(out) / run.scale.name / run.name


def is_finished(folder: Path, run: Run) -> bool:
    """The state is written last: after the late weights and the last snapshot."""
    files = folder / checkpoint.STATE, folder / "late.safetensors"
    return all(f.exists() and int(checkpoint.load_meta(f)["samples"]) >= run.recipe.samples for f in files)


def run_settings(run: Run, seed: int) -> dict:
    """What determines the result: written beside the weights, and into their manifest."""
    return {
        "run": run.name,
        "experiment": run.experiment.name,
        "objects": run.objects,
        "scale": run.scale.name,
        "seed": seed,
        "resolution": resolution_of(run),
        "local_radius": run.scale.local_radius if run.experiment.local else None,
        "pixels": {"mean": run.scale.pixel_mean, "std": run.scale.pixel_std, "sigma_data": run.scale.sigma_data},
        "network": asdict(run.network),
        "recipe": asdict(run.recipe),
    }


def reconstruct_stage(run: Run, out: Path, stage: str, width: float, samples: int | None = None) -> Path:
    """Replaces a stage's weights by the post-hoc average of a relative width that ends near so many samples."""
    if stage not in STAGES:
        raise LcsError(f"unknown stage {stage!r}; choose from {', '.join(STAGES)}")
    folder = run_folder(out, run)
    tensors, at = checkpoint.posthoc_ema(folder, width, samples)
    path = folder / f"{stage}.safetensors"
    settled = read_json(folder / "run.json")
    origin = {key: settled[key] for key in ORIGIN if key in settled}
    checkpoint.save_tensors(path, tensors, stage_meta(run, stage, at, width, origin))
    return path


def _origin(run: Run, continued: Path | None, grown: Path | None) -> dict:
    """Where a run's first weights come from, for its settings: nothing if they are random.

    `continued_at`: where the optimizer began anew, in samples, there and before. `grown_from`: the other run.
    """
    if continued is not None:
        meta = checkpoint.load_meta(continued)
        before = {"grown_from": meta["grown_from"]} if "grown_from" in meta else {}
        return before | {"continued_at": [*meta.get("continued_at", []), int(meta["samples"])]}
    if grown is not None:
        meta = checkpoint.load_meta(grown)
        return {"grown_from": {"run": run.grown_from.name, "samples": meta["samples"], "sha256": sha256_of(grown)}}
    return {}


def _check_folder(folder: Path, run: Run, seed: int, began: dict, source) -> None:
    """A folder belongs to one run: refuses to continue it with other settings or images, except for longer."""
    wanted = run_settings(run, seed) | {"data": source.identity}
    path = folder / "run.json"
    if run.grown_from is not None and not began and not (folder / checkpoint.STATE).exists():
        raise LcsError(f"{run.name} begins with the weights of {run.grown_from.name}; train it by `lcs train`")
    if not path.exists():
        write_json(path, wanted | began)
        return
    found = read_json(path)
    if not (folder / checkpoint.STATE).exists():  # nothing was kept of an earlier start
        found = {k: v for k, v in found.items() if k not in ORIGIN} | began
    if not _annealing(folder, found["recipe"]):  # until then the length of a run only says when to stop
        if _annealing(folder, found["recipe"] | {"samples": run.recipe.samples}):
            raise LcsError(f"{folder} has seen too many samples to end at {run.recipe.samples}; give more --samples")
        found["recipe"]["samples"] = run.recipe.samples
    found = {"pixels": as_json(wanted["pixels"]), "data": source.identity} | found  # not recorded by earlier versions
    differs = [k for k in wanted if found.get(k) != as_json(wanted[k])]
    if differs:
        raise LcsError(f"{folder} was trained with other settings ({', '.join(differs)}); use another --out folder")
    write_json(path, found)


def _annealing(folder: Path, recipe: dict) -> bool:
    """True if the run has come to the end of its schedule, where the rate depends on its length."""
    state = folder / checkpoint.STATE
    last = int(checkpoint.load_meta(state)["samples"]) if state.exists() else 0
    begins = anneal_begins(Recipe(**{k: recipe[k] for k in ("batch", "samples", "lr_anneal") if k in recipe}))
    return last > begins
