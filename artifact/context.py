"""What a step may ask for: models, counted samples, a place to save.

Counted samples (`Context.counts`) are the expensive part and several steps share them, so they are stored under a hash
of everything they depend on: weights, counter, settings and the code that samples and counts.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from artifact.steps import Checkpoint, Effort, Output
from lcs import weights
from lcs.conditioning import get_conditioner
from lcs.counter.detector import MANIFEST_KEY, load_counter
from lcs.data.files import atomic_write, read_json, write_json
from lcs.evaluation import evaluate_run, to_markdown
from lcs.sdxl.package import MINI_ID

LCS = Path(weights.__file__).parent
COUNT_SOURCES = ("evaluation.py", "experiments.py", "sampling.py", "conditioning.py", "diffusion/samplers.py",
                 "model/*.py", "training/batches.py", "counter/detector.py", "counter/matching.py")  # fmt: skip
SHOWN = 8  # images per K that are kept beside the counts


@dataclass(frozen=True)
class Settings:
    """What the command line chose."""

    scale: str
    effort: Effort
    out: Path
    device: str = "cpu"
    seed: int = 0
    samples: int | None = None  # per K, instead of the effort's
    sdxl_model: str = MINI_ID
    roots: tuple[Path, ...] = (weights.WEIGHTS,)  # folders of weights; the first that has a checkpoint is used

    def root_of(self, checkpoint: Checkpoint) -> Path | None:
        """The folder of weights that holds a checkpoint, file and all."""
        for root in self.roots:
            entry = weights.read_manifest(root).get(checkpoint.key)
            if entry is not None and (root / entry["file"]).exists():
                return root
        return None

    def sha256(self, checkpoint: Checkpoint) -> str:
        return weights.read_manifest(self.root_of(checkpoint))[checkpoint.key]["sha256"]


def code_hash(patterns: Sequence[str], *files: Path) -> str:
    """Hash of source files: of lcs/ by pattern, and others."""
    paths = sorted({p for pattern in patterns for p in LCS.glob(pattern)} | set(files))
    return content_hash([p.read_text() for p in paths])


def content_hash(data) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Context:
    """Handed to a step's `make`. Everything it saves goes into its own folder and its `Output`."""

    def __init__(self, settings: Settings, folder: Path, checkpoints: list[Checkpoint], say=lambda text: None):
        self.settings, self.effort, self.folder, self.say = settings, settings.effort, folder, say
        self.output, self.sampled = Output(), {}
        self.checkpoints = [c for c in checkpoints if settings.root_of(c) is not None]  # those that are there
        self.output.missing = [c.key for c in checkpoints if c not in self.checkpoints]

    # ---- models and samples ----

    def model(self, checkpoint: Checkpoint) -> nn.Module:
        root = self.settings.root_of(checkpoint)
        return weights.load(checkpoint.run, checkpoint.stage, root).to(self.settings.device)

    def counted(self, checkpoint: Checkpoint) -> bool:
        """Whether the counted samples are there already."""
        return (self._store(checkpoint)[0] / "result.json").exists()

    def _store(self, checkpoint: Checkpoint) -> tuple[Path, list[int], int]:
        """Folder of the counted samples of a checkpoint, the K and the samples per K."""
        run, effort = checkpoint.run, self.effort
        ks = list(range(len(get_conditioner(run.experiment.conditioner).test_conditions) + 1))
        samples = self.settings.samples or (effort.local_samples if run.experiment.local else effort.samples)
        counter_sha = weights.read_manifest(weights.WEIGHTS).get(MANIFEST_KEY, {}).get("sha256")
        key = content_hash(
            [checkpoint.key, self.settings.sha256(checkpoint), counter_sha, code_hash(COUNT_SOURCES), ks, samples,
             effort.solver, effort.steps, self.settings.seed]
        )  # fmt: skip
        return self.settings.out / "counts" / f"{run.name}-{checkpoint.stage}-{key}", ks, samples

    def counts(self, checkpoint: Checkpoint, progress: bool = True) -> dict:
        """`RunResult.to_json()`, and under "pictures" the first images of every K: uint8 [n, H, W, 3] by K."""
        run, effort = checkpoint.run, self.effort
        store, ks, samples = self._store(checkpoint)
        if not (store / "result.json").exists():
            self.say(f"{run.name} ({checkpoint.stage}): {samples} samples for each of {len(ks)} K")
            pictures: dict[int, np.ndarray] = {}
            result = evaluate_run(
                run, self.model(checkpoint), ks, samples, effort.steps, effort.solver, self.settings.seed, progress,
                counter=load_counter(), on_images=lambda k, images, _: pictures.update({k: images[:SHOWN]}),
            )  # fmt: skip
            for k, images in pictures.items():
                save_png(store / f"k{k:02d}.png", np.concatenate(list(images), axis=1))
            write_json(store / "result.json", result.to_json())  # last: its presence means all is there
        result = read_json(store / "result.json")
        self.sampled[store] = result["seconds"]
        self.output.sampling = round(sum(self.sampled.values()), 1)
        size = run.scale.resolution
        result["pictures"] = {
            k: np.stack(np.split(np.asarray(Image.open(store / f"k{k:02d}.png").convert("RGB")), shown, axis=1))
            for k in ks
            if (shown := Image.open(store / f"k{k:02d}.png").width // size)
        }
        return result

    # ---- saving ----

    def figure(self, name: str, figure: Figure, caption: str) -> None:
        """As PNG and PDF."""
        for kind in ("png", "pdf"):
            with atomic_write(self.folder / f"{name}.{kind}") as path:
                metadata = {"CreationDate": None} if kind == "pdf" else None  # same input, same bytes
                figure.savefig(path, format=kind, dpi=150, metadata=metadata)
        self.output.figures.append({"file": f"{name}.png", "caption": caption})

    def table(self, name: str, rows: Sequence[dict], caption: str) -> None:
        """As CSV and Markdown; all rows have the same keys."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader(), writer.writerows(rows)
        for suffix, content in (("csv", text.getvalue()), ("md", to_markdown(rows))):
            with atomic_write(self.folder / f"{name}.{suffix}") as path:
                path.write_text(content)
        self.output.tables.append({"file": f"{name}.md", "caption": caption})


def save_png(path: Path, image: np.ndarray) -> None:
    with atomic_write(path) as temporary:
        Image.fromarray(image).save(temporary, format="png")


def settings_dict(settings: Settings) -> dict:
    """What a reader needs to redo it."""
    return {"scale": settings.scale, "effort": asdict(settings.effort), "samples": settings.samples,
            "seed": settings.seed, "device": settings.device, "sdxl_model": settings.sdxl_model}  # fmt: skip
