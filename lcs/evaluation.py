"""From trained models to K_max: sample every K, count with the shipped counter, apply the rule (`lcs/rule.py`).

Image i of every K starts from noise seed `seed + i`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from torch import nn
from tqdm import tqdm

import lcs
from lcs import weights
from lcs.conditioning import get_conditioner
from lcs.counter.detector import Counter, Detections, load_counter
from lcs.data.files import content_hash, read_json, write_json
from lcs.errors import LcsError
from lcs.experiments import Run, get_experiment, paper_runs
from lcs.rule import (
    ALWAYS,
    LABELS_ALL,
    OFTEN,
    TOLERANCE_CELLS,
    RunResult,
    allowed_extras,
    make_row,
    match_condition,
    summarise,
)
from lcs.sampling import DEFAULT_STEPS, sample_rgb
from lcs.threads import use_threads

SAMPLES = 32  # per K
OnImages = Callable[[int, np.ndarray, list[Detections]], None]  # (K, images uint8 [n, H, W, 3], detections)


def evaluate_run(
    run: Run,
    model: nn.Module,
    ks: Sequence[int] | None = None,
    samples: int = SAMPLES,
    steps: int = DEFAULT_STEPS,
    solver: str = "heun",
    seed: int = 0,
    progress: bool = True,
    counter: Counter | None = None,
    on_images: OnImages | None = None,
) -> RunResult:
    """Samples the paper's first K conditions for every K (default: all from 0), counts, and applies the rule.

    on_images(K, images, detections) sees every batch, e.g. to save pictures.
    """
    if run.experiment.conditioner not in LABELS_ALL:
        raise LcsError(f"{run.name} is given no conditions: it has no K_max")
    if samples < 1:
        raise LcsError(f"need at least one sample per K, got {samples}")
    conditioner = get_conditioner(run.experiment.conditioner)
    ks = list(range(len(conditioner.test_conditions) + 1)) if ks is None else sorted(set(ks))
    labels = {k: conditioner.test_vector(k) for k in ks}  # also refuses a K that is not possible
    counter = counter or load_counter()
    extras_allowed = allowed_extras(run)
    began, rows = time.monotonic(), []
    for k in tqdm(ks, unit="K", disable=not progress, desc=run.name):
        seeds = range(seed, seed + samples)
        images = sample_rgb(run, model, labels[k], seeds, steps=steps, solver=solver)
        candidates = counter.candidates(images)
        objects = [d.where(d.quality >= counter.thresholds.quality) for d in candidates]
        smears = [len(c) - len(o) for c, o in zip(candidates, objects, strict=True)]
        matches = [match_condition(conditioner.name, k, d) for d in objects]
        rows.append(make_row(k, run.objects, matches, smears, extras_allowed))
        if on_images is not None:
            on_images(k, images, objects)
    settings = {
        "samples": samples, "steps": steps, "solver": solver, "seed": seed, "tolerance_cells": TOLERANCE_CELLS,
        "thresholds": asdict(counter.thresholds), "always": ALWAYS, "often": OFTEN,
    }  # fmt: skip
    return summarise(run, rows, extras_allowed, settings, time.monotonic() - began)


def evaluate_all(
    scale: str = "mini",
    experiments: Sequence[str] | None = None,
    samples: int = SAMPLES,
    ks: Sequence[int] | None = None,
    steps: int = DEFAULT_STEPS,
    solver: str = "heun",
    seed: int = 0,
    stage: str = "late",
    progress: bool = True,
    root: Path = weights.WEIGHTS,
    on_result: Callable[[dict], None] | None = None,
    device: str = "cpu",
    workers: int = 1,
    objects: int | None = None,
    store: Path | None = None,
) -> list[dict]:
    """`RunResult.to_json()` of every shipped run of the paper; a run without usable weights gives {"run", "missing"}.

    experiments: names to restrict to; None means all; objects: the largest number trained on, likewise. on_result sees
    each result as soon as it is there. workers: so many processes share the K of a run, with one thread each (on the
    CPU). store: a JSON file that keeps every result by its weights, counter, settings and version; what it holds is not
    sampled again.
    """
    wanted = None if experiments is None else {get_experiment(name).name for name in experiments}
    for name in wanted or ():
        if get_experiment(name).conditioner not in LABELS_ALL:
            raise LcsError(f"{name} is given no conditions: it has no K_max")
    counter = load_counter(root)
    shipped = weights.read_manifest(root)
    if stage not in weights.STAGES:
        raise LcsError(f"unknown stage {stage!r}; choose from {', '.join(weights.STAGES)}")
    runs = [run for run in paper_runs(scale) if run.experiment.conditioner in LABELS_ALL]
    runs = [run for run in runs if (wanted is None or run.experiment.name in wanted) and objects in (None, run.objects)]
    if not runs:
        raise LcsError(f"the paper has no such run on 1..{objects} objects")
    kept = read_store(store)
    if store is not None:
        write_json(store, kept)  # a path that cannot be written is told before anything is sampled
    results = []
    for run in runs:
        limit = len(get_conditioner(run.experiment.conditioner).test_conditions)
        own_ks = [k for k in (range(limit + 1) if ks is None else ks) if k <= limit]
        options = (samples, steps, solver, seed)
        entry = shipped.get(weights.entry_key(run, stage), {"sha256": None})
        place = content_hash([entry["sha256"], shipped.get("counter"), own_ks, options, lcs.__version__])
        if place in kept:
            results.append(kept[place])
        else:
            try:
                shared = workers if device == "cpu" else 1
                result = _evaluate_shipped(run, stage, root, own_ks, options, shared, progress, counter, device)
                results.append({**result.to_json(), "stage": stage})
                kept[place] = results[-1]
            except LcsError as error:  # not shipped, or damaged: the others can be evaluated
                results.append({"run": run.name, "missing": str(error)})
            if store is not None:
                write_json(store, kept)
        if on_result is not None:
            on_result(results[-1])
    return results


def _evaluate_shipped(run: Run, stage, root: Path, ks, options: tuple, workers: int, progress: bool, counter, device):
    model = weights.load(run, stage, root).to(device)
    if workers > 1 and len(ks) > 1:
        return _shared(run, stage, root, ks, options, workers, progress)
    return evaluate_run(run, model, ks, *options, progress, counter)


def read_store(path: Path | None) -> dict[str, dict]:
    """Results kept by an earlier `evaluate_all`; nothing if there is no file yet."""
    kept = read_json(path) if path is not None and path.exists() else {}
    results = kept.values() if isinstance(kept, dict) else [None]
    if not all(isinstance(result, dict) and {"run", "rows"} <= result.keys() for result in results):
        raise LcsError(f"{path} does not hold results of `lcs evaluate`; choose another file")
    return kept


def _shared(run: Run, stage: str, root: Path, ks: Sequence[int], options: tuple, workers: int, progress: bool):
    """`evaluate_run` with the K handed out to processes of one thread each: twice as fast as as many threads."""
    began = time.monotonic()
    with ProcessPoolExecutor(min(workers, len(ks)), get_context("spawn"), use_threads, (1,)) as pool:
        jobs = [pool.submit(_one_k, run, stage, root, k, options) for k in ks]
        for job in tqdm(as_completed(jobs), total=len(jobs), unit="K", disable=not progress, desc=run.name):
            job.result()
    parts = [job.result() for job in jobs]
    rows = sorted((row for part in parts for row in part.rows), key=lambda row: row.k)
    return summarise(run, rows, parts[0].extras_allowed, parts[0].settings, time.monotonic() - began)


def _one_k(run: Run, stage: str, root: Path, k: int, options: tuple) -> RunResult:
    return evaluate_run(run, _loaded(run, stage, root), [k], *options, False, load_counter(root))


@lru_cache(maxsize=1)
def _loaded(run: Run, stage: str, root: Path) -> nn.Module:
    return weights.load(run, stage, root)


def summary_rows(results: Sequence[dict]) -> list[dict]:
    """Table rows of `evaluate_all`: K_max as the paper prints it, its two variants, and what K = 0 draws."""
    rows = []
    for r in results:
        if "missing" in r:
            rows.append(
                {"run": r["run"], "trained on": "", "K_max": "missing", "strict": "", "in place": "", "K = 0 draws": ""}
            )
            continue
        zero = r["drawn_at_0"]
        drawn = "" if zero is None else str(zero["p5"]) if zero["p5"] == zero["p95"] else f"{zero['p5']}-{zero['p95']}"
        trained = "1" if r["objects"] == 1 else f"1-{r['objects']}"
        strict, in_place = ("" if r[k] is None else str(r[k]) for k in ("k_max_strict", "k_max_in_place"))
        rows.append({
            "run": r["run"], "trained on": trained, "K_max": r["label"], "strict": strict, "in place": in_place,
            "K = 0 draws": drawn,
        })  # fmt: skip
    return rows


def to_markdown(rows: Sequence[dict]) -> str:
    """Rows with the same keys as a Markdown table."""
    if not rows:
        return ""
    head = list(rows[0])
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(row[h]) for h in head) + " |" for row in rows]) + "\n"
