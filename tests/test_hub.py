"""The Hub, end to end: the real `huggingface_hub` client against a local server (`fake_hub.py`)."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import typer
import yaml
from fake_hub import TOKEN, FakeHub, running_hub
from huggingface_hub import ModelCard, constants, file_download, hf_hub_download
from huggingface_hub.utils import _http
from safetensors.numpy import save_file
from tiny import SCALE, tiny_run

from lcs import cli, experiments, weights
from lcs.data.files import read_json, sha256_of, write_json
from lcs.data.shards import DatasetSpec, RenderedScenes, shard_path
from lcs.errors import LcsError
from lcs.experiments import get_run
from lcs.hub import cards, repo_id
from lcs.hub.client import HubError
from lcs.hub.commands import register
from lcs.hub.datasets import pull_dataset, push_dataset
from lcs.hub.pull import MODEL_FILE, pull, pull_many
from lcs.hub.push import checkpoint_files, push
from lcs.hub.space import assemble, push_space
from lcs.model.build import build_model, trained_network
from lcs.scenes.placement import random_scene
from lcs.scenes.table import table_of
from lcs.training import checkpoint
from lcs.training.trainer import run_settings

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # inside the client

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


# ---- pull -----------------------------------------------------------------------------------------


def test_what_was_pushed_can_be_pulled_and_loaded(hub, mine, pinned):
    push(RUN, root=mine)
    (pinned / "manifest.json").write_bytes((mine / "manifest.json").read_bytes())
    assert pull(RUN, root=pinned) == "downloaded"
    ours, theirs = weights.load(RUN, root=mine), weights.load(RUN, root=pinned)
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert not list(pinned.glob(".*"))


def test_the_pinned_commit_is_asked_for_whatever_main_holds(hub, pinned):
    revision = read_json(pinned / "manifest.json")[KEY]["hub"]["revision"]
    hub.commit("model", REPO, {MODEL_FILE: b"a later version"})
    assert pull(RUN, root=pinned) == "downloaded"
    assert {r.path for r in hub.seen("resolve")} == {f"/{REPO}/resolve/{revision}/{MODEL_FILE}"}


def test_another_file_than_the_manifest_says_is_refused_before_the_download(hub, pinned):
    later = hub.commit("model", REPO, {MODEL_FILE: b"a later version"})
    with pytest.raises(HubError, match="another file than the manifest expects"):
        pull(RUN, root=pinned, revision=later)
    assert not hub.seen("GET")
    assert not final(pinned).exists()


def test_a_present_or_cached_file_needs_no_network(hub, pinned, tmp_path, monkeypatch):
    revision = read_json(pinned / "manifest.json")[KEY]["hub"]["revision"]
    hf_hub_download(REPO, MODEL_FILE, revision=revision, endpoint=hub.api)
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pull(RUN, root=pinned) == "cached"
    assert pull(RUN, root=pinned) == "present"
    assert not hub.requests
    final(pinned).unlink()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(HubError, match=r"offline mode is on \(HF_HUB_OFFLINE\)"):
        pull(RUN, root=pinned)


def test_a_broken_connection_is_continued_at_once(hub, pinned):
    size = read_json(pinned / "manifest.json")[KEY]["bytes"]
    hub.fault("GET /[0-9a-f]{64}$", cut_after=3 * CHUNK)
    assert pull(RUN, root=pinned) == "downloaded"
    first, second = hub.seen("GET /[0-9a-f]{64}$")
    assert first.sent == 3 * CHUNK
    assert second.headers["range"] == f"bytes={3 * CHUNK}-"
    assert second.sent == size - 3 * CHUNK


def test_an_interrupted_download_resumes_in_the_next_process(hub, pinned):
    size = read_json(pinned / "manifest.json")[KEY]["bytes"]
    hub.fault("GET /[0-9a-f]{64}$", cut_after=2 * CHUNK)
    hub.fault("GET /[0-9a-f]{64}$", times=20, cut_after=0)
    with pytest.raises(HubError, match="cut short; run the same command again to resume"):
        pull(RUN, root=pinned)
    assert not final(pinned).exists()
    assert part_of(pinned).stat().st_size == 2 * CHUNK
    with pytest.raises(LcsError, match="missing"):
        weights.load(RUN, root=pinned)
    hub.faults.clear()
    hub.requests.clear()
    assert pull(RUN, root=pinned) == "downloaded"
    (only,) = hub.seen("GET /[0-9a-f]{64}$")
    assert only.headers["range"] == f"bytes={2 * CHUNK}-"
    assert only.sent == size - 2 * CHUNK
    weights.load(RUN, root=pinned)
    assert not list(pinned.glob(".*"))


def test_a_damaged_partial_file_is_thrown_away_and_fetched_again(hub, pinned):
    entry = read_json(pinned / "manifest.json")[KEY]
    part = pinned / f".{entry['file']}.{entry['sha256'][:16]}.part"
    part.write_bytes(b"x" * CHUNK)
    assert pull(RUN, root=pinned) == "downloaded"
    assert sha256_of(final(pinned)) == entry["sha256"]
    part.write_bytes(b"x" * (entry["bytes"] + 1))  # longer than the file can be
    final(pinned).unlink()
    assert pull(RUN, root=pinned) == "downloaded"


@pytest.mark.parametrize(
    ("fault", "message"),
    [({"damage": True}, "arrived corrupted"), ({"shorten": 100}, "cut short")],
    ids=["corrupted", "truncated"],
)
def test_a_corrupted_or_truncated_file_never_gets_its_name(hub, pinned, fault, message):
    hub.fault("GET /[0-9a-f]{64}$", times=20, **fault)
    with pytest.raises(HubError, match=message):
        pull(RUN, root=pinned)
    assert not final(pinned).exists()
    hub.faults.clear()
    assert pull(RUN, root=pinned) == "downloaded"


def test_two_processes_pull_one_file_once(hub, pinned):
    outcomes = []
    threads = [threading.Thread(target=lambda: outcomes.append(pull(RUN, root=pinned))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(outcomes) == ["downloaded"] + ["present"] * 3
    assert len(hub.seen("GET /[0-9a-f]{64}$")) == 1
    assert not list(pinned.glob(".*"))


def test_the_token_does_not_follow_to_the_storage(hub, pinned):
    pull(RUN, root=pinned)
    assert all(r.headers["authorization"] == f"Bearer {TOKEN}" for r in hub.seen("resolve"))
    stored = hub.seen("GET /[0-9a-f]{64}$")
    assert stored
    assert not any("authorization" in r.headers for r in stored)


def test_too_many_requests_are_waited_for(hub, pinned):
    hub.fault("HEAD", times=2, status=429, headers={"Retry-After": "7"})
    hub.fault("GET", times=2, status=429, headers={"Retry-After": "9"})
    assert pull(RUN, root=pinned) == "downloaded"
    assert Impatient.waits == [8.0, 10.0, 10.0]  # the first 429 of a HEAD is asked again at once, then as told


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"status": 401}, "401, the token is missing or not valid"),
        ({"status": 403}, "403, the token does not allow it"),
        ({"status": 404}, "404, not found"),
        ({"status": 429}, "429, too many requests"),
        ({"status": 503}, "the Hub answered 503"),
    ],
)
def test_refusals_are_one_line(hub, pinned, fault, message):
    hub.fault("HEAD|GET", times=99, **fault)
    with pytest.raises(HubError, match=message) as caught:
        pull(RUN, root=pinned)
    assert "\n" not in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert not list(pinned.glob(".*"))


def test_what_does_not_exist(hub, pinned, monkeypatch):
    with pytest.raises(HubError, match="no such repository"):
        pull(RUN, root=pinned, repo="nobody/nothing")
    with pytest.raises(HubError, match="no such revision"):
        pull(RUN, root=pinned, revision="f" * 40)
    empty = hub.commit("model", REPO, {MODEL_FILE: None})
    with pytest.raises(HubError, match="no such file"):
        pull(RUN, root=pinned, revision=empty)
    with pytest.raises(HubError, match="owner/name"):
        pull(RUN, root=pinned, repo="a/b/c")
    with pytest.raises(HubError, match=r"is not in .*manifest\.json"):
        pull(tiny_run("color"), root=pinned)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(HubError, match="401"):
        pull(RUN, root=pinned)


def test_a_folder_that_cannot_be_written(hub, pinned, monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("lcs.hub.client.open", refuse, raising=False)
    with pytest.raises(HubError, match=r"cannot write .*: Read-only file system"):
        pull(RUN, root=pinned)


def test_an_unreachable_hub(hub, pinned, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="the Hub cannot be reached"):
        pull(RUN, root=pinned)


def test_a_private_repository_needs_the_token(hub, pinned, monkeypatch):
    hub.private.add(("model", REPO))
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="401, there is no such repository, or it is private: then set HF_TOKEN"):
        pull(RUN, root=pinned)
    (Path(constants.HF_TOKEN_PATH)).write_text(TOKEN)  # as `hf auth login` leaves it
    assert pull(RUN, root=pinned) == "downloaded"


def test_what_cannot_be_pulled_is_trained_or_reported(hub, pinned, mine):
    other = tiny_run("color")
    said, trained_runs = [], []
    pull_many([RUN, other], root=pinned, or_train=trained_runs.append, say=said.append)
    assert trained_runs == [other]
    assert said[0] == f"{RUN.name}: downloaded"
    assert said[-1] == f"{other.name}: trained"
    with pytest.raises(HubError, match="color-m2/late is not in"):
        pull_many([RUN, other], root=pinned, say=said.append)
    with pytest.raises(HubError, match="2 of 3 could not be pulled"):
        pull_many([other, RUN, other], root=pinned, say=said.append)


def test_an_unpublished_entry_is_present_or_says_so(hub, mine):
    assert pull(RUN, root=mine) == "present"
    final(mine).unlink()
    with pytest.raises(HubError, match="has not been published"):
        pull(RUN, root=mine)
    assert not hub.requests


# ---- push -----------------------------------------------------------------------------------------


def test_push_makes_a_complete_repository_and_pins_it(hub, mine, tmp_path):
    grid = tmp_path / "grid.png"
    grid.write_bytes(PNG)
    commit = push(RUN, root=mine, result=RESULT, grid=grid)
    files = hub.files("model", REPO)
    assert set(files) == {".gitattributes", "README.md", "config.json", MODEL_FILE, "samples.png"}
    entry = read_json(mine / "manifest.json")[KEY]
    assert entry["hub"] == {"repo": REPO, "revision": commit}
    assert hashlib.sha256(files[MODEL_FILE]).hexdigest() == entry["sha256"]
    config = json.loads(files["config.json"])
    assert config["training"]["recipe"]["batch"] == 8
    assert config["parameters"] == sum(p.numel() for p in trained_network(build_model(RUN)).state_dict().values())
    assert hub.seen("POST /api/validate-yaml")
    assert push(RUN, root=mine, result=RESULT, grid=grid) == commit  # nothing changed: no new commit
    assert len(hub.seen("PUT")) == 2


def test_push_refuses_what_it_cannot_stand_behind(hub, mine, monkeypatch):
    with pytest.raises(LcsError, match="no weights for tiny/color-m2/late"):
        push(tiny_run("color"), root=mine)
    data = final(mine).read_bytes()
    final(mine).write_bytes(data[:-1])
    with pytest.raises(LcsError, match="does not match its sha256"):
        push(RUN, root=mine)
    final(mine).write_bytes(data)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="there is no token; set HF_TOKEN or run `hf auth login`"):
        push(RUN, root=mine)
    assert not hub.repos


@pytest.mark.parametrize(
    ("pattern", "status", "message"),
    [
        ("POST /api/repos/create", 403, "403, the token does not allow it"),
        ("POST .*commit", 429, "429, too many requests"),
        ("POST .*batch", 401, "401"),
        ("PUT", 500, "the Hub answered 500"),
        ("POST /api/validate-yaml", 400, "the Hub refused the metadata"),
    ],
)
def test_a_failed_push_is_one_line_and_pins_nothing(hub, mine, pattern, status, message):
    hub.fault(pattern, times=99, status=status)
    with pytest.raises(HubError, match=message) as caught:
        push(RUN, root=mine)
    assert "\n" not in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert "hub" not in read_json(mine / "manifest.json")[KEY]


@pytest.mark.parametrize("run", experiments.paper_runs("mini") + experiments.paper_runs("paper"), ids=lambda r: r.name)
def test_every_model_card_has_valid_metadata(run):
    settings = json.loads(json.dumps(run_settings(run, seed=0)))
    entry = {"settings": settings, "samples": 1, "ema_std": 0.05, "version": "0", "sha256": "0" * 64}
    result = RESULT | {"run": run.name, "scale": run.scale.name, "objects": run.objects}
    card = ModelCard(cards.model_card(run, "late", entry, 10, result, has_grid=True))
    data = card.data.to_dict()
    assert data["license"] == "apache-2.0"
    assert data["library_name"] == "lcs"
    assert data["pipeline_tag"] in ("unconditional-image-generation", "other")
    assert "arxiv:2509.16447" in data["tags"]
    assert data["model-index"][0]["results"][0]["metrics"][0]["value"] == 5
    for text in ("| K_max |", "5 +(0-1)", "![samples", "## Limits", "## Training", f"lcs pull {run.experiment.name}"):
        assert text in card.text, text
    assert "## Result" not in cards.model_card(run, "late", entry, 10)


# ---- datasets -------------------------------------------------------------------------------------


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


def test_a_dataset_goes_up_and_comes_back(hub, dataset, tmp_path, monkeypatch):
    commit = push_dataset(dataset, "me/scenes")
    there = hub.files("dataset", "me/scenes")
    assert {n for n in there if n.endswith(".safetensors")} == {
        f"count-{c}/shard-0000{s}.safetensors" for c in (1, 2) for s in (0, 1)
    }
    front = yaml.safe_load(there["README.md"].decode().split("---")[1])
    assert front["license"] == "cc-by-4.0"
    assert front["size_categories"] == ["n<1K"]
    hub.fault("GET /[0-9a-f]{64}$", times=2)  # the first two shards arrive whole ...
    hub.fault("GET /[0-9a-f]{64}$", times=99, cut_after=0)  # ... then the line breaks
    with pytest.raises(HubError, match="cut short"):
        pull_dataset("me/scenes", tmp_path / "copy")
    assert not (tmp_path / "copy" / "manifest.json").exists()
    hub.faults.clear()
    hub.requests.clear()
    assert pull_dataset("me/scenes", tmp_path / "copy") == commit
    assert len(hub.seen("GET /[0-9a-f]{64}$")) == 2
    assert all(f"/resolve/{commit}/" in r.path for r in hub.seen("shard"))  # pinned, whatever happens to main
    for path in dataset.rglob("*.*"):
        assert (tmp_path / "copy" / path.relative_to(dataset)).read_bytes() == path.read_bytes()
    assert len(RenderedScenes(tmp_path / "copy", (1, 2), verify=True)) == 10
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pull_dataset("me/scenes", tmp_path / "copy") == commit  # complete: works without a network


def test_datasets_that_are_not_whole_or_not_ours(hub, dataset, tmp_path):
    push_dataset(dataset, "me/scenes")
    write_json(tmp_path / "other" / "dataset.json", {"counts": [6]})
    with pytest.raises(LcsError, match="holds another dataset"):
        pull_dataset("me/scenes", tmp_path / "other")
    manifest = json.loads(hub.files("dataset", "me/scenes")["manifest.json"])
    manifest["sha256"]["../../escape/0"] = "0" * 64
    hub.commit("dataset", "me/scenes", {"manifest.json": json.dumps(manifest).encode()})
    with pytest.raises(LcsError, match="does not describe a rendered dataset"):
        pull_dataset("me/scenes", tmp_path / "copy")
    shard = shard_path(dataset, 1, 0)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(LcsError, match="nothing was pushed"):
        push_dataset(dataset, "me/again")
    assert ("dataset", "me/again") not in hub.repos
    with pytest.raises(HubError, match="cannot read the manifest of me/none: 404, there is no such repository"):
        pull_dataset("me/none", tmp_path / "copy")


# ---- Space ----------------------------------------------------------------------------------------


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


def test_the_space_gets_exactly_its_files(hub, project):
    files = assemble(project)
    names = {"app.py", "lcs/__init__.py", "lcs/model/edm2.py", "weights/a.safetensors", "weights/manifest.json",
             "requirements.txt", "README.md", "LICENSE", "NOTICE", "artifact/results/claims.json"}  # fmt: skip
    assert set(files) == names
    front = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert front["sdk"] == "gradio"
    assert front["app_file"] == "app.py"
    assert front["sdk_version"] == "6.31.0"
    assert front["python_version"] == "3.11"
    assert len(front["short_description"]) <= 60
    hub.commit("space", "me/demo", {"old.py": b"", ".gitattributes": b""})
    push_space("me/demo", files)
    assert set(hub.files("space", "me/demo")) == names | {".gitattributes"}
    docker = assemble(project, "docker")
    assert set(docker) - names == {"Dockerfile", ".dockerignore", "pyproject.toml", "artifact/runner.py"}
    assert yaml.safe_load(docker["README.md"].decode().split("---")[1])["app_port"] == 7860


def test_the_space_says_what_is_missing(project):
    (project / "app.py").unlink()
    with pytest.raises(LcsError, match=r"app\.py is missing"):
        assemble(project)
    with pytest.raises(LcsError, match="choose gradio or docker"):
        assemble(project, "streamlit")
    with pytest.raises(LcsError, match=r"3\.11 or 3\.12\.12"):
        assemble(project, python_version="three")


# ---- command line ---------------------------------------------------------------------------------


def test_commands(hub, mine, pinned, project, tmp_path, monkeypatch, capsys):
    def lcs(*arguments: str) -> tuple[int, str]:
        return run_lcs(monkeypatch, capsys, *arguments)

    tiny = ("--scale", "tiny", "--objects", "2")
    (tmp_path / "result.json").write_text(json.dumps({"results": [RESULT]}))
    code, text = lcs("push", "grid-single", *tiny, "--weights", str(mine), "--dry-run", "--result",
                     str(tmp_path / "result.json"))  # fmt: skip
    assert code == 0
    assert "| K_max |" in text
    assert "nothing was sent" in text
    assert not hub.requests
    code, text = lcs("push", "grid-single", *tiny, "--weights", str(mine), "--repo", "me/mine", "--private")
    assert code == 0
    assert "pushed grid-single-m2 to me/mine at" in text
    assert ("model", "me/mine") in hub.private
    code, text = lcs("pull", "grid-single", *tiny, "--weights", str(pinned))
    assert (code, text.splitlines()[-1]) == (0, "grid-single-m2: downloaded")
    code, text = lcs("space", "--repo", "me/demo", "--root", str(project))
    assert code == 0
    assert "bytes in 10 files" in text
    assert ("space", "me/demo") not in hub.repos
    code, text = lcs("space", "--repo", "me/demo", "--root", str(project), "--push")
    assert code == 0
    assert "app.py" in hub.files("space", "me/demo")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pull",), "name experiments, or give --all, or --dataset"),
        (("pull", "grid-all", "--all"), "name experiments, or give --all"),
        (("pull", "--all", "--scale", "huge"), "unknown scale 'huge'"),
        (("pull", "grid-all", "--stage", "never"), "unknown stage 'never'"),
        (("pull", "--dataset", "me/x"), "--dataset needs --out"),
        (("push",), "name one experiment, or give --dataset"),
        (("push", "--dataset", "/nowhere"), "has no manifest.json"),
        (("push", "grid-all", "--grid", "/nowhere.png"), "/nowhere.png does not exist"),
        (("space",), "Missing option"),
    ],
)
def test_bad_input_is_one_line(arguments, message, monkeypatch, capsys):
    code, text = run_lcs(monkeypatch, capsys, *arguments)
    assert code == 2
    assert message in text
    assert len(text.strip().splitlines()) == 1


def test_pull_or_train_trains_and_exports(hub, tmp_path, monkeypatch, capsys):
    def train_all(runs, data, out, seed, settings, **_):
        for run in runs:
            save_run(run, out / run.scale.name / run.name)

    monkeypatch.setattr("lcs.training.queue.train_all", train_all)
    root = tmp_path / "new"
    arguments = ("pull", "grid-single", "--scale", "tiny", "--objects", "2", "--weights", str(root), "--or-train")
    code, text = run_lcs(monkeypatch, capsys, *arguments, "--runs", str(tmp_path / "runs"))
    assert code == 0, text
    assert "training it instead" in text
    weights.load(get_run("grid-single", 2, "tiny"), root=root)
    code, text = run_lcs(monkeypatch, capsys, *arguments, "--runs", str(tmp_path / "runs"))
    assert "grid-single-m2: present" in text


def test_the_token_appears_nowhere(hub, pinned, mine, project, dataset, tmp_path, monkeypatch, capsys, caplog):
    """Every verb against a server that repeats the token in its errors, with the client's debug log on."""
    monkeypatch.setattr(constants, "HF_DEBUG", True)
    caplog.set_level("DEBUG", logger="huggingface_hub")
    tiny = ("--scale", "tiny", "--objects", "2", "--weights")
    printed = ""
    for status in (400, 401, 403, 404, 429, 500):
        hub.faults.clear()
        hub.fault(".", times=999, status=status)
        for arguments in (
            ("pull", "grid-single", *tiny, str(pinned)),
            ("pull", "--dataset", "me/scenes", "--out", str(tmp_path / "copy")),
            ("push", "grid-single", *tiny, str(mine)),
            ("push", "--dataset", str(dataset)),
            ("space", "--repo", "me/demo", "--root", str(project), "--push"),
        ):
            code, text = run_lcs(monkeypatch, capsys, *arguments)
            assert code == 2
            assert text.strip().splitlines()[-1].startswith("lcs: cannot ")
            assert "Traceback" not in text
            printed += text
    printed += caplog.text
    assert "authenticated: True" in printed  # the log really was on
    assert "canary" not in printed.lower()
    for folder in (pinned, mine, tmp_path / "copy", tmp_path / "cache"):
        for path in folder.rglob("*"):
            assert path.is_dir() or b"canary" not in path.read_bytes().lower()


