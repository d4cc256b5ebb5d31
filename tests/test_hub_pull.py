"""Pulling from the Hub: the real `huggingface_hub` client against a local server (`fake_hub.py`)."""

import threading
from pathlib import Path

import pytest
import torch
from fake_hub import TOKEN
from hub_site import CHUNK, KEY, REPO, RUN, Impatient, final, part_of
from huggingface_hub import constants, hf_hub_download
from tiny import tiny_run

from lcs import weights
from lcs.data.files import read_json, sha256_of
from lcs.errors import LcsError
from lcs.hub.client import HubError
from lcs.hub.pull import MODEL_FILE, pull, pull_many
from lcs.hub.push import push

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # inside the client


def test_what_was_pushed_can_be_pulled_and_loaded(hub, mine, pinned):
    push(RUN, root=mine)
    (pinned / "manifest.json").write_bytes((mine / "manifest.json").read_bytes())
    assert pull(RUN, root=pinned) == "downloaded"
    ours, theirs = weights.load(RUN, root=mine), weights.load(RUN, root=pinned)
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert not list(pinned.glob(".*"))


def test_the_pinned_commit_is_asked_for_whatever_main_holds(hub, pinned):
    revision = read_json(pinned / "manifest.json")[KEY]["hub"]["revision"]
    hub.commit("model", REPO, {MODEL_FILE: b"a later version"})
    assert pull(RUN, root=pinned) == "downloaded"
    assert {r.path for r in hub.seen("resolve")} == {f"/{REPO}/resolve/{revision}/{MODEL_FILE}"}


def test_another_file_than_the_manifest_says_is_refused_before_the_download(hub, pinned):
    later = hub.commit("model", REPO, {MODEL_FILE: b"a later version"})
    with pytest.raises(HubError, match="another file than the manifest expects"):
        pull(RUN, root=pinned, revision=later)
    assert not hub.seen("GET")
    assert not final(pinned).exists()


def test_a_present_or_cached_file_needs_no_network(hub, pinned, tmp_path, monkeypatch):
    revision = read_json(pinned / "manifest.json")[KEY]["hub"]["revision"]
    hf_hub_download(REPO, MODEL_FILE, revision=revision, endpoint=hub.api)
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert pull(RUN, root=pinned) == "cached"
    assert pull(RUN, root=pinned) == "present"
    assert not hub.requests
    final(pinned).unlink()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(HubError, match=r"offline mode is on \(HF_HUB_OFFLINE\)"):
        pull(RUN, root=pinned)


def test_a_broken_connection_is_continued_at_once(hub, pinned):
    size = read_json(pinned / "manifest.json")[KEY]["bytes"]
    hub.fault("GET /[0-9a-f]{64}$", cut_after=3 * CHUNK)
    assert pull(RUN, root=pinned) == "downloaded"
    first, second = hub.seen("GET /[0-9a-f]{64}$")
    assert first.sent == 3 * CHUNK
    assert second.headers["range"] == f"bytes={3 * CHUNK}-"
    assert second.sent == size - 3 * CHUNK


def test_an_interrupted_download_resumes_in_the_next_process(hub, pinned):
    size = read_json(pinned / "manifest.json")[KEY]["bytes"]
    hub.fault("GET /[0-9a-f]{64}$", cut_after=2 * CHUNK)
    hub.fault("GET /[0-9a-f]{64}$", times=20, cut_after=0)
    with pytest.raises(HubError, match="cut short; run the same command again to resume"):
        pull(RUN, root=pinned)
    assert not final(pinned).exists()
    assert part_of(pinned).stat().st_size == 2 * CHUNK
    with pytest.raises(LcsError, match="missing"):
        weights.load(RUN, root=pinned)
    hub.faults.clear()
    hub.requests.clear()
    assert pull(RUN, root=pinned) == "downloaded"
    (only,) = hub.seen("GET /[0-9a-f]{64}$")
    assert only.headers["range"] == f"bytes={2 * CHUNK}-"
    assert only.sent == size - 2 * CHUNK
    weights.load(RUN, root=pinned)
    assert not list(pinned.glob(".*"))


def test_a_damaged_partial_file_is_thrown_away_and_fetched_again(hub, pinned):
    entry = read_json(pinned / "manifest.json")[KEY]
    part = pinned / f".{entry['file']}.{entry['sha256'][:16]}.part"
    part.write_bytes(b"x" * CHUNK)
    assert pull(RUN, root=pinned) == "downloaded"
    assert sha256_of(final(pinned)) == entry["sha256"]
    part.write_bytes(b"x" * (entry["bytes"] + 1))  # longer than the file can be
    final(pinned).unlink()
    assert pull(RUN, root=pinned) == "downloaded"


