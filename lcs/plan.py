"""`lcs plan`: what every run costs before anyone pays for it.

FLOPs are counted on the meta device (2 per multiply-add) and tripled for training (forward, gradients of
activations, gradients of weights). Hours on a GPU assume a stated share of its bf16 peak; hours on this machine come
from a measurement of the same network's training step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch

from lcs.bench.compute import bench_train, count_flops
from lcs.experiments import Run, Scale, get_experiment, get_scale, paper_runs
from lcs.model.build import build_model, resolution_of, trained_network
from lcs.training.trainer import SNAPSHOTS, STAGES

GPU_TFLOPS = {"RTX 4090": 165.0, "A100": 312.0, "H100": 989.0}  # dense bf16 peak
CIFAR_IMAGES = 50_000
GPU_SHARE = 0.35  # of the peak, typical for convolutional U-Nets


@dataclass(frozen=True)
class Cost:
    run: str
    scale: str
    parameters: int
    gflop_forward: float  # per training sample: an image, or the two patches of one
    samples: int
    exaflop: float  # of the whole training
    gpu_hours: dict[str, float]
    machine_hours: float  # one thread of this machine
    data_gb: float
    weights_gb: float


@cache  # the number of objects changes neither
def _network_cost(experiment: str, scale: Scale) -> tuple[int, int]:
    """Parameters, and FLOPs of a forward pass on one image or patch."""
    with torch.device("meta"), torch.no_grad():
        network = trained_network(build_model(Run(get_experiment(experiment), 1, scale))).eval()
        x = torch.empty(1, 3, network.resolution, network.resolution)
        labels = torch.empty(1, network.label_dim) if network.label_dim else None
        return sum(p.numel() for p in network.parameters()), count_flops(lambda: network(x, torch.ones(1), labels))


def run_cost(run: Run, machine_gflops: float) -> Cost:
    parameters, forward = _network_cost(run.experiment.name, run.scale)
    per_sample = forward * (2 if run.experiment.local else 1)
    total = 3 * per_sample * run.recipe.samples
    # state: weights, two moments, one average per EMA width; snapshots: the averages; stages: one average each
    copies = 3 + len(run.recipe.ema_stds) * (1 + SNAPSHOTS) + len(STAGES)
    return Cost(
        run=run.name,
        scale=run.scale.name,
        parameters=parameters,
        gflop_forward=per_sample / 1e9,
        samples=run.recipe.samples,
        exaflop=total / 1e18,
        gpu_hours={gpu: total / (peak * 1e12 * GPU_SHARE) / 3600 for gpu, peak in GPU_TFLOPS.items()},
        machine_hours=total / (machine_gflops * 1e9) / 3600,
        data_gb=_images(run) * resolution_of(run) ** 2 * 3 / 1e9,
        weights_gb=copies * parameters * 4 / 1e9,
    )


def _images(run: Run) -> int:
    return run.objects * run.scale.scenes_per_count if run.labelled else CIFAR_IMAGES


def measure_machine(seconds: float = 30.0) -> tuple[float, int]:
    """GFLOP/s of training at `mini` scale on one thread of this machine, and how many threads there are."""
    return bench_train(get_scale("mini"), seconds=seconds)["median_gflops"], os.cpu_count() or 1


def plan(scales: list[str], machine_gflops: float) -> list[Cost]:
    return [run_cost(run, machine_gflops) for scale in scales for run in paper_runs(scale)]


def as_table(costs: list[Cost], threads: int = 1) -> str:
    """Fixed-width text, one row a run, and the sum; on `threads` threads so many runs go side by side."""
    head = ["run", "scale", "params", "GFLOP", "samples", "EFLOP", *GPU_TFLOPS, "here", "data", "weights"]
    rows = [head]
    for c in costs:
        gpus = [f"{hours:.2g} h" for hours in c.gpu_hours.values()]
        rows.append(
            [c.run, c.scale, f"{c.parameters / 1e6:.1f}M", f"{c.gflop_forward:.2f}", f"{c.samples / 1e6:.1f}M"]
            + [f"{c.exaflop:.3g}", *gpus, f"{c.machine_hours:.3g} h", f"{c.data_gb:.1f} GB", f"{c.weights_gb:.2f} GB"]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    total = {gpu: sum(c.gpu_hours[gpu] for c in costs) for gpu in GPU_TFLOPS}
    here = sum(c.machine_hours for c in costs) / threads
    side = f" ({threads} side by side)" if threads > 1 else ""
    lines.append("all runs: " + ", ".join(f"{g} {h:,.3g} h" for g, h in total.items()) + f", here {here:,.3g} h{side}")
    return "\n".join(lines)
