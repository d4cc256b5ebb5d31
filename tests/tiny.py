"""A scale so small that training takes a second, for tests; also a worker for multi-process tests."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from lcs.data.shards import StreamedScenes
from lcs.experiments import Network, Recipe, Run, get_experiment, get_scale
from lcs.training import checkpoint
from lcs.training.queue import train_all
from lcs.training.trainer import TrainSettings, train

_NETWORK = Network(
    channels=8, channel_mult=(1, 2), num_blocks=1, attn_resolutions=(8,), channels_per_head=8, unshuffle=2
)
_RECIPE = Recipe(
    batch=8, samples=64, lr=0.02, lr_decay_batches=4, lr_rampup_samples=16, p_mean=-0.4, p_std=1.4
)  # fmt: skip
SCALE = replace(
    get_scale("mini"), name="tiny", resolution=32, network=_NETWORK, recipe=_RECIPE, labelled_recipe=None,
    color_recipe=None, grown_recipe=None, local_network=replace(_NETWORK, unshuffle=1, attn_resolutions=()),
    local_recipe=_RECIPE,
)  # fmt: skip


QUIET = TrainSettings(cpu=True, progress=False)


def tiny_run(experiment: str = "grid-single", **recipe) -> Run:
    scale = replace(SCALE, recipe=replace(_RECIPE, **recipe), local_recipe=replace(_RECIPE, **recipe))
    return Run(get_experiment(experiment), 2, scale)


def source() -> StreamedScenes:
    return StreamedScenes((1, 2), SCALE.resolution)


def state(folder) -> dict[str, torch.Tensor]:
    return checkpoint.load_tensors(Path(folder) / "state.safetensors")[0]


def assert_same(a: dict, b: dict, tolerance: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name in a:
        if tolerance:
            assert torch.allclose(a[name], b[name], atol=tolerance, rtol=tolerance), name
        else:
            assert torch.equal(a[name], b[name]), name


if __name__ == "__main__":  # run EXPERIMENT OPTIMIZER FOLDER CHECKPOINT_SECONDS SAMPLES [MICRO_BATCH], or: queue OUT
    if sys.argv[1] == "run":
        experiment, optimizer, folder, seconds, samples, *micro = sys.argv[2:]
        settings = TrainSettings(
            cpu=True, checkpoint_seconds=float(seconds), progress=False, micro_batch=int(micro[0]) if micro else None
        )
        train(tiny_run(experiment, optimizer=optimizer, samples=int(samples)), source(), folder, settings=settings)
    else:
        runs = [tiny_run("grid-all"), tiny_run("grid-single")]
        train_all(runs, None, sys.argv[2], 0, TrainSettings(cpu=True, progress=False), keep_going=True)
