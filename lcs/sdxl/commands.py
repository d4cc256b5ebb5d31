"""The verb `sdxl`: the study of an SDXL-class model; `sdxl train` makes mini-sdxl. `register` adds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lcs.errors import LcsError

Threads = Annotated[int, typer.Option(help="CPU threads; 0 leaves the default.")]

sdxl_app = typer.Typer(
    invoke_without_command=True,
    help="Pixel-space and feature-space study of an SDXL-class model; `train` makes the one shipped here.",
)


def register(app: typer.Typer) -> None:
    app.add_typer(sdxl_app, name="sdxl")


@sdxl_app.callback()
def sdxl_command(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="mini-sdxl, a diffusers folder, or a Hub repository.")] = "mini-sdxl",
    out: Annotated[Path, typer.Option(help="Folder of figures, tables and numbers.")] = Path("out/sdxl-study"),
    effort: Annotated[str, typer.Option(help="quick (1 minute on mini-sdxl), standard (9) or full.")] = "standard",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; by default a GPU if there is one.")] = None,
    offload: Annotated[bool, typer.Option(help="Keep on the GPU only the part at work.")] = False,
    seed: Annotated[int, typer.Option(help="Where seeds count from.")] = 0,
    threads: Threads = 0,
    json_: Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line.")] = False,
) -> None:
    """Run every analysis on a model: gradients, words, hidden states, attention, composition, intervention."""
    if context.invoked_subcommand is not None:
        return
    from lcs.sdxl.study import EFFORTS  # after the parser: torch and diffusers take seconds

    if effort not in EFFORTS:
        raise LcsError(f"unknown effort {effort!r}; choose from {', '.join(EFFORTS)}")
    _at_least_zero(threads=threads, seed=seed)
    from lcs.evaluation import to_markdown
    from lcs.sdxl.study import plain, run_study, shown
    from lcs.threads import use_threads

    if threads:
        use_threads(threads)
    result = run_study(model, out, effort, offload, seed=seed, device=device)
    for name, rows in result["tables"].items():
        print(f"\n{name}\n{to_markdown(shown(rows))}")
    print(f"\n{out}: {len(result['figures'])} figures as PNG and PDF, sdxl-tables.json, sdxl-numbers.json")
    if json_:
        print(json.dumps(plain(result["numbers"])))


def _at_least_zero(**options: float | None) -> None:
    for name, value in options.items():
        if value is not None and not value >= 0:
            raise LcsError(f"--{name.replace('_', '-')} {value} is not possible; at least 0")


@sdxl_app.command("train")
def train_command(
    out: Annotated[Path, typer.Option(help="Folder of the run; resumed if something is there.")],
    samples: Annotated[int | None, typer.Option(help="Samples to train on; may change until the rate falls.")] = None,
    seed: Annotated[int, typer.Option()] = 0,
    threads: Threads = 0,
    checkpoint_seconds: Annotated[float, typer.Option(help="How much work a kill may lose.")] = 120.0,
    stop_after: Annotated[int | None, typer.Option(help="Leave after this many samples; resume later.")] = None,
    ship: Annotated[bool, typer.Option(help="Measure it and write weights/mini-sdxl.")] = False,
    shipped_vae: Annotated[bool, typer.Option(help="Take the autoencoder of weights/mini-sdxl as it is.")] = False,
    from_shipped: Annotated[bool, typer.Option(help="Go on from all of weights/mini-sdxl, in a new --out.")] = False,
    lr: Annotated[float | None, typer.Option(help="Learning rate, not the recipe's.")] = None,
) -> None:
    """Train mini-sdxl: scenes, autoencoder, text encoders and U-Net; run the same command again to resume."""
    from dataclasses import replace

    _at_least_zero(threads=threads, seed=seed, checkpoint_seconds=checkpoint_seconds)
    for name, value in (("samples", samples), ("stop-after", stop_after)):
        if value is not None and value < 1:
            raise LcsError(f"--{name} {value} is not possible; at least 1")
    from lcs.data.files import read_json
    from lcs.sdxl.build import MiniSettings
    from lcs.sdxl.package import MANIFEST, MINI_ID, load_pipeline
    from lcs.sdxl.training import train_mini
    from lcs.threads import use_threads
    from lcs.weights import WEIGHTS

    if threads:
        use_threads(threads)
    settings = replace(MiniSettings(), seed=seed)
    if samples is not None:
        settings = replace(settings, samples=samples)
    if lr is not None:
        settings = replace(settings, lr=lr)
    shipped = load_pipeline(MINI_ID, "cpu") if shipped_vae or from_shipped else None
    if shipped is not None:
        shipped.vae.register_to_config(_name_or_path="")  # where it came from on this machine is nobody's business
    if from_shipped:
        path, run = WEIGHTS / MINI_ID / MANIFEST, out / "run.json"  # once begun, what is shipped may have changed
        begun = read_json(run)["begun"] if run.exists() else read_json(path)["samples"]
        settings = replace(settings, begun=begun, latent_scale=float(shipped.vae.config.scaling_factor))
    pipe, seen = train_mini(
        out, settings, checkpoint_seconds, stop_after, vae=shipped.vae if shipped else None,
        begin=shipped if from_shipped else None,
    )  # fmt: skip
    print(f"{out}: {seen} samples seen")
    if ship:
        from lcs.sdxl.measure import measure_mini
        from lcs.sdxl.package import export_mini

        folder = export_mini(pipe, settings, seen, measure_mini(pipe))
        print(f"{folder}: written")
