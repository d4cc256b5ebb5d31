"""What all of `lcs.hub` shares: the client, errors in one line, and downloads that resume.

`huggingface_hub` continues a broken download within one process, but throws the part away when the process
ends. `download` keeps it in a hidden file beside the destination and goes on from there the next time. A
file gets its name only after its sha256 was checked, so nothing half-written is ever loaded.

A token is read by `huggingface_hub` itself, from HF_TOKEN or the login cache. No message of this package
quotes what a server answered or a header, which is where a token could appear.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import httpx2
from huggingface_hub import HfApi, get_hf_file_metadata, get_token, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers

import lcs
from lcs.data.files import atomic_write, sha256_of
from lcs.errors import LcsError

_LIBRARY = {"library_name": "lcs", "library_version": lcs.__version__}
_SIGN_IN = "set HF_TOKEN or run `hf auth login`"
_TRANSIENT = (408, 429, 500, 502, 503, 504)


class HubError(LcsError):
    """Something could not be fetched from the Hub or sent to it."""


def endpoint() -> str | None:
    """HF_ENDPOINT as it is now (the library reads it only once), or None for the public Hub."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def api() -> HfApi:
    return HfApi(endpoint=endpoint(), **_LIBRARY)


def signed_in_api(repo: str) -> HfApi:
    """A client that may write; says so at once if there is no token."""
    if get_token() is None:
        raise HubError(f"cannot push to {repo}: there is no token; {_SIGN_IN}")
    return api()


# ---- errors ---------------------------------------------------------------------------------------


@contextmanager
def hub_errors(action: str) -> Iterator[None]:
    """Turns whatever the client raises inside into one line: 'cannot <action>: <reason>'."""
    try:
        yield
    except LcsError:
        raise
    except (httpx2.HTTPError, OSError, ValueError, RuntimeError) as error:
        raise HubError(f"cannot {action}: {reason(error)}") from None


def reason(error: BaseException) -> str:
    """Why a call failed. Uses types and status codes, never the text a server sent."""
    chain = list(_chain(error))
    if isinstance(error, ValueError) and "metadata in README.md" in str(error):
        return "the Hub refused the metadata of the card"
    for one in chain:
        if isinstance(one, HfHubHTTPError):
            return _http_reason(one)
    for one in chain:
        if isinstance(one, OfflineModeIsEnabled):
            return "offline mode is on (HF_HUB_OFFLINE) and it is not on this machine"
        if isinstance(one, httpx2.LocalProtocolError | UnicodeError):
            return f"the token holds characters that cannot be sent; {_SIGN_IN} again"
        if isinstance(one, httpx2.RemoteProtocolError | httpx2.ReadError) or "Consistency check" in str(one):
            return "the download was cut short; run the same command again to resume"
        if isinstance(one, httpx2.TransportError):
            return "the Hub cannot be reached; check the network, or HF_ENDPOINT if it is set"
        if isinstance(one, HFValidationError):
            return "a repository id is `owner/name` of letters, digits, '-', '_' and '.'"
        if isinstance(one, OSError) and one.errno == errno.ENOSPC:
            return "the disk is full"
    if isinstance(error, LocalEntryNotFoundError):
        return "the Hub cannot be reached and it is not on this machine"
    return f"{type(error).__name__}, not expected here; HF_DEBUG=1 shows the requests"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it was raised from or during."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _http_reason(error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if isinstance(error, GatedRepoError) or status == 403:
        return f"{status}, the token does not allow it (writing needs a write token of the owner)"
    if isinstance(error, RevisionNotFoundError):
        return "404, the repository has no such revision"
    if isinstance(error, EntryNotFoundError):
        return "404, the repository has no such file"
    if isinstance(error, RepositoryNotFoundError):
        return f"{status}, there is no such repository, or it is private: then {_SIGN_IN}"
    if status == 401:
        return f"401, the token is missing or not valid; {_SIGN_IN}"
    if status == 402:
        return "402, the Hub asks for a paid plan for this (a Space that is not static)"
    if status == 404:
        return "404, not found"
    if status == 429:
        return "429, too many requests; wait a few minutes and run the same command again"
    if status >= 500:
        return f"the Hub answered {status}; try again later"
    return f"the Hub answered {status}"


