"""A folder of small random checkpoints, stored results and a running app, shared by the app's tests."""

import functools
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from lcs import weights
from lcs.bench.locality import with_live_gains
from lcs.counter.detector import Detector, Thresholds, export_counter
from lcs.data.files import sha256_of, write_json
from lcs.experiments import get_run
from lcs.model.build import build_model, trained_network
from lcs.training import checkpoint

CANARY = "hf_" + "canary" * 6  # a token that must never be shown
RUNS = (("grid-all", 3), ("grid-all", 1), ("grid-single", 3), ("grid-single-local", 3), ("color", 3))


def make_weights(root: Path, runs=RUNS) -> Path:
    """Random models of the mini scale with an entry in the manifest, and a random counter."""
    root.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    export_counter(Detector(), Thresholds(score=0.01, quality=0.0), {}, {}, root)
    manifest = weights.read_manifest(root)
    for name, objects in runs:
        run = get_run(name, objects, "mini")
        tensors = trained_network(with_live_gains(build_model(run))).state_dict()
        path = root / f"{run.name}.safetensors"
        checkpoint.save_tensors(path, {k: t.half() for k, t in tensors.items()}, {})
        manifest[weights.entry_key(run)] = {
            "file": path.name, "sha256": sha256_of(path), "bytes": path.stat().st_size, "samples": 0, "ema_std": 0.05,
            "version": "0", "settings": {},
        }  # fmt: skip
    write_json(root / "manifest.json", manifest)
    return root


def make_pipeline(root: Path) -> bool:
    """A random mini-sdxl beside the weights; False where the study is not installed."""
    try:
        from lcs.sdxl.build import MiniSettings, build_pipeline
        from lcs.sdxl.package import export_mini
    except ImportError:
        return False
    settings = MiniSettings(vae_channels=(8, 8, 8), unet_channels=(16, 32, 64), text_layers=2)
    export_mini(build_pipeline(settings), settings, 0, {}, root)
    return True


def make_results(folder: Path) -> Path:
    """Claims and figures as the artifact stores them, and two entries that try to leave the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    claim = {"id": "c1", "claim": "grid-all <b>composes</b>", "paper": "9", "ours": "8", "interval": [7, 9],
             "verdict": "came out", "rule": "K_max > 3"}  # fmt: skip
    write_json(folder / "claims.json", [claim, {**claim, "id": "c2", "verdict": "not run"}])
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / "one.png")
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder.parent / "outside.png")
    figure = {"name": "one", "title": "One", "caption": "black", "file": "one.png", "command": "make", "seconds": 1}
    write_json(
        folder / "figures.json", [figure, {**figure, "file": "../outside.png"}, {**figure, "file": "/etc/passwd"}]
    )
    table = "| experiment | trained on | paper | ours |\n|---|---|---|---|\n| grid-single | 1-3 | 1+(0-2) | 1 |\n"
    (folder / "table1-table1.md").write_text(table)
    return folder


@functools.cache
def start() -> str:
    """The address of an app that serves random checkpoints until the tests end."""
    folder = Path(tempfile.mkdtemp(prefix="lcs-app-test-"))
    os.environ["GRADIO_TEMP_DIR"] = str(folder / "cache")
    os.environ["HF_TOKEN"] = CANARY
    from lcs.app.page import build, launch_options, make_site

    make_pipeline(make_weights(folder / "weights"))
    demo = build(make_site(folder / "weights", "mini", make_results(folder / "results")))
    _, url, _ = demo.launch(
        server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch_options()
    )  # fmt: skip
    return url.rstrip("/")


def call(url: str, name: str, values: list, timeout: float = 120.0) -> tuple[int, str, object]:
    """One call through the plain HTTP API with any JSON, NaN too -> (status, last event, its data)"""
    import httpx

    body = json.dumps({"data": values})
    with httpx.Client(timeout=timeout) as client:
        sent = client.post(f"{url}/gradio_api/call/{name}", content=body, headers={"content-type": "application/json"})
        if sent.status_code != 200:
            return sent.status_code, "refused", sent.text
        event, data = "", None
        with client.stream("GET", f"{url}/gradio_api/call/{name}/{sent.json()['event_id']}") as answer:
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    event = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    if event in ("complete", "error"):
                        break
        return 200, event, json.loads(data) if data else None
