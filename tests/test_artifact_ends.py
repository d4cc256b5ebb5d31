"""The artifact's processes when it is stopped from outside, checkpoints of the Hub, and drawing again."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from test_artifact import run_tiny, shipped, tiny  # noqa: F401, fixtures

from artifact import runner
from lcs import weights
from lcs.data.files import read_json, write_json
from lcs.experiments import get_run

REPO = Path(__file__).parents[1]
POOL = """
import os, time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from artifact import ahead

if __name__ == "__main__":
    with ahead.ending_with_us(ProcessPoolExecutor(2, get_context("spawn"), ahead._begin, (os.getpid(),))) as pool:
        jobs = [pool.submit(time.sleep, 300) for _ in range(6)]
        print(*pool._processes, flush=True)
        for done in as_completed(jobs):
            done.result()
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_jobs_end_with_the_command(tmp_path, number):
    """However it ends: by Ctrl-C, politely or by force; nothing goes on counting for nobody."""
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    main = subprocess.Popen(
        [sys.executable, script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )  # fmt: skip
    workers = [int(pid) for pid in main.stdout.readline().split()]
    assert len(workers) == 2
    time.sleep(1 if number == signal.SIGINT else 8)  # a worker that is still importing ends by itself, too
    main.send_signal(number)
    main.wait(60)
    end = time.monotonic() + 60
    while any(map(is_running, workers)) and time.monotonic() < end:
        time.sleep(0.2)
    left = [pid for pid in workers if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def test_a_checkpoint_of_the_hub_is_pulled_first(tmp_path, tiny, monkeypatch, capsys):  # noqa: F811
    """Its file is not there, but the manifest says where it was published."""
    root = tmp_path / "weights"
    shutil.copytree(tiny, root)
    key = weights.entry_key(get_run("grid-all", 1, "tiny"))
    manifest = read_json(root / "manifest.json")
    file = manifest[key]["file"]
    (root / file).unlink()
    manifest[key]["hub"] = {"repo": "somebody/model", "revision": "0" * 40}
    write_json(root / "manifest.json", manifest)
    pulled = []

    def pull(run, stage, home):
        pulled.append((run.name, stage))
        return shutil.copyfile(tiny / file, home / file)

    monkeypatch.setattr(runner, "pull", pull)
    run_tiny(tmp_path / "out", root, "fig4")
    assert pulled == [("grid-all-m1", "late")]
    assert read_json(tmp_path / "out" / "results.json")["steps"]["fig4"]["missing"] == [
        "tiny/grid-single-local-m1/late"
    ]


def test_a_step_is_drawn_again_if_asked_to(tmp_path, tiny, capsys):  # noqa: F811
    run_tiny(tmp_path, tiny, "fig9")
    run_tiny(tmp_path, tiny, "fig9")
    assert "unchanged" in capsys.readouterr().out
    run_tiny(tmp_path, tiny, "fig9", again=True)
    assert "unchanged" not in capsys.readouterr().out
    assert "--only fig9" in (tmp_path / "report.md").read_text()
    assert "--again" in (tmp_path / "report.md").read_text()


def test_drawing_again_loses_nothing_if_it_fails(tmp_path, tiny, monkeypatch, capsys):  # noqa: F811
    run_tiny(tmp_path, tiny, "fig9")
    before = (tmp_path / "fig9" / "fig9.png").read_bytes()
    step = next(s for s in runner.STEPS if s.name == "fig9")
    with monkeypatch.context() as patch:
        broken = replace(step, make=lambda context: 1 / 0)
        patch.setattr(runner, "STEPS", [broken])
        patch.setattr(runner, "_key", lambda *args: read_json(tmp_path / "fig9" / "step.json")["key"])
        assert not run_tiny(tmp_path, tiny, "fig9", again=True)
    assert "failed: ZeroDivisionError" in capsys.readouterr().out
    assert (tmp_path / "fig9" / "fig9.png").read_bytes() == before
    run_tiny(tmp_path, tiny, "fig9")
    assert "unchanged" in capsys.readouterr().out
