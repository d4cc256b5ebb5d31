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
from lcs.model.edm2 import EDM2

QUINTIC = (3.4445, -4.7750, 2.0315)  # a, b, c: steepest at 0 while singular values stay within about 0.7 to 1.2
ITERATIONS = 5
MOMENTUM = 0.95
UPDATE = 0.7  # root mean square of an update's entries at learning rate 1: Adam's are about 1 early in training
ADAM_EPS = 1e-8


def inverse_roots(stacks: list[Tensor]) -> list[Tensor]:
    """For each X in the stacks [N, m, n] about (X X^T)^(-1/2), or (X^T X)^(-1/2) if m > n: -> [N, s, s], s = min(m, n).

    With X = U S V^T, this times X (X times this, if m > n) is U V^T. Grams of one size are iterated together.
    """
    grams, norms, alike = [], [], defaultdict(list)
    for i, x in enumerate(stacks):
        gram = x.mT @ x if x.shape[1] > x.shape[2] else x @ x.mT
        square = gram.diagonal(dim1=1, dim2=2).sum(1).clamp(min=1e-24)[:, None, None]  # |X|^2
        grams.append(gram.div_(square))
        norms.append(square.sqrt_())
        alike[gram.shape[1]].append(i)
    roots: list[Tensor] = [None] * len(stacks)
    for members in alike.values():
        parts = _iterated(torch.cat([grams[i] for i in members])).split([len(grams[i]) for i in members])
        for i, part in zip(members, parts, strict=True):
            roots[i] = part / norms[i]
    return roots


def _iterated(gram: Tensor) -> Tensor:
    """About A^(-1/2) of each A in [N, s, s], none larger than 1: the product of the factors a I + b A + c A^2."""
    a, b, c = QUINTIC
    whole = None
    for i in range(ITERATIONS):
        if i:
            gram = factor @ gram @ factor  # noqa: F821, set in the first round
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        whole = factor @ whole if i else factor
    return whole


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
            self._muon(used, group["lr"])

    def _muon(self, weights: list[nn.Parameter], rate: float) -> None:
        alike = defaultdict(list)  # those of one shape at once
        for weight in weights:
            alike[weight.shape].append(weight)
        stacks = [self._ahead(group) for group in alike.values()]  # of [N, out, in * kernel]
        for group, stack, roots in zip(alike.values(), stacks, inverse_roots(stacks), strict=True):
            size = rate * UPDATE * math.sqrt(max(stack.shape[1:]))
            for weight, matrix, root in zip(group, stack, roots, strict=True):
                left, right = (matrix, root) if matrix.shape[0] > matrix.shape[1] else (root, matrix)
                rows = _rows(weight)
                rows.sub_((left @ right).view(rows.shape), alpha=size)

    def _ahead(self, weights: list[nn.Parameter]) -> Tensor:
        """Nesterov's average of the gradients, one step ahead, as matrices. -> [N, out, in * kernel]"""
        stack = weights[0].new_empty(len(weights), *_rows(weights[0]).shape)
        for weight, row in zip(weights, stack, strict=True):
            state = self.state[weight]
            if not state:
                state["exp_avg"] = torch.zeros_like(weight)
            average = state["exp_avg"].lerp_(weight.grad, 1 - MOMENTUM)
            torch.lerp(_rows(weight.grad), _rows(average), MOMENTUM, out=row)
        return stack.flatten(2)

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


def build_optimizer(network: EDM2, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer over all parameters of an `EDM2`, learning rate 0 until a step sets it.

    EDM2 sums the loss over pixels where ours takes the mean, so our gradients are smaller by the number of pixels.
    So is Adam's epsilon: otherwise weights with small gradients would move less than the paper's.
    """
    if recipe.optimizer == "adam":
        eps = ADAM_EPS / (network.in_channels * network.resolution**2)
        return torch.optim.Adam(network.parameters(), lr=0.0, betas=recipe.betas, eps=eps, fused=True)
    if recipe.optimizer == "muon":
        return muon(network, recipe.betas, tables="emb_label")
    raise LcsError(f"unknown optimizer {recipe.optimizer!r}; choose adam or muon")
