"""The app through its HTTP API, as scripts and abusers see it. One server for all tests."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from app_site import CANARY, call, start
from gradio_client import Client, handle_file

from lcs.app import checks, maps, page, sdxl

REPO = Path(__file__).parents[1]
GOOD = ["grid-all", 3, "0.65,0.65; 0.25,0.65", 0, 2, "dpmpp_2m", 1]  # of /sample
LEAKS = re.compile(r"Traceback|site-packages|/home/|/work|/tmp/|\.py\b|safetensors")


@pytest.fixture(scope="module")
def url():
    return start()


@pytest.fixture(scope="module")
def client(url):
    return Client(url, verbose=False)


# ---- use ------------------------------------------------------------------------------------------


def test_the_endpoints_are_named_and_the_helpers_hidden(client):
    named = client.view_api(return_format="dict", print_info=False)["named_endpoints"]
    assert {"/sample", "/sample_every_k", "/locality", "/compare", "/models"} <= set(named)
    assert set(named) <= {"/sample", "/sample_every_k", "/locality", "/compare", "/models", "/sdxl", "/sdxl_words",
                          "/sdxl_concepts"}  # fmt: skip
    assert not client.view_api(return_format="dict", print_info=False)["unnamed_endpoints"]


def test_models_lists_what_is_shipped(client):
    assert "grid-single-local-m3" in client.predict(api_name="/models")


def test_sampling_twice_gives_the_same_with_files_and_numbers(client):
    first = client.predict(*GOOD, api_name="/sample")
    again = client.predict(*GOOD, api_name="/sample")
    cards, said, data, png, numbers = first
    assert "asked <b>2</b>, drawn" in cards
    assert "never saw more" not in said  # two is in the training range
    assert Path(png).read_bytes()[:4] == b"\x89PNG"
    stored = json.loads(Path(numbers).read_text())
    assert stored == data
    assert (stored["run"], stored["steps"], stored["samples"][0]["seed"]) == ("grid-all-m3", 2, 0)
    assert again[2]["samples"] == data["samples"]
    assert again[0] == cards


def test_every_k_in_one_call(client):
    data = client.predict("color", 3, 0, 1, "heun", api_name="/sample_every_k")[2]
    assert [row["asked"] for row in data["samples"]] == list(range(9))


def test_locality_of_two_models(client):
    shown, _, data, png, _ = client.predict(
        "grid-all-m3", "grid-single-m3", "0.65,0.65; 0.25,0.65", 0.65, 0.65, 0, api_name="/locality"
    )
    assert shown.count('class="panel"') == 2
    assert len(data["traces"][0]["sigmas"]) == maps.LEVELS
    assert Path(png).stat().st_size > 1000


def test_an_unknown_second_model_or_a_mixture_of_kinds_is_refused(url):
    for values in (["grid-all-m3", "nope", "", 0.5, 0.5, 0], ["grid-all-m3", "color-m3", "", 0.5, 0.5, 0]):
        assert call(url, "locality", values)[1] == "error"


def test_a_cancelled_job_frees_the_lane(client):
    began = time.process_time()  # of this process, which is also the server
    slow = client.submit("grid-all", 3, "0.65,0.65", 0, 64, "heun", 8, api_name="/sample")
    while not slow.outputs():  # it runs
        time.sleep(0.05)
    slow.cancel()
    assert client.submit(*GOOD, api_name="/sample").result(timeout=300)
    assert len(slow.outputs()) < 64
    assert time.process_time() - began < 8  # all 64 steps would take longer


# ---- abuse ----------------------------------------------------------------------------------------

NASTY = [float("nan"), -1, 10**30, "../../etc/passwd", "<script>alert(1)</script>", None, [], {"a": 1}, True,
         {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}, "x" * 5000]  # fmt: skip


@pytest.mark.parametrize("at", range(len(GOOD)), ids=["experiment", "objects", "conditions", "seed", "steps",
                                                      "solver", "samples"])  # fmt: skip
def test_nasty_values_are_refused_politely(url, at):
    for value in NASTY:
        values = [*GOOD]
        values[at] = value
        status, event, data = call(url, "sample", values)
        said = json.dumps(data)
        assert event in ("error", "refused"), f"{value!r} was accepted: {said[:200]}"
        assert status in (200, 400, 413, 422), status
        assert not LEAKS.search(said), said[:300]
        assert "<script" not in said


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("sample_every_k", ["grid-all", 3, float("nan"), 2, "heun"]),
        ("sample_every_k", ["grid-all", 3, 0, 10**9, "heun"]),
        ("locality", ["grid-all-m3", "none", "0.5,0.5", float("nan"), 0.5, 0]),
        ("locality", ["grid-all-m3", "none", "0.5,0.5", 0.5, 1.0, 0]),
        ("locality", ["../../weights", "none", "", 0.5, 0.5, 0]),
        ("locality", ["grid-all-m3", "none", "0.5,0.5;" * 13, 0.5, 0.5, 0]),
        ("compare", ["grid-all-m3", "0.5,0.5", 0, 1]),
        ("compare", ["grid-single-m3", "<b>", 0, 1]),
        ("compare", ["grid-single-m3", "0.5,0.5", 0, 5]),
        ("compare", [None, None, None, None]),
    ],
)
def test_nasty_values_of_the_other_endpoints(url, name, values):
    _, event, data = call(url, name, values)
    assert event == "error"
    assert not LEAKS.search(json.dumps(data))


def test_too_few_and_too_many_values_do_no_harm(url):
    for values in ([], GOOD[:3], GOOD + [1, 2, 3]):
        _, event, data = call(url, "sample", values)
        assert event == "complete" or not LEAKS.search(json.dumps(data))
    assert call(url, "sample", GOOD)[1] == "complete"


def test_helpers_that_are_called_by_name_check_their_values_too(url):
    """They are hidden from the API's page, but whoever guesses the name can call them."""
    for name in ("clicked", "typed", "counted", "restore", "chosen", "fill", "load_figures", "on_click"):
        for value in (float("nan"), "../../etc/passwd", {"path": "/etc/passwd"}, None):
            _, event, data = call(url, name, [value] * 5)
            assert event in ("error", "refused", "complete"), (name, value)
            assert event == "complete" or not LEAKS.search(json.dumps(data)), (name, value, data)
    assert call(url, "sample", GOOD)[1] == "complete"