# ---- downloads ------------------------------------------------------------------------------------


def download(
    repo: str,
    filename: str,
    revision: str,
    destination: Path,
    sha256: str,
    size: int | None = None,
    repo_type: str = "model",
) -> str:
    """Makes `destination` the file with this sha256; says how: 'present', 'cached' or 'downloaded'."""
    destination = Path(destination)
    if has_sha256(destination, sha256):
        return "present"
    action = f"download {filename} of {repo} at {revision[:12]}"
    with hub_errors(action):
        cached = try_to_load_from_cache(repo, filename, revision=revision, repo_type=repo_type)
        url = hf_hub_url(repo, filename, revision=revision, repo_type=repo_type, endpoint=endpoint())
    if isinstance(cached, str) and has_sha256(Path(cached), sha256):
        with atomic_write(destination) as temporary:
            shutil.copyfile(cached, temporary)
        return "cached"
    part = destination.with_name(f".{destination.name}.{sha256[:16]}.part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(part) as handle:
            try:
                if has_sha256(destination, sha256):  # another process was faster
                    part.unlink()
                    return "present"
                with hub_errors(action):
                    _check_offer(url, sha256, size, action)
                    _fetch(url, handle, destination.name, sha256, size, action)
                os.replace(part, destination)
            finally:
                if part.exists() and part.stat().st_size == 0:
                    part.unlink()
    except OSError as error:
        raise HubError(f"cannot write {destination}: {error.strerror or type(error).__name__}") from None
    return "downloaded"


def has_sha256(path: Path, sha256: str) -> bool:
    return path.is_file() and sha256_of(path) == sha256


@contextmanager
def _exclusive(part: Path) -> Iterator[BinaryIO]:
    """The partial file, opened for appending and locked: two processes never write one download."""
    while True:
        handle = open(part, "ab")  # noqa: SIM115
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(handle.fileno()), os.stat(part)):
                break
        except FileNotFoundError:
            pass
        handle.close()  # the one who held the lock has finished or removed this file: look again
    with handle:
        yield handle


def _check_offer(url: str, sha256: str, size: int | None, action: str) -> None:
    """Asks what the Hub would send and stops before a byte is spent on another file."""
    try:
        offer = get_hf_file_metadata(url, endpoint=endpoint(), **_LIBRARY)
    except HfHubHTTPError as error:
        if error.response.status_code not in _TRANSIENT:
            raise
        offer = get_hf_file_metadata(url, endpoint=endpoint(), retry_on_errors=True, **_LIBRARY)  # with waits
    large = re.fullmatch(r"[0-9a-f]{64}", offer.etag or "")  # the sha256 of a large file is its etag
    if large and offer.etag != sha256:
        raise HubError(f"cannot {action}: it is another file than the manifest expects (sha256 {offer.etag[:12]}...)")
    if size is not None and offer.size is not None and offer.size != size:
        raise HubError(f"cannot {action}: it has {offer.size} bytes, the manifest says {size}")


def _fetch(url: str, handle: BinaryIO, name: str, sha256: str, size: int | None, action: str) -> None:
    """Fills the partial file and checks it; a damaged one is emptied, and fetched once more if it was a resumed one."""
    while True:
        begun = handle.seek(0, os.SEEK_END)
        if size is not None and begun > size:
            begun = _empty(handle)
        headers = build_hf_headers(**_LIBRARY) | {"Accept-Encoding": "identity"}
        http_get(url, handle, resume_size=begun, headers=headers, expected_size=size, displayed_filename=name)
        handle.flush()
        os.fsync(handle.fileno())
        found = sha256_of(Path(handle.name))
        if found == sha256:
            return
        _empty(handle)
        if not begun:
            raise HubError(
                f"cannot {action}: it arrived corrupted (sha256 {found[:12]}..., expected {sha256[:12]}...); "
                "nothing was kept"
            )


def _empty(handle: BinaryIO) -> int:
    handle.seek(0)
    handle.truncate()
    return 0
