"""The optimizers: Adam, as in the paper, and Muon, which a CPU's few samples need.

Adam scales every entry of the gradient by itself. Muon (Jordan et al. 2024) scales a whole weight at once: with the
averaged gradient of a layer, as a matrix [out, in * kernel], written U S V^T, its update is U V^T: every direction of
the layer advances alike, not only the few that dominate the gradient. What is no matrix of features (gains, the
embedding of the labels, whose columns are used one at a time) is left to Adam.

U V^T comes from five steps of a quintic iteration that drives all singular values towards 1,

    X <- (a I + b A + c A^2) X,    A = X X^T

All these matrices are polynomials of the first A and commute, so only the small A [out, out] is iterated and X is
multiplied once, at the end.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor, nn

from lcs.errors import LcsError
from lcs.experiments import Recipe

QUINTIC = (3.4445, -4.7750, 2.0315)  # a, b, c: steepest at 0 while singular values stay within about 0.7 to 1.2
ITERATIONS = 5
MOMENTUM = 0.95
UPDATE = 0.7  # root mean square of an update's entries at learning rate 1: Adam's are about 1 early in training
ADAM_EPS = 1e-8


def orthogonalised(matrices: Tensor) -> Tensor:
    """About U V^T of each of the matrices [..., m, n] = U S V^T: singular values near 1, the same singular vectors."""
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonalised(matrices.mT).mT
    a, b, c = QUINTIC
    x = matrices / (torch.linalg.matrix_norm(matrices, keepdim=True) + 1e-12)
    x = x.view(-1, *matrices.shape[-2:])
    gram = x @ x.mT  # [N, m, m]
    whole = None
    for i in range(ITERATIONS):
        if i:
            gram = factor @ gram @ factor  # noqa: F821, set in the first round
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        whole = factor @ whole if i else factor
    return (whole @ x).view(matrices.shape)


def _rows(weight: Tensor) -> Tensor:
    """A weight [out, in, *kernel] as [out, *kernel, in]: the order in which a convolution's weight lies in memory.

    The order of the columns does not matter to U V^T: they are permuted alike.
    """
    return weight.permute(0, *range(2, weight.ndim), 1)


class Muon(torch.optim.Optimizer):
    """Muon for the first group of parameters, Adam for the second; both take the same learning rate."""

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter], betas: tuple[float, float]) -> None:
        groups = [{"params": matrices, "muon": True}, {"params": others, "muon": False}]
        super().__init__(groups, {"lr": 0.0, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            if not group["muon"]:
                for parameter in used:
                    self._adam(parameter, self.state[parameter], group)
                continue
            alike = defaultdict(list)  # those of one shape at once
            for parameter in used:
                alike[parameter.shape].append(parameter)
            for weights in alike.values():
                self._muon(weights, group["lr"])

    def _muon(self, weights: list[nn.Parameter], rate: float) -> None:
        ahead = []
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["exp_avg"] = torch.zeros_like(weight)
            average = state["exp_avg"].lerp_(weight.grad, 1 - MOMENTUM)
            ahead.append(_rows(weight.grad.lerp(average, MOMENTUM)))  # Nesterov's average: one step ahead
        matrices = torch.stack(ahead).flatten(2)  # [N, out, in * kernel]
        size = rate * UPDATE * math.sqrt(max(matrices.shape[1:]))
        for weight, update in zip(weights, orthogonalised(matrices), strict=True):
            _rows(weight).sub_(update.view(_rows(weight).shape), alpha=size)

    @staticmethod
    def _adam(weight: nn.Parameter, state: dict, group: dict) -> None:
        first, second = group["betas"]
        if not state:
            zeros = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
            state |= {"step": torch.zeros([])} | zeros
        step = state["step"].add_(1).item()
        average = state["exp_avg"].lerp_(weight.grad, 1 - first)
        square = state["exp_avg_sq"].lerp_(weight.grad.square(), 1 - second)
        denominator = (square / (1 - second**step)).sqrt_().add_(ADAM_EPS)
        weight.addcdiv_(average, denominator, value=-group["lr"] / (1 - first**step))


def muon(network: nn.Module, betas: tuple[float, float], tables: str) -> Muon:
    """Over all parameters of `network`; Adam takes those with `tables` in their name, too."""
    named = dict(network.named_parameters())
    matrices = [name for name, p in named.items() if p.ndim > 1 and len(p) > 1 and tables not in name]
    return Muon([named[n] for n in matrices], [p for n, p in named.items() if n not in matrices], betas)


def build_optimizer(network: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer over all parameters, learning rate 0 until a step sets it."""
    if recipe.optimizer == "adam":
        return torch.optim.Adam(network.parameters(), lr=0.0, betas=recipe.betas, eps=ADAM_EPS, fused=True)
    if recipe.optimizer == "muon":
        return muon(network, recipe.betas, tables="emb_label")
    raise LcsError(f"unknown optimizer {recipe.optimizer!r}; choose adam or muon")
