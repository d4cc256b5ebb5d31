"""What the README promises: commands that exist, files that are there, and the numbers of the stored results."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from artifact import registry
from lcs.cli import app

REPO = Path(__file__).parents[1]
README = (REPO / "README.md").read_text()
RESULTS = REPO / "artifact" / "results"


def commands() -> list[list[str]]:
    """Arguments of every `lcs` command in blocks and tables; one for each of `bench a|b`."""
    quoted = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.S) + re.findall(r"`(python -m lcs [^`]*)`", README))
    found = [shlex.split(text) for text in re.findall(r"-m lcs ([^\n;#]+)", quoted)]
    return [[*words[:1], which, *words[2:]] for words in found for which in (words[1:2] or [""])[0].split("|")]


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_a_command_has_the_options_it_is_shown_with(arguments):
    command = typer.main.get_command(app)
    name, *rest = arguments
    assert name in command.commands
    command = command.commands[name]
    if rest and rest[0] in getattr(command, "commands", {}):
        command, rest = command.commands[rest[0]], rest[1:]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in rest if word.startswith("--")} <= known


def test_the_table_of_figures_lists_every_step_that_can_be_asked_for():
    listed = set(re.findall(r"artifact --only ([a-z0-9]+)`", README))
    assert listed == {step.name for step in registry.STEPS}


def test_files_and_pictures_it_shows_are_there():
    named = re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r"`((?:weights|artifact|lcs|tests)/[\w./-]+)`", README)
    assert len(named) > 10
    assert [name for name in named if not (REPO / name).exists()] == []


def test_stored_results_are_of_the_shipped_models():
    """Else: `lcs artifact --keep artifact/results`, and its claims in the README."""
    facts = json.loads((RESULTS / "environment.json").read_text())
    shipped = {key: entry["sha256"] for key, entry in json.loads((REPO / "weights/manifest.json").read_text()).items()}
    assert {key for key, sha256 in facts["weights"].items() if shipped.get(key) != sha256} == set()
    assert facts["counter"] == shipped["counter"]
    assert facts["missing"] == []


def test_claims_are_those_of_the_stored_results():
    rows = [line for line in README.splitlines() if re.search(r"\| (came out|partly|not) \|$", line)]
    stored = (RESULTS / "claims.md").read_text().splitlines()
    assert len(rows) >= 20
    assert [row for row in rows if row not in stored] == []
    verdicts = [claim["verdict"] for claim in json.loads((RESULTS / "claims.json").read_text())]
    counts = [f"{verdicts.count(name)} {name}" for name in ("came out", "partly", "not")]
    assert f"Of {len(verdicts)} claims {', '.join(counts)}" in " ".join(README.split())
