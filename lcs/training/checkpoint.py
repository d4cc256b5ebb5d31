"""The state of a training run on disk: one safetensors file, whole or absent, plus a loss log in CSV.

RUN/state.safetensors            everything needed to go on: weights, the optimizer's moments, EMA averages
RUN/snapshot-12000.safetensors   EMA averages at regular times (samples seen), for post-hoc reconstruction
RUN/early|mid|late.safetensors   EMA weights at three times of training (the scatter plot needs them)
RUN/loss.csv, RUN/loss.png       training loss
RUN/run.json                     settings, so that a folder is never continued with other ones
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lcs.data.files import atomic_write, write_error
from lcs.errors import LcsError
from lcs.training.ema import PowerEMA, posthoc_weights, reconstruct

STATE = "state.safetensors"


def save_tensors(path: Path, tensors: dict[str, Tensor], meta: dict) -> None:
    """Tensors and a JSON-able `meta` in one atomic file."""
    contiguous = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    with atomic_write(path) as temporary:
        save_file(contiguous, temporary, metadata={"meta": json.dumps(meta, sort_keys=True)})


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict]:
    try:
        with safe_open(path, framework="pt") as handle:
            meta = json.loads((handle.metadata() or {}).get("meta", "{}"))
            return {name: handle.get_tensor(name) for name in handle.keys()}, meta  # noqa: SIM118
    except FileNotFoundError:
        raise LcsError(f"{path} does not exist") from None
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise LcsError(f"{path} is not a readable checkpoint: {error}") from None


def load_meta(path: Path) -> dict:
    """The `meta` of a checkpoint without its tensors."""
    try:
        with safe_open(path, framework="pt") as handle:
            return json.loads((handle.metadata() or {}).get("meta", "{}"))
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise LcsError(f"{path} is not a readable checkpoint: {error}") from None


def training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, ema_state: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Everything a step changes, under flat names: `model.*`, `optimizer.<moment>.*`, `ema.*`."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, moment in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = moment
    return tensors | {f"ema.{name}": value for name, value in ema_state.items()}


@torch.no_grad()
def restore_training_state(
    tensors: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Inverse of `training_state`; returns the EMA's part."""

    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

    model.load_state_dict(part("model."))
    parameters = dict(model.named_parameters())
    for path, moment in part("optimizer.").items():
        key, name = path.split(".", 1)
        parameter = parameters[name]
        # zeros_like keeps the parameter's memory layout, which the fused optimizer takes for granted
        moment = torch.zeros_like(parameter).copy_(moment) if moment.shape == parameter.shape else moment.clone()
        optimizer.state[parameter][key] = moment
    return part("ema.")


def save_snapshot(folder: Path, samples: int, ema: PowerEMA) -> None:
    meta = {"samples": samples, "ema_steps": ema.step, "stds": list(ema.stds)}
    save_tensors(Path(folder) / f"snapshot-{samples}.safetensors", ema.state_dict(), meta)


def snapshots(folder: Path) -> list[tuple[Path, dict]]:
    """The EMA snapshots of a run with their meta, in the order they were made."""
    found = [(path, load_meta(path)) for path in Path(folder).glob("snapshot-*.safetensors")]
    return sorted(found, key=lambda item: item[1]["samples"])


def posthoc_ema(folder: Path, std: float, samples: int | None = None) -> tuple[dict[str, Tensor], int]:
    """The EMA weights of any relative width at a snapshot of a run, reconstructed from all; and the samples seen then.

    The snapshot is the last, or the one nearest to `samples`.
    """
    kept = snapshots(folder)
    if not kept:
        raise LcsError(f"{folder} has no EMA snapshots")
    end = min((meta for _, meta in kept), key=lambda m: abs(m["samples"] - (samples or kept[-1][1]["samples"])))
    tracked = [(path, i, meta["ema_steps"], s) for path, meta in kept for i, s in enumerate(meta["stds"])]
    weights = posthoc_weights([(steps, s) for _, _, steps, s in tracked], end["ema_steps"], std)

    def averages():
        for path, i, _, _ in tracked:
            prefix = f"ema{i}."
            tensors, _ = load_tensors(path)
            yield {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    return reconstruct(averages(), weights), end["samples"]


# ---- loss log -------------------------------------------------------------------------------------

LOSS_COLUMNS = ("samples", "loss", "weighted_error", "lr", "seconds")


def truncate_loss_log(path: Path, samples: int) -> None:
    """Drops the rows a killed run wrote after its last checkpoint."""
    rows = [row for row in read_loss_log(path) if row[0] <= samples]
    with atomic_write(path) as temporary, open(temporary, "w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(LOSS_COLUMNS)
        writer.writerows(rows)


def append_loss_log(path: Path, row: tuple) -> None:
    try:
        with open(path, "a", newline="") as handle:
            csv.writer(handle).writerow(row)
    except OSError as error:
        raise write_error(path, error) from None


def read_loss_log(path: Path) -> list[tuple[float, ...]]:
    """Complete rows only: the last line of a killed run may be cut."""
    if not Path(path).exists():
        return []
    rows = []
    with open(path, newline="") as handle:
        for row in list(csv.reader(handle))[1:]:
            try:
                rows.append(tuple(float(v) for v in row))
            except ValueError:
                continue
    return [row for row in rows if len(row) == len(LOSS_COLUMNS)]


def plot_loss(csv_path: Path, png_path: Path, title: str) -> None:
    """The loss curve as a picture: weighted error against samples, both logarithmic."""
    from matplotlib.figure import Figure

    rows = read_loss_log(csv_path)
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.loglog([r[0] for r in rows], [max(r[2], 1e-6) for r in rows], lw=1)
    axes.set(title=title, xlabel="samples seen", ylabel="weighted squared error")
    axes.grid(alpha=0.3, which="both")
    with atomic_write(png_path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
