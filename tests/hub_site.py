"""What the tests of the Hub share: a local server, a checkpoint, what someone else has of it, a dataset, a project."""

import sys
from pathlib import Path

import pytest
import torch
import typer
from fake_hub import TOKEN, running_hub
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http
from safetensors.numpy import save_file
from tiny import SCALE, tiny_run

from lcs import cli, experiments, weights
from lcs.data.files import read_json, sha256_of, write_json
from lcs.data.shards import DatasetSpec, shard_path
from lcs.hub import repo_id
from lcs.hub.commands import register
from lcs.hub.push import checkpoint_files
from lcs.model.build import build_model, trained_network
from lcs.scenes.placement import random_scene
from lcs.scenes.table import table_of
from lcs.training import checkpoint
from lcs.training.trainer import run_settings

RUN = tiny_run()
KEY = weights.entry_key(RUN)
REPO = repo_id(RUN)
CHUNK = 4096
PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
RESULT = {
    "run": RUN.name, "scale": RUN.scale.name, "objects": 2, "k_max": 5, "k_max_strict": 4, "k_max_in_place": 5,
    "k_tested": 12,
    "label": "5 +(0-1)", "drawn_at_0": {"min": 0, "max": 2, "p5": 0, "p95": 1}, "settings": {"samples": 32},
}  # fmt: skip


class Impatient:
    """Stands in for `time` in the client: waits are noted, not waited for."""

    waits: list[float] = []  # noqa: RUF012

    @classmethod
    def sleep(cls, seconds: float) -> None:
        cls.waits.append(seconds)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    for name, value in {"HF_TOKEN": TOKEN, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {
        "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_TOKEN_PATH": str(tmp_path / "no-token"), "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True, "DOWNLOAD_CHUNK_SIZE": CHUNK,
    }.items():  # fmt: skip
        monkeypatch.setattr(constants, name, value)
    for module in (_http, file_download):
        monkeypatch.setattr(module, "time", Impatient)
    Impatient.waits.clear()
    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.api)
        yield running
    _http.close_session()


def save_run(run, folder: Path) -> None:
    """A run folder as training leaves it; its weights are random, which is all a transfer needs."""
    torch.manual_seed(0)
    tensors = trained_network(build_model(run)).state_dict()
    checkpoint.save_tensors(folder / "late.safetensors", tensors, {"samples": 64, "ema_std": 0.05})
    write_json(folder / "run.json", run_settings(run, seed=0))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A weights folder with one checkpoint."""
    folder, root = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("weights")
    save_run(RUN, folder)
    weights.export(RUN, folder, root=root)
    return root


@pytest.fixture
def mine(trained, tmp_path) -> Path:
    """A copy of the weights folder that a test may change."""
    root = tmp_path / "mine"
    root.mkdir()
    for path in trained.iterdir():
        (root / path.name).write_bytes(path.read_bytes())
    return root


@pytest.fixture
def pinned(hub, mine, tmp_path) -> Path:
    """What someone else has: the manifest after a push, but no weights."""
    files = checkpoint_files(RUN, root=mine)
    contents = {name: c if isinstance(c, bytes) else c.read_bytes() for name, c in files.items()}
    manifest = read_json(mine / "manifest.json")
    manifest[KEY]["hub"] = {"repo": REPO, "revision": hub.commit("model", REPO, contents)}
    write_json(tmp_path / "theirs" / "manifest.json", manifest)
    return tmp_path / "theirs"


def final(root: Path) -> Path:
    return root / read_json(root / "manifest.json")[KEY]["file"]


def part_of(root: Path) -> Path:
    (part,) = root.glob(".*.part")
    return part


def run_lcs(monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    """The command line with only the Hub's verbs: exit code and everything it printed."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    register(app)
    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "argv", ["lcs", *arguments])
    monkeypatch.setitem(experiments.SCALES, SCALE.name, SCALE)
    code = 0
    try:
        cli.main()
    except SystemExit as exit_:
        code = exit_.code
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.fixture
def dataset(tmp_path) -> Path:
    """A dataset folder as `lcs render` leaves it, with black images."""
    spec, root = DatasetSpec((1, 2), 5, 8, shard_size=3), tmp_path / "scenes"
    hashes = {}
    for count, shard in spec.shards:
        scenes = [random_scene(spec.seed_of(i), count) for i in spec.scenes_in(shard)]
        path = shard_path(root, count, shard)
        path.parent.mkdir(parents=True, exist_ok=True)
        table = table_of(scenes)
        save_file({"images": torch.zeros(len(scenes), 8, 8, 3, dtype=torch.uint8).numpy(), **table.columns()}, path)
        hashes[f"{count}/{shard}"] = sha256_of(path)
        write_json(path.with_suffix(".json"), {"sha256": hashes[f"{count}/{shard}"], "images": len(scenes)})
    description = {"counts": [1, 2], "scenes": 5, "size": 8, "shard_size": 3, "base_seed": 0, "format": spec.format}
    write_json(root / "dataset.json", description)
    write_json(root / "manifest.json", {**description, "sha256": hashes})
    return root


@pytest.fixture
def project(tmp_path) -> Path:
    root = tmp_path / "project"
    for name in ("app.py", "lcs/__init__.py", "lcs/model/edm2.py", "lcs/__pycache__/x.pyc", "weights/.a.part",
                 "weights/a.safetensors", "weights/manifest.json", "LICENSE", "NOTICE", "Dockerfile", ".dockerignore",
                 "pyproject.toml", ".env", "runs/state.safetensors", "artifact/runner.py",
                 "artifact/results/claims.json"):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "requirements.txt").write_text("torch==1\ngradio==6.31.0\n")
    return root
