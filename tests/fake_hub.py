"""The part of the Hugging Face Hub that `lcs.hub` talks to, on 127.0.0.1, so that the real client runs against it.

Two servers, as on the real Hub: one for the API and git files, one (another origin) for large files. Commits are
kept whole; large files are those the Hub's default .gitattributes would track. Tests can make requests fail, be
cut, be damaged or be shortened. Every request is kept in `hub.requests`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_canaryCanaryCanaryCanaryCanaryCanary"
LARGE = (".safetensors", ".png")
TYPES = {"model": "", "dataset": "datasets/", "space": "spaces/"}


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    sent: int = 0  # bytes of the answer's body


@dataclass
class Fault:
    """What happens to the next `times` requests whose 'METHOD path' matches."""

    pattern: str
    times: int
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None  # close the connection after this many bytes of the body
    damage: bool = False  # flip the last byte
    shorten: int = 0  # leave out this many bytes at the end, with a matching Content-Length


class FakeHub:
    def __init__(self, api: str, storage: str):
        self.api, self.storage = api, storage
        self.repos: dict[tuple[str, str], list[tuple[str, dict[str, bytes]]]] = {}  # commits: (oid, files)
        self.private: set[tuple[str, str]] = set()
        self.blobs: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()

    # ---- what tests call ---------------------------------------------------------------------------

    def fault(self, pattern: str, times: int = 1, **how) -> None:
        self.faults.append(Fault(pattern, times, **how))

    def commit(self, repo_type: str, repo: str, files: dict[str, bytes | None]) -> str:
        """A new commit: files replaced, or removed where None."""
        history = self.repos.setdefault((repo_type, repo), [])
        now = dict(history[-1][1]) if history else {}
        for name, content in files.items():
            now.pop(name, None)
            if content is not None:
                now[name] = content
        oid = hashlib.sha1(f"{repo_type}{repo}{len(history)}{sorted(now)}".encode()).hexdigest()
        history.append((oid, now))
        return oid

    def files(self, repo_type: str, repo: str) -> dict[str, bytes]:
        return self.repos[repo_type, repo][-1][1]

    def seen(self, pattern: str) -> list[Request]:
        return [r for r in self.requests if re.search(pattern, f"{r.method} {r.path}")]

    # ---- used by the handlers ----------------------------------------------------------------------

    def take_fault(self, line: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, line):
                    fault.times -= 1
                    return fault
        return None

    def at(self, repo_type: str, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        history = self.repos[repo_type, repo]
        if revision == "main":
            return history[-1] if history else ("0" * 40, {})
        return next((commit for commit in history if commit[0] == revision), None)


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_) -> None:
        pass

    def __getattr__(self, name: str):
        if name in ("do_GET", "do_HEAD", "do_POST", "do_PUT"):
            return self.serve
        raise AttributeError(name)

    def serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self._body()
        self.request_ = Request(self.command, path, {k.lower(): v for k, v in self.headers.items()})
        with self.hub.lock:
            self.hub.requests.append(self.request_)
        self.fault = self.hub.take_fault(f"{self.command} {path}")
        if self.fault is not None and self.fault.status is not None:
            self.error(self.fault.status, "", **self.fault.headers)
            return
        self.answer(path, body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def send(self, status: int, content: bytes = b"", **headers: str) -> None:
        fault = self.fault
        if fault is not None and fault.damage and content:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if fault is not None and fault.shorten:
            content = content[: len(content) - fault.shorten]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and fault.cut_after is not None:
            content = content[: fault.cut_after]
            self.close_connection = True
        self.request_.sent = len(content)  # before the client has it and may look
        self.wfile.write(content)

    def json(self, content, status: int = 200) -> None:
        self.send(status, json.dumps(content).encode(), Content_Type="application/json")

    def error(self, status: int, code: str, **headers: str) -> None:
        """An error as the Hub sends it, by a rude server that repeats the caller's token everywhere it can."""
        rude = f"refused {self.headers.get('Authorization', 'nobody')}"
        code_header = {"X_Error_Code": code} if code else {}
        message = headers.pop("message", rude)
        body = json.dumps({"error": rude}).encode()
        self.send(status, body, X_Error_Message=message, Content_Type="application/json", **code_header, **headers)

    def answer(self, path: str, body: bytes) -> None:
        raise NotImplementedError


class Storage(Handler):
    """Large files by their sha256: what a content delivery network does."""

    def answer(self, path: str, body: bytes) -> None:
        oid = path.rsplit("/", 1)[-1]
        if self.command == "PUT":
            if hashlib.sha256(body).hexdigest() != oid:
                return self.error(400, "")
            self.hub.blobs[oid] = body
            return self.send(200, ETag='"x"')
        content = self.hub.blobs[oid]
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted is None:
            return self.send(200, content)
        start = int(wanted[1])
        return self.send(206, content[start:], Content_Range=f"bytes {start}-{len(content) - 1}/{len(content)}")


