"""The verbs `app` and `bench app`; `register` adds them to the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from lcs.errors import LcsError

Weights = Annotated[Path | None, typer.Option(help="Folder of the weights and their manifest.json.")]


def register(app: typer.Typer, bench_app: typer.Typer) -> None:
    app.command("app")(app_command)
    bench_app.command("app")(bench_command)


def app_command(
    host: Annotated[str | None, typer.Option(help="Address; GRADIO_SERVER_NAME, or 0.0.0.0.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; GRADIO_SERVER_PORT, PORT, or 7860.")] = None,
    weights: Weights = None,
    results: Annotated[Path | None, typer.Option(help="Folder of the artifact's stored results.")] = None,
    scale: Annotated[str, typer.Option(help="Which checkpoints: mini or paper.")] = "mini",
    threads: Annotated[int, typer.Option(help="CPU threads that compute.")] = 1,
) -> None:
    """The demo in a browser: sample, measure locality, compare; works offline with the shipped checkpoints."""
    if port is not None and not 0 < port < 65536:
        raise LcsError(f"--port {port} is not possible; allowed: 1..65535")
    if threads < 1:
        raise LcsError(f"--threads {threads} is not possible; at least 1")
    if weights is not None and not weights.is_dir():
        raise LcsError(f"{weights} is not a folder")
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported
    from lcs.app.page import build, launch, make_site

    launch(build(make_site(weights, scale, results), threads), host, port)


def bench_command(
    clients: Annotated[int, typer.Option(help="Visitors at once in the load test; 0 leaves it out.")] = 30,
    weights: Weights = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line.")] = False,
) -> None:
    """The app through its HTTP API: cold start, first grid, locality map, and memory under load."""
    if not 0 <= clients <= 200:
        raise LcsError(f"--clients {clients} is not possible; allowed: 0..200")
    from lcs.bench.app import bench_app

    result = bench_app(clients, weights)
    if as_json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:>32}: {value:.4g}" if isinstance(value, float) else f"{key:>32}: {value}")
