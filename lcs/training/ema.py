"""Power-function EMA and its post-hoc reconstruction (arXiv 2312.02696).

The average after step t weighs the parameters of step s by a power of s,

    p(s) = (gamma + 1) s^gamma / t^(gamma+1),    0 <= s <= t

so it forgets the start of training at any length. gamma is set by the relative width `std`, the standard deviation of
p divided by t (0.05 and 0.10 are tracked). From snapshots of the tracked averages, the average of any
other width, ending at any snapshot's step, is the linear combination whose profile fits best (least squares).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from lcs.errors import LcsError


def std_to_gamma(std: float) -> float:
    """Exponent of the profile with relative width `std`: `gamma_to_std` inverted, exactly."""
    if not 0 < std < 12**-0.5:
        raise LcsError(f"EMA width {std} is not possible; allowed: above 0 and below {12**-0.5:.3f} (a flat average)")
    # With g = gamma + 2 and t = 1 / std^2:  g^2 (g + 1) = t (g - 1), a cubic whose largest root is wanted.
    t = 1 / std**2
    roots = np.polynomial.Polynomial([t, -t, 1, 1]).roots()
    return float(max(roots.real)) - 2


def gamma_to_std(gamma: float) -> float:
    """Relative width of the profile with exponent `gamma`."""
    return math.sqrt((gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3)))


class PowerEMA:
    """Running power-function averages of named tensors at several widths, updated in place.

    `step` counts the updates made. The averages live next to the parameters (same device and dtype).
    """

    def __init__(self, params: Mapping[str, Tensor], stds: Sequence[float]) -> None:
        self.stds = tuple(stds)
        self.gammas = tuple(std_to_gamma(s) for s in self.stds)
        self.step = 0
        self.averages = [{name: p.detach().clone() for name, p in params.items()} for _ in self.stds]

    @torch.no_grad()
    def update(self, params: Mapping[str, Tensor]) -> None:
        """average = beta * average + (1 - beta) * params with beta = (1 - 1/t)^(gamma + 1) at update t."""
        self.step += 1
        for gamma, average in zip(self.gammas, self.averages, strict=True):
            beta = (1 - 1 / self.step) ** (gamma + 1)  # 0 at the first update: the average becomes the parameters
            torch._foreach_lerp_(list(average.values()), [params[name] for name in average], 1 - beta)

    def average(self, std: float) -> dict[str, Tensor]:
        """The tracked average of width `std` (not a copy)."""
        if std not in self.stds:
            raise LcsError(f"EMA width {std} is not tracked; tracked: {', '.join(map(str, self.stds))}")
        return self.averages[self.stds.index(std)]

    def state_dict(self) -> dict[str, Tensor]:
        """Flat, for safetensors: "ema<index>.<parameter>". Store `step` beside it as a plain int."""
        return {f"ema{i}.{name}": v for i, average in enumerate(self.averages) for name, v in average.items()}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], step: int) -> None:
        own = self.state_dict()
        if missing := own.keys() - tensors.keys():
            raise LcsError(f"EMA state lacks {len(missing)} tensors, among them {min(missing)}")
        for name, value in own.items():
            value.copy_(tensors[name])
        self.step = step


def profile_inner_product(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Integral of the product of two profiles, each given by its last step t and its exponent gamma (eq. 151).

    (ga + 1) (gb + 1) min(ta, tb)^(ga+gb+1) / ((ga + gb + 1) ta^(ga+1) tb^(gb+1))
    """
    (ta, ga), (tb, gb) = a, b
    log = (ga + gb + 1) * math.log(min(ta, tb)) - (ga + 1) * math.log(ta) - (gb + 1) * math.log(tb)
    return (ga + 1) * (gb + 1) / (ga + gb + 1) * math.exp(log)


def posthoc_weights(snapshots: Sequence[tuple[int, float]], step: int, std: float) -> np.ndarray:
    """Weights that turn snapshots, each (step, tracked std), into the average of width `std` at `step`. -> [n]

    Minimises the L2 distance between the combined and the wanted profile: A w = b with the inner products of the
    snapshots' profiles in A and with the target's in b.
    """
    if not snapshots:
        raise LcsError("post-hoc EMA needs at least one snapshot")
    profiles = [(t, std_to_gamma(s)) for t, s in snapshots]
    target = (step, std_to_gamma(std))
    gram = np.array([[profile_inner_product(p, q) for q in profiles] for p in profiles])
    wanted = np.array([profile_inner_product(p, target) for p in profiles])
    # Profiles have very different L2 norms (about 1/t); unit diagonal conditions the system.
    scale = 1 / np.sqrt(np.diag(gram))
    weights, *_ = np.linalg.lstsq(gram * np.outer(scale, scale), wanted * scale, rcond=1e-12)
    return weights * scale


@torch.no_grad()
def reconstruct(snapshots: Iterable[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Weighted sum of snapshots, in float64, in their own dtype at the end. Pass a generator to hold one at a time."""
    total: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for snapshot, weight in zip(snapshots, weights, strict=True):
        for name, value in snapshot.items():
            dtypes.setdefault(name, value.dtype)
            total[name] = total.get(name, 0.0) + value.double() * float(weight)
    return {name: value.to(dtypes[name]) for name, value in total.items()}
