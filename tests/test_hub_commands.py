"""The Hub's verbs on the command line, and what must never be printed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import TOKEN, FakeHub
from hub_site import RESULT, RUN, run_lcs, save_run
from huggingface_hub import constants

from lcs import weights
from lcs.experiments import get_run
from lcs.hub.client import HubError
from lcs.hub.pull import pull

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # inside the client


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
