"""From a run of the registry to its model."""

from __future__ import annotations

from torch import nn

from lcs.conditioning import get_conditioner
from lcs.experiments import Network, Run
from lcs.model.edm2 import EDM2
from lcs.model.local import LocalEDM2

CIFAR_RESOLUTION = 32


def resolution_of(run: Run) -> int:
    """Pixels per side of the images a run is trained on."""
    return CIFAR_RESOLUTION if run.experiment.name == "cifar10" else run.scale.resolution


def build_model(run: Run, network: Network | None = None) -> nn.Module:
    """The denoiser of whole images: `model(x, sigma, labels) -> x0hat`, freshly initialised.

    `network`, if not the registry's, is what a stored checkpoint says it was trained with.
    """
    experiment, scale, network = run.experiment, run.scale, network or run.network
    if experiment.local:
        kind = "list" if experiment.conditioner.startswith("list") else "grid"
        return LocalEDM2(
            network, resolution_of(run), kind, scale.local_radius, scale.list_slots, sigma_data=scale.sigma_data
        )
    label_dim = 0 if experiment.conditioner == "none" else get_conditioner(experiment.conditioner).dim
    return EDM2(network, resolution_of(run), label_dim=label_dim, sigma_data=scale.sigma_data)


def trained_network(model: nn.Module) -> EDM2:
    """The part with weights: the model itself, or the local model's network on patches."""
    return model.denoiser if isinstance(model, LocalEDM2) else model