class Api(Handler):
    ROUTES = (
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("POST", r"/api/(model|dataset|space)s/(.+)/preupload/([^/]+)", "preupload"),
        ("POST", r"/api/(model|dataset|space)s/(.+)/commit/([^/]+)", "make_commit"),
        ("GET", r"/api/(model|dataset|space)s/(.+)/tree/([^/]+)/?", "tree"),
        ("GET", r"/api/(model|dataset|space)s/(.+)/revision/([^/]+)", "info"),
        ("POST", r"/(?:(dataset|space)s/)?(.+)\.git/info/lfs/objects/batch()", "batch"),
        ("POST", r"/verify/.+", "verify"),
        ("GET|HEAD", r"/(?:(dataset|space)s/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", "resolve"),
    )  # fmt: skip

    def answer(self, path: str, body: bytes) -> None:
        authorization = self.headers.get("Authorization")
        if authorization not in (None, f"Bearer {TOKEN}"):
            return self.error(401, "", message="Invalid credentials in Authorization header")
        if self.command == "POST" and authorization is None:
            return self.error(401, "")
        for methods, pattern, name in self.ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in methods.split("|"):
                return self._dispatch(name, found.groups(), body, authorization is not None)
        return self.error(404, "")

    def _dispatch(self, name: str, groups: tuple, body: bytes, signed_in: bool) -> None:
        if not groups:
            return getattr(self, name)(body)
        key = (groups[0] or "model", groups[1])
        if key not in self.hub.repos or (key in self.hub.private and not signed_in):
            return self.error(404 if signed_in else 401, "RepoNotFound")
        commit = self.hub.at(*key, groups[2] or "main")
        if commit is None:
            return self.error(404, "RevisionNotFound")
        return getattr(self, name)(key, commit, *groups[3:], body=body)

    def create(self, body: bytes) -> None:
        wanted = json.loads(body)
        repo, repo_type = f"{wanted['organization']}/{wanted['name']}", wanted.get("type", "model")
        url = f"{self.hub.api}/{TYPES[repo_type]}{repo}"
        if (repo_type, repo) in self.hub.repos:
            return self.json({"error": "You already created this repo", "url": url}, 409)
        assert repo_type != "space" or wanted["sdk"] in ("gradio", "docker")
        self.hub.commit(repo_type, repo, {".gitattributes": b"*.safetensors filter=lfs\n"})
        if wanted.get("visibility") == "private" or wanted.get("private"):
            self.hub.private.add((repo_type, repo))
        return self.json({"url": url})

    def validate(self, body: bytes) -> None:
        """The rules that matter here: front matter that parses, with a licence and, for a Space, an sdk."""
        wanted = json.loads(body)
        front = re.match(r"---\n(.*?)\n---\n", wanted["content"], re.DOTALL)
        data = yaml.safe_load(front[1]) if front else {}
        needed = {"model": ["license"], "dataset": ["license"], "space": ["sdk", "title"]}[wanted["repoType"]]
        errors = [{"message": f'"{name}" is required'} for name in needed if name not in data]
        return self.json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def preupload(self, key: tuple, commit: tuple, body: bytes) -> None:
        files = []
        for file in json.loads(body)["files"]:
            name = file["path"]
            large, old = name.endswith(LARGE), commit[1].get(name)
            oid = None if old is None else _oid(old, large)
            files.append({"path": name, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid})
        return self.json({"files": files})

    def batch(self, key: tuple, commit: tuple, body: bytes) -> None:
        objects = []
        for wanted in json.loads(body)["objects"]:
            oid = wanted["oid"]
            upload = {
                "upload": {"href": f"{self.hub.storage}/{oid}"},
                "verify": {"href": f"{self.hub.api}/verify/{oid}"},
            }
            objects.append(wanted | ({} if oid in self.hub.blobs else {"actions": upload}))
        return self.json({"transfer": "basic", "objects": objects})

    def verify(self, body: bytes) -> None:
        wanted = json.loads(body)
        whole = len(self.hub.blobs.get(wanted["oid"], b"")) == wanted["size"]
        return self.json({}) if whole else self.error(400, "")

    def make_commit(self, key: tuple, commit: tuple, body: bytes) -> None:
        changes: dict[str, bytes | None] = {}
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                changes[value["path"]] = self.hub.blobs[value["oid"]]
            elif item["key"] == "deletedFile":
                changes[value["path"]] = None
        oid = self.hub.commit(*key, changes)
        return self.json({"commitUrl": f"{self.hub.api}/{key[1]}/commit/{oid}", "commitOid": oid})

    def tree(self, key: tuple, commit: tuple, body: bytes) -> None:
        entries = commit[1].items()
        return self.json([{"type": "file", "path": n, "size": len(c), "oid": _oid(c, False)} for n, c in entries])

    def info(self, key: tuple, commit: tuple, body: bytes) -> None:
        siblings = [{"rfilename": name} for name in commit[1]]
        return self.json({"id": key[1], "sha": commit[0], "siblings": siblings, "private": key in self.hub.private})

    def resolve(self, key: tuple, commit: tuple, name: str, body: bytes) -> None:
        oid, files = commit
        if name not in files:
            return self.error(404, "EntryNotFound", X_Repo_Commit=oid)
        content = files[name]
        if not name.endswith(LARGE):
            return self.send(200, content, X_Repo_Commit=oid, ETag=f'"{_oid(content, False)}"')
        digest = _oid(content, True)
        self.hub.blobs.setdefault(digest, content)
        linked = {"X_Linked_Etag": f'"{digest}"', "X_Linked_Size": str(len(content)), "X_Repo_Commit": oid}
        return self.send(302, Location=f"{self.hub.storage}/{digest}", **linked)


def _oid(content: bytes, large: bool) -> str:
    """sha256 of a large file, git's hash of a small one."""
    if large:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running_hub() -> Iterator[FakeHub]:
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), type(h.__name__, (h,), {})) for h in (Api, Storage)]
    hub = FakeHub(*(f"http://127.0.0.1:{server.server_address[1]}" for server in servers))
    threads = []
    for server in servers:
        server.daemon_threads = True
        server.RequestHandlerClass.hub = hub
        threads.append(threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True))
        threads[-1].start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join(5)
