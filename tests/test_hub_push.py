"""Pushing checkpoints, datasets and the Space, by the real client to a local server."""

import hashlib
import json

import pytest
import yaml
from fake_hub import TOKEN
from hub_site import KEY, PNG, REPO, RESULT, RUN, final
from huggingface_hub import ModelCard, constants
from tiny import tiny_run

from lcs import experiments
from lcs.data.files import read_json, write_json
from lcs.data.shards import RenderedScenes, shard_path
from lcs.errors import LcsError
from lcs.hub import cards
from lcs.hub.client import HubError
from lcs.hub.datasets import pull_dataset, push_dataset
from lcs.hub.pull import MODEL_FILE
from lcs.hub.push import push
from lcs.hub.space import assemble, push_space
from lcs.model.build import build_model, trained_network
from lcs.training.trainer import run_settings

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # inside the client


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