@pytest.mark.parametrize(
    ("fault", "message"),
    [({"damage": True}, "arrived corrupted"), ({"shorten": 100}, "cut short")],
    ids=["corrupted", "truncated"],
)
def test_a_corrupted_or_truncated_file_never_gets_its_name(hub, pinned, fault, message):
    hub.fault("GET /[0-9a-f]{64}$", times=20, **fault)
    with pytest.raises(HubError, match=message):
        pull(RUN, root=pinned)
    assert not final(pinned).exists()
    hub.faults.clear()
    assert pull(RUN, root=pinned) == "downloaded"


def test_two_processes_pull_one_file_once(hub, pinned):
    outcomes = []
    threads = [threading.Thread(target=lambda: outcomes.append(pull(RUN, root=pinned))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(outcomes) == ["downloaded"] + ["present"] * 3
    assert len(hub.seen("GET /[0-9a-f]{64}$")) == 1
    assert not list(pinned.glob(".*"))


def test_the_token_does_not_follow_to_the_storage(hub, pinned):
    pull(RUN, root=pinned)
    assert all(r.headers["authorization"] == f"Bearer {TOKEN}" for r in hub.seen("resolve"))
    stored = hub.seen("GET /[0-9a-f]{64}$")
    assert stored
    assert not any("authorization" in r.headers for r in stored)


def test_too_many_requests_are_waited_for(hub, pinned):
    hub.fault("HEAD", times=2, status=429, headers={"Retry-After": "7"})
    hub.fault("GET", times=2, status=429, headers={"Retry-After": "9"})
    assert pull(RUN, root=pinned) == "downloaded"
    assert Impatient.waits == [8.0, 10.0, 10.0]  # the first 429 of a HEAD is asked again at once, then as told


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"status": 401}, "401, the token is missing or not valid"),
        ({"status": 403}, "403, the token does not allow it"),
        ({"status": 404}, "404, not found"),
        ({"status": 429}, "429, too many requests"),
        ({"status": 503}, "the Hub answered 503"),
    ],
)
def test_refusals_are_one_line(hub, pinned, fault, message):
    hub.fault("HEAD|GET", times=99, **fault)
    with pytest.raises(HubError, match=message) as caught:
        pull(RUN, root=pinned)
    assert "\n" not in str(caught.value)
    assert TOKEN not in str(caught.value)
    assert not list(pinned.glob(".*"))


def test_what_does_not_exist(hub, pinned, monkeypatch):
    with pytest.raises(HubError, match="no such repository"):
        pull(RUN, root=pinned, repo="nobody/nothing")
    with pytest.raises(HubError, match="no such revision"):
        pull(RUN, root=pinned, revision="f" * 40)
    empty = hub.commit("model", REPO, {MODEL_FILE: None})
    with pytest.raises(HubError, match="no such file"):
        pull(RUN, root=pinned, revision=empty)
    with pytest.raises(HubError, match="owner/name"):
        pull(RUN, root=pinned, repo="a/b/c")
    with pytest.raises(HubError, match=r"is not in .*manifest\.json"):
        pull(tiny_run("color"), root=pinned)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(HubError, match="401"):
        pull(RUN, root=pinned)


def test_a_folder_that_cannot_be_written(hub, pinned, monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("lcs.hub.client.open", refuse, raising=False)
    with pytest.raises(HubError, match=r"cannot write .*: Read-only file system"):
        pull(RUN, root=pinned)


def test_an_unreachable_hub(hub, pinned, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="the Hub cannot be reached"):
        pull(RUN, root=pinned)


def test_a_private_repository_needs_the_token(hub, pinned, monkeypatch):
    hub.private.add(("model", REPO))
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="401, there is no such repository, or it is private: then set HF_TOKEN"):
        pull(RUN, root=pinned)
    (Path(constants.HF_TOKEN_PATH)).write_text(TOKEN)  # as `hf auth login` leaves it
    assert pull(RUN, root=pinned) == "downloaded"


def test_what_cannot_be_pulled_is_trained_or_reported(hub, pinned, mine):
    other = tiny_run("color")
    said, trained_runs = [], []
    pull_many([RUN, other], root=pinned, or_train=trained_runs.append, say=said.append)
    assert trained_runs == [other]
    assert said[0] == f"{RUN.name}: downloaded"
    assert said[-1] == f"{other.name}: trained"
    with pytest.raises(HubError, match="color-m2/late is not in"):
        pull_many([RUN, other], root=pinned, say=said.append)
    with pytest.raises(HubError, match="2 of 3 could not be pulled"):
        pull_many([other, RUN, other], root=pinned, say=said.append)


def test_an_unpublished_entry_is_present_or_says_so(hub, mine):
    assert pull(RUN, root=mine) == "present"
    final(mine).unlink()
    with pytest.raises(HubError, match="has not been published"):
        pull(RUN, root=mine)
    assert not hub.requests
