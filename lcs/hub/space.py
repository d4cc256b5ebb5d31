"""The demo as a Space: exactly the files it needs, with a README whose front matter configures it.

A Gradio Space installs `requirements.txt` and runs `app.py`. A Docker Space builds the `Dockerfile` of this
project instead. Files that an earlier version left in the Space are removed.
"""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import CommitOperationDelete

from lcs.errors import LcsError
from lcs.hub.cards import space_card
from lcs.hub.client import hub_errors, signed_in_api
from lcs.hub.push import commit_files

ROOT = Path(__file__).parents[2]
PYTHON = "3.11"
FILES = ("app.py", "lcs", "weights", "artifact/results", "requirements.txt", "LICENSE", "NOTICE")
DOCKER_FILES = ("Dockerfile", ".dockerignore", "pyproject.toml", "artifact")
SDKS = ("gradio", "docker")
_LEFT_OUT = re.compile(r"(^|/)(\.|__pycache__(/|$))|\.(pyc|tmp|part)$")


def assemble(root: Path = ROOT, sdk: str = "gradio", python_version: str = PYTHON) -> dict[str, bytes | Path]:
    """The files of the Space by their name there."""
    if sdk not in SDKS:
        raise LcsError(f"a Space of sdk {sdk!r} is not possible; choose {' or '.join(SDKS)}")
    if not re.fullmatch(r"3\.\d+(\.\d+)?", python_version):
        raise LcsError(f"--python takes a version such as 3.11 or 3.12.12, got {python_version!r}")
    root = Path(root)
    files: dict[str, bytes | Path] = {}
    for name in FILES + (DOCKER_FILES if sdk == "docker" else ()):
        path = root / name
        if not path.exists():
            raise LcsError(f"{path} is missing: the Space needs it")
        for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
            inside = file.relative_to(root).as_posix()
            if file == path or not _LEFT_OUT.search(inside):
                files[inside] = file
    version = re.search(r"^gradio==(\S+)", (root / "requirements.txt").read_text(), re.MULTILINE)
    if version is None:
        raise LcsError(f"{root / 'requirements.txt'} pins no gradio: the Space needs its version")
    files["README.md"] = space_card(sdk, version[1], python_version).encode()
    return dict(sorted(files.items()))


def size_of(content: bytes | Path) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def listing(files: dict[str, bytes | Path]) -> str:
    """One line per file with its size, and the total."""
    lines = [f"{size_of(content):>12,}  {name}" for name, content in files.items()]
    total = sum(size_of(content) for content in files.values())
    return "\n".join([*lines, f"{total:>12,}  bytes in {len(files)} files"])


def push_space(repo: str, files: dict[str, bytes | Path], sdk: str = "gradio", private: bool = False) -> str:
    """Makes the Space hold exactly these files; returns the commit."""
    client = signed_in_api(repo)
    with hub_errors(f"push to the Space {repo}"):
        client.create_repo(repo, repo_type="space", space_sdk=sdk, private=private or None, exist_ok=True)
        there = client.list_repo_files(repo, repo_type="space")
    stale = [CommitOperationDelete(name) for name in there if name not in files and name != ".gitattributes"]
    return commit_files(repo, files, "The demo", "space", private, operations=stale, space_sdk=sdk)