def test_no_file_outside_the_cache_is_served(url):
    targets = ["/etc/passwd", REPO / "README.md", REPO / "weights" / "manifest.json", REPO / "lcs" / "cli.py",
               "README.md", "../README.md", REPO / ".git" / "config"]  # fmt: skip
    with httpx.Client() as http:
        for target in targets:
            for route in ("gradio_api/file=", "file=", "gradio_api/file/", "static/"):
                answer = http.get(f"{url}/{route}{target}")
                assert answer.status_code in (400, 403, 404, 405), (route, target, answer.status_code)
                assert "root:" not in answer.text


def test_a_path_of_a_repository_file_is_not_read_as_an_upload(client, url):
    with pytest.raises(Exception, match=r".+"):
        client.predict(handle_file(str(REPO / "README.md")), *GOOD[1:], api_name="/sample")


def test_large_requests_are_refused_before_they_are_read(url):
    big = b"x" * (page.BODY_BYTES + 1)
    assert httpx.post(f"{url}/gradio_api/call/sample", content=big).status_code == 413
    assert httpx.post(f"{url}/gradio_api/upload", files={"files": ("a.bin", big)}).status_code == 413

    def chunks(count: int):
        for _ in range(count):
            yield b"x" * 10_000

    assert httpx.post(f"{url}/gradio_api/call/sample", content=chunks(30)).status_code in (400, 413)
    small, as_json = iter([json.dumps({"data": GOOD}).encode()]), {"content-type": "application/json"}  # as a proxy may
    assert httpx.post(f"{url}/gradio_api/call/sample", content=small, headers=as_json).status_code == 200


