"""What stops a training run, and that its last good checkpoint stays: not-a-number, a full disk, damaged files."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tiny import QUIET, assert_same, source, state, tiny_run

from lcs.data.files import write_error
from lcs.errors import DiskFull, LcsError
from lcs.training import checkpoint, trainer
from lcs.training.trainer import train

REPO = Path(__file__).parents[1]


def test_nan_stops_with_the_last_good_checkpoint(tmp_path, monkeypatch):
    settings = replace(QUIET, stop_after_samples=16)
    train(tiny_run(), source(), tmp_path, settings=settings)
    before = state(tmp_path)
    monkeypatch.setattr(trainer, "edm2_loss", lambda model, x, *a: model(x, 1.0).mean((1, 2, 3)) * float("nan"))
    with pytest.raises(LcsError, match=r"loss, gradient or weights are nan at 16 samples.*state\.safetensors"):
        train(tiny_run(), source(), tmp_path, settings=QUIET)
    assert_same(before, state(tmp_path))


def test_infinite_gradient_of_a_finite_loss_stops_too(tmp_path, monkeypatch):
    train(tiny_run(), source(), tmp_path, settings=replace(QUIET, stop_after_samples=16))
    before = state(tmp_path)

    def sharp_loss(model, x, *_):  # sqrt(0) = 0 has an infinite slope
        return (model(x, 1.0).mean((1, 2, 3)) * 0).abs().sqrt()

    monkeypatch.setattr(trainer, "edm2_loss", sharp_loss)
    with pytest.raises(LcsError, match="loss, gradient or weights are nan"):
        train(tiny_run(), source(), tmp_path, settings=replace(QUIET, checkpoint_seconds=0))
    assert_same(before, state(tmp_path))


def test_weights_that_an_update_spoils_are_never_saved(tmp_path, monkeypatch):
    train(tiny_run(), source(), tmp_path, settings=replace(QUIET, stop_after_samples=16))
    before = state(tmp_path)

    def spoil(network):
        with torch.no_grad():
            next(network.parameters()).fill_(float("nan"))

    monkeypatch.setattr(trainer, "normalize_weights_", spoil)
    with pytest.raises(LcsError, match="weights are nan"):
        train(tiny_run(), source(), tmp_path, settings=replace(QUIET, checkpoint_seconds=0))
    assert_same(before, state(tmp_path))


def test_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    train(tiny_run(), source(), tmp_path, settings=replace(QUIET, stop_after_samples=16))
    before = state(tmp_path)

    def no_space(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", no_space)
    with pytest.raises(LcsError, match="disk is full"):
        train(tiny_run(), source(), tmp_path, settings=QUIET)
    assert_same(before, state(tmp_path))


def test_a_write_that_the_system_refuses_is_a_clear_error(tmp_path):
    """safetensors has an error of its own for it; a file size limit stands for the full disk."""
    code = (
        "import resource, sys, torch\nfrom pathlib import Path\nfrom lcs.errors import LcsError\n"
        "from lcs.training.checkpoint import save_tensors\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n    save_tensors(Path(sys.argv[1]) / 'x.safetensors', {'x': torch.zeros(100_000)}, {})\n"
        "except LcsError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cannot write" in done.stdout
    assert not list(tmp_path.iterdir())


def test_the_text_of_a_full_disk_is_known():
    error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert isinstance(write_error(Path("x"), error), DiskFull)


def test_corrupt_checkpoint_is_a_clear_error(straight, tmp_path):
    for name in ("run.json", "state.safetensors"):
        (tmp_path / name).write_bytes((straight / name).read_bytes()[: 300 if "state" in name else None])
    with pytest.raises(LcsError, match="not a readable checkpoint"):
        train(tiny_run(), source(), tmp_path, settings=QUIET)