def test_a_token_that_cannot_be_sent_is_not_shown(hub, pinned, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    for token in ("hf_canary\x00secret", "hf_canärysecret"):
        Path(constants.HF_TOKEN_PATH).write_text(token)
        with pytest.raises(HubError, match="characters that cannot be sent") as caught:
            pull(RUN, root=pinned)
        assert "secret" not in str(caught.value)


def test_environment_variables_of_a_fresh_process(hub: FakeHub, pinned, tmp_path):
    """HF_ENDPOINT, HF_HOME and HF_TOKEN as a user sets them, not patched into the client."""
    code = (
        "import sys; sys.path.insert(0, 'tests'); import tiny, lcs.experiments as e, lcs.cli as c, typer\n"
        "from lcs.hub.commands import register\n"
        "e.SCALES['tiny'] = tiny.SCALE; c.app = typer.Typer(); register(c.app); c.main()"
    )
    arguments = [sys.executable, "-c", code, "pull", "grid-single", "--scale", "tiny", "--objects", "2", "--weights"]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", "HF_DEBUG": "1"}

    command = [*arguments, str(pinned)]
    repo = Path(__file__).parents[1]
    done = subprocess.run(command, env=environment, cwd=repo, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "grid-single-m2: downloaded" in done.stdout
    assert "canary" not in (done.stdout + done.stderr).lower()
    assert hub.seen("HEAD .*resolve")[0].headers["authorization"] == f"Bearer {TOKEN}"