def test_the_queue_cannot_be_skipped(url):
    answer = httpx.post(f"{url}/gradio_api/run/sample", json={"data": GOOD})
    assert answer.status_code == 404


def test_no_token_and_no_local_path_is_shown(url):
    with httpx.Client() as http:
        shown = [
            http.get(f"{url}{path}").text for path in ("/", "/config", "/gradio_api/info", "/gradio_api/openapi.json")
        ]
    shown.append(json.dumps(call(url, "sample", [CANARY] * 7)[2]))
    assert all(CANARY not in text for text in shown[:4])
    assert all("lcs-app-test-" not in text for text in shown[:1] + shown[2:])


def test_thirty_visitors_at_once_get_an_answer_or_a_refusal(url):
    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(lambda seed: call(url, "sample", [*GOOD[:3], seed, 1, "dpmpp_2m", 1]), range(30)))
    outcomes = [event if status == 200 else status for status, event, _ in answers]
    assert set(outcomes) <= {"complete", 503}
    assert outcomes.count("complete") >= page.QUEUE_SIZE // 2
    assert call(url, "sample", GOOD)[1] == "complete"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("sdxl", ["mini-sdxl", "a red cube", 0, 2, float("nan"), False]),
        ("sdxl", ["mini-sdxl", "x" * 500, 0, 2, 3.0, False]),
        ("sdxl", ["mini-sdxl", "", 0, 2, 3.0, False]),
        ("sdxl", ["../../etc", "a red cube", 0, 2, 3.0, False]),
        ("sdxl", ["mini-sdxl", "a red cube", 0, 2, 3.0, "yes"]),
        ("sdxl", ["mini-sdxl", "a red cube", 0, 2, 3.0, True]),  # no left and right: no regions
        ("sdxl_words", ["mini-sdxl", "the", 0, 2, 3.0, 0.5, 0.5]),  # no word that counts
        ("sdxl_words", ["mini-sdxl", "a red cube", 0, 2, 3.0, 2, 0.5]),
        ("sdxl_concepts", ["mini-sdxl", ["red"], 2]),
        ("sdxl_concepts", ["mini-sdxl", ["red", "<b>"], 2]),
        ("sdxl_concepts", ["mini-sdxl", "red", 2]),
    ],
)
def test_nasty_prompts_are_refused(url, client, name, values):
    _, event, data = call(url, name, values)
    assert event == "error"
    assert not LEAKS.search(json.dumps(data))


def test_prompts_are_drawn_explained_and_escaped(client):
    prompt = "a red cube on the left and a <img src=x> sphere on the right"
    shown, _, data, png, _ = client.predict("mini-sdxl", prompt, 0, 2, 3.0, True, api_name="/sdxl")
    assert shown.count("<figure") == 2
    assert data["prompt"] == prompt
    assert Path(png).read_bytes()[:4] == b"\x89PNG"
    words, numbers = client.predict("mini-sdxl", prompt, 0, 2, 3.0, 0.25, 0.5, api_name="/sdxl_words")
    assert "<img" not in words
    assert "cube" in numbers["influence"]["high noise"]
    matrix = client.predict("mini-sdxl", ["red", "blue", "cube"], 2, api_name="/sdxl_concepts")[2]
    assert all(len(layer) == 3 for layer in matrix["layers"].values())


def test_limits_of_the_page_are_those_of_the_checks(client):
    sliders = [c["props"] for c in client.config["components"] if c["type"] == "slider"]
    assert {s["maximum"] for s in sliders if s["label"] == "Steps"} <= {checks.MAX_STEPS, sdxl.MAX_STEPS}
    assert {s["maximum"] for s in sliders if s["label"] == "Samples"} == {checks.MAX_SAMPLES}
