"""Feature space: are conditions disentangled inside the network? (eq. 3 of the paper, section E.4)

If a distribution composes in some feature space, the mean differences d_i = mu_i - mu_b (features when condition i is
given, minus features when none is) are orthogonal there. So the matrix of their cosines is a test: a low off-diagonal
is necessary for composition (not sufficient; see `lcs.theory.features`).

The features looked at are the outputs of every layer that the embedding scales, `conv_res0(...) * (1 + gain *
linear(embedding))` of each block: the only places where a condition enters the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from lcs.conditioning import get_conditioner
from lcs.errors import LcsError
from lcs.experiments import Run
from lcs.model.build import trained_network
from lcs.model.edm2 import Block
from lcs.model.local import LocalEDM2
from lcs.sampling import CHUNK, DEFAULT_STEPS, sample


@contextmanager
def captured_means(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Inside, every forward pass enters the batch mean of each conditioned layer: name -> [C, H, W].

    Only the mean of the last pass is kept, on the CPU. Leaving without a pass through every layer is an error.
    """
    blocks = {name: m for name, m in trained_network(model).unet.named_modules() if isinstance(m, Block)}
    means: dict[str, Tensor] = {}
    unscaled: dict[str, Tensor] = {}
    handles = []

    def watch(name: str, block: Block) -> None:
        def keep(_module, _inputs, output: Tensor) -> None:
            unscaled[name] = output.clone()  # the block may go on to scale it in place

        def scale(_module, _inputs, output: Tensor) -> None:
            c = output * block.emb_gain + 1  # [B or 1, C]
            means[name] = (unscaled.pop(name) * c[:, :, None, None]).mean(dim=0).cpu()

        handles.append(block.conv_res0.register_forward_hook(keep))
        handles.append(block.emb_linear.register_forward_hook(scale))

    for name, block in blocks.items():
        watch(name, block)
    try:
        yield means
        if lost := blocks.keys() - means.keys():
            raise LcsError(f"no activations were captured in {min(lost)}: the model was not run inside the block")
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class FeatureCosines:
    """N conditions, T noise levels, L layers."""

    run: str
    conditions: tuple[str, ...]
    layers: tuple[str, ...]  # encoder, then decoder; the last is "image": x0hat itself
    resolutions: tuple[int, ...]  # [L] pixels per side of the image that a layer's grid covers
    sigmas: np.ndarray  # [T]
    cosines: np.ndarray  # [T, L, N, N]

    def off_diagonal(self) -> np.ndarray:  # [T, L]
        """Mean cosine of different conditions."""
        n = len(self.conditions)
        other = ~np.eye(n, dtype=bool)
        return self.cosines[..., other].mean(axis=-1)


@torch.no_grad()
def condition_cosines(
    run: Run,
    model: nn.Module,
    seeds: Sequence[int],
    steps: int = DEFAULT_STEPS,
    record: Sequence[int] | None = None,
) -> FeatureCosines:
    """Cosines of mean differences between single conditions, at the states before the steps `record` of sampling."""
    if isinstance(model, LocalEDM2):
        raise LcsError(f"{run.name} works on patches: it has no features of a whole image")
    conditioner = get_conditioner(run.experiment.conditioner)
    conditions = conditioner.test_conditions
    record = sorted({0, steps // 4, steps // 2} if record is None else set(record))
    if not record or record[0] < 0 or record[-1] >= steps:
        raise LcsError(f"steps {record} cannot be recorded; allowed: 0..{steps - 1}, at least one")
    if not len(seeds):
        raise LcsError("mean differences need at least one seed")
    labels = [conditioner.encode_conditions([])] + [conditioner.encode_conditions([c]) for c in conditions]
    means = [_mean_features(run, model, torch.from_numpy(label), seeds, steps, record) for label in labels]
    layers = tuple(means[0][record[0]])
    unet = trained_network(model).unet
    cosines = np.stack([
        np.stack([cosine_matrix([m[step][layer] - means[0][step][layer] for m in means[1:]]) for layer in layers])
        for step in record
    ])  # fmt: skip
    sizes = tuple(means[0][record[0]][layer].shape[-1] for layer in layers)
    scale = model.resolution // unet.resolution  # the stem's unshuffle
    resolutions = tuple(size if layer == "image" else size * scale for size, layer in zip(sizes, layers, strict=True))
    sigmas = np.array([means[0][step].sigma for step in record])
    return FeatureCosines(run.name, tuple(map(str, conditions)), layers, resolutions, sigmas, cosines)


class _Means(dict):
    """Layer -> mean, and the noise level they were taken at."""

    sigma: float


def _mean_features(run: Run, model: nn.Module, label: Tensor, seeds, steps: int, record) -> dict[int, _Means]:
    """The mean over seeds, by step and layer."""
    totals: dict[int, _Means] = {step: _Means() for step in record}
    label = label.to(next(model.parameters()).device)
    for at in range(0, len(seeds), CHUNK):
        part = list(seeds)[at : at + CHUNK]
        states: dict[int, tuple[Tensor, float, Tensor]] = {}

        def remember(step: int, x: Tensor, sigma: float, x0hat: Tensor, states=states) -> None:
            if step in totals:
                states[step] = (x.clone(), sigma, x0hat)

        sample(run, model, label, part, steps, "heun", remember)
        for step, (x, sigma, x0hat) in states.items():
            with captured_means(model) as means:
                model(x, sigma, label.expand(len(x), -1))
            totals[step].sigma = sigma
            for name, value in (means | {"image": x0hat.mean(dim=0).cpu()}).items():
                totals[step][name] = totals[step].get(name, 0) + value.double() * (len(part) / len(seeds))
    return totals


def cosine_matrix(vectors: Sequence[Tensor]) -> np.ndarray:
    """[N, N] cosines; a vector of zeros has cosine 0 with all others and 1 with itself."""
    v = torch.stack([x.flatten().double() for x in vectors])
    norm = v.norm(dim=1, keepdim=True)
    unit = torch.where(norm > 0, v / norm.clamp_min(1e-30), torch.zeros_like(v))
    return (unit @ unit.T).fill_diagonal_(1.0).numpy()
