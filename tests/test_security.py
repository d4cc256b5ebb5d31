"""What must never be in the source: code from data, shell strings, loose pins, secrets. And the licences that must."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).parents[1]
SOURCES = sorted([*REPO.glob("*.py"), *(REPO / "lcs").rglob("*.py"), *(REPO / "artifact").rglob("*.py")])
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}\b|\bsk-[A-Za-z0-9]{20,}\b|\bghp_[A-Za-z0-9]{36}\b|BEGIN [A-Z ]*PRIVATE KEY")


def findings(source: str) -> list[str]:
    """Every forbidden thing in a piece of Python, with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"{node.lineno}: imports {n}" for n in names if n.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.Call):
            found += [f"{node.lineno}: {problem}" for problem in _call_problems(node)]
    return found


def _call_problems(call: ast.Call) -> list[str]:
    name = ast.unparse(call.func)
    options = {k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}
    problems = [f"calls {name}"] if name in FORBIDDEN_CALLS else []
    if name in ("torch.load", "load_state_dict_from_url") and options.get("weights_only") is not True:
        problems.append(f"{name} without weights_only=True")
    if options.get("shell") is True:
        problems.append("shell=True")
    if options.get("allow_pickle") is True:
        problems.append("allow_pickle=True")
    if options.get("trust_remote_code") is True:
        problems.append("trust_remote_code=True")
    return problems


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(REPO)))
def test_source_is_free_of_what_runs_data_as_code(path):
    assert findings(path.read_text()) == []


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "torch.load('x', weights_only=False)",
        "eval('1')",
        "exec('x = 1')",
        "subprocess.run('ls', shell=True)",
        "os.system('ls')",
        "np.load('x', allow_pickle=True)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
    ],
)
def test_the_check_sees_what_it_is_for(bad):
    assert findings(bad)


def test_the_check_lets_harmless_code_pass():
    assert findings("model.eval()\ntorch.load('x', weights_only=True)\nre.compile('x')\nsubprocess.run(['ls'])") == []


def test_no_secret_is_in_the_files():
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout: nothing says which files are published")
    for name in filter(None, tracked.stdout.split("\0")):
        path = REPO / name
        if path.is_file() and path.stat().st_size < 1_000_000 and path.suffix not in (".safetensors", ".png"):
            assert not [t for t in TOKEN.findall(path.read_text(errors="replace")) if "canary" not in t], name


def test_every_requirement_is_pinned():
    lines = (REPO / "requirements.txt").read_text().splitlines()
    for line in (line for line in lines if line and not line.startswith("#")):
        assert re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.+]+", line), line


def test_the_image_has_no_root_and_no_secret():
    text = (REPO / "Dockerfile").read_text()
    users = re.findall(r"^USER (\S+)", text, re.MULTILINE)
    assert users == ["1000"]
    assert not re.search(r"^(ARG|ENV).*(TOKEN|PASSWORD|SECRET)", text, re.MULTILINE)
    assert not re.search(r"^ADD ", text, re.MULTILINE)
    ignored = (REPO / ".dockerignore").read_text().splitlines()
    assert next(line for line in ignored if not line.startswith("#")) == "*"  # all is out unless it is named


def test_licences_are_stated():
    assert "Apache License" in (REPO / "LICENSE").read_text()
    notice = (REPO / "NOTICE").read_text()
    for text in (
        "CLEVR",
        "CC BY 4.0",
        "BSD",
        "CreativeML Open RAIL++-M",
        "CIFAR-10",
        "Blender",
        "General Public License",
    ):
        assert text in notice, text
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert "2509.16447" in citation["references"][0]["url"]


@pytest.mark.slow
def test_pinned_packages_have_no_known_vulnerability():
    if shutil.which("pip-audit") is None:
        pytest.skip("pip-audit is not installed; `pip install pip-audit` to check the pinned set")
    command = ["pip-audit", "--requirement", "requirements.txt", "--no-deps", "--disable-pip", "--progress-spinner=off"]
    audit = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    if audit.returncode and "Found" not in audit.stderr:
        pytest.skip("pip-audit could not ask its database: " + (audit.stderr.strip().splitlines() or ["?"])[-1][:200])
    assert audit.returncode == 0, audit.stdout
    if unknown := (audit.stdout + audit.stderr).count("could not be audited"):
        pytest.skip(f"pip-audit's database did not answer for {unknown} packages; nothing was found in the others")
