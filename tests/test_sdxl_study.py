"""The SDXL study as a whole: full-size structure, prompts, the judge, loading errors, figures, the command."""

import copy
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler
from huggingface_hub.errors import GatedRepoError
from safetensors.torch import load_file, save_file
from sdxl_tiny import tiny_pipeline

from lcs import cli
from lcs.counter.detector import Detections
from lcs.errors import LcsError
from lcs.rule import wilson
from lcs.scenes import world
from lcs.sdxl import composition, concepts, facts, hooks, package, study
from lcs.sdxl.captions import Thing
from lcs.sdxl.judge import judge, paired
from lcs.sdxl.sampling import encode, initial_noise, sample
from lcs.weights import WEIGHTS

SHIPPED = WEIGHTS / package.MINI_ID / package.MANIFEST
needs_mini = pytest.mark.skipif(not SHIPPED.exists(), reason="weights/mini-sdxl is not there")


# ---- full-size SDXL, without its weights ------------------------------------------------------------


def test_every_hook_name_resolves_on_full_size_sdxl():
    unet = facts.meta_unet()
    names = hooks.transformer_blocks(unet)
    assert len(names) == 70
    groups = [hooks.group_of(name) for name in names]
    assert {g: groups.count(g) for g in hooks.GROUPS} == facts.SDXL_BASE_BLOCKS
    assert sum(p.numel() for p in unet.parameters()) == 2_567_463_684  # SDXL base
    assert all(p.device.type == "meta" for p in unet.parameters())
    assert len(set(map(hooks.short_name, names))) == 70
    for name in hooks.cross_attentions(unet):
        attn = unet.get_submodule(name)
        assert attn.to_k.in_features == 2048
        assert attn.to_q.out_features == attn.heads * 64
    for capture in (hooks.capture_states, hooks.capture_attention):
        with pytest.raises(LcsError, match="never fired"), capture(unet) as seen:
            seen.on = True
    assert sum(name.endswith("attn2.processor") for name in unet.attn_processors) == 70


def test_hooks_fire_on_full_size_sdxl():
    """A forward pass on the meta device: shapes only, every block runs."""
    unet = facts.meta_unet()
    with torch.device("meta"), torch.no_grad():
        added = {"text_embeds": torch.empty(1, 1280), "time_ids": torch.empty(1, 6)}
        fired = []
        handles = [
            unet.get_submodule(n).register_forward_hook(lambda m, i, o, n=n: fired.append((n, tuple(o.shape))))
            for n in hooks.transformer_blocks(unet)
        ]
        out = unet(torch.empty(1, 4, 128, 128), torch.empty(1), torch.empty(1, 77, 2048), added_cond_kwargs=added)
        for handle in handles:
            handle.remove()
    assert out.sample.shape == (1, 4, 128, 128)
    assert [n for n, _ in fired] == hooks.transformer_blocks(unet)
    assert {s for _, s in fired} == {(1, 4096, 640), (1, 1024, 1280)}


# ---- prompts ----------------------------------------------------------------------------------------


def test_the_papers_prompts():
    assert len(concepts.SDXL.concepts) == 24
    categories = [c.category for c in concepts.SDXL.concepts]
    assert {categories.count(c) for c in set(categories)} == {6}
    assert len(set(categories)) == 4
    prompts = {c.name: c.prompt for c in concepts.SDXL.concepts}
    assert prompts["dog"] == "A dog, full body, highly detailed photograph."
    assert prompts["hokusai"] == "A woodblock print in the style of Hokusai."
    assert prompts["croissant"] == "Eating a croissant, highly detailed photograph."
    assert [concepts.SDXL.concept(n).token for n in concepts.SDXL.shown] == [
        "dog", "horse", "cat", "gogh", "monet", "sai", "sushi", "croissant"
    ]  # fmt: skip
    assert concepts.SDXL.steps == 50
    assert len(concepts.SDXL.locations) == 4


def test_mini_has_four_categories_of_its_own():
    assert {c.category for c in concepts.MINI.concepts} == {"colours", "shapes", "places", "styles"}
    tokenizer = tiny_pipeline().tokenizer
    for concept in concepts.MINI.concepts:
        assert f"{concept.token}</w>" in tokenizer.convert_ids_to_tokens(tokenizer(concept.prompt).input_ids)
    for c in concepts.MINI.compositions:
        assert all(concepts.MINI.concept(name).token in c.prompt.split() for name in c.concepts)
    for pairs in composition.PAIRS.values():
        for first, second, _ in pairs:
            assert concepts.MINI.concept(first) != concepts.MINI.concept(second)


# ---- judge ------------------------------------------------------------------------------------------


def seen(*objects):
    """Detections from (x, colour, shape)."""
    n = len(objects)
    return Detections(
        centers=np.array([(x, 0.5) for x, _, _ in objects], np.float32).reshape(n, 2), boxes=np.zeros((n, 4)),
        colors=np.array([world.COLOR_NAMES.index(c) for _, c, _ in objects], int),
        shapes=np.array([world.SHAPES.index(s) for _, _, s in objects], int),
        sizes=np.zeros(n, int), materials=np.zeros(n, int), scores=np.ones(n), quality=np.ones(n),
    )  # fmt: skip


def test_judge_needs_both_attributes_on_one_object():
    asked = [Thing(color="red", shape="cube", place="left"), Thing(color="blue", shape="sphere", place="right")]
    good = judge(asked, seen((0.2, "red", "cube"), (0.8, "blue", "sphere")))
    assert good.right
    assert good.strict
    assert good.count
    assert good.placed
    swapped = judge(asked, seen((0.2, "blue", "cube"), (0.8, "red", "sphere")))  # right words, wrong binding
    assert not swapped.right
    assert swapped.colors
    assert swapped.shapes
    crossed = judge(asked, seen((0.8, "red", "cube"), (0.2, "blue", "sphere")))
    assert crossed.right
    assert not crossed.strict
    assert not crossed.placed
    more = judge(asked, seen((0.2, "red", "cube"), (0.5, "gray", "cube"), (0.8, "blue", "sphere")))
    assert more.right
    assert not more.strict
    assert not judge(asked, seen()).right
    twins = [Thing(color="red", shape="cube")] * 2
    assert not judge(twins, seen((0.2, "red", "cube"))).right  # one object cannot serve twice
    assert judge([Thing(color="red")], seen((0.2, "red", "sphere"))).right  # no shape asked


def test_paired_proportions():
    before, after = [True] * 5 + [False] * 5 + [False] * 10, [True] * 3 + [False] * 2 + [True] * 5 + [False] * 10
    result = paired(before, after)
    assert (result.before, result.after, result.gained, result.lost) == (5, 8, 5, 2)
    assert result.difference == pytest.approx(0.15)
    # Half a pair more of each outcome: twice as many pairs, one of each outcome added, have the same shares.
    changes = np.concatenate([np.repeat(np.array(after, float) - np.array(before, float), 2), [1, -1, 0, 0]])
    middle, half = changes.mean(), 1.959964 * changes.std() / np.sqrt(22)
    assert result.interval() == pytest.approx((middle - half, middle + half))
    low, high = paired([True] * 10, [True] * 10).interval()
    assert low < 0 < high
    assert paired([False] * 10, [True] * 10).p_value() == pytest.approx(2 / 2**10)
    with pytest.raises(LcsError, match="pairs"):
        paired([], [])


def test_relation_is_a_rank_correlation():
    def pair(cosine, successes):
        return composition.PairResult("k", "a", "b", "", cosine, successes, 10)

    assert composition.Relation((pair(0.1, 9), pair(0.3, 5), pair(0.9, 0))).spearman()[0] == pytest.approx(-1)
    assert np.isnan(composition.Relation((pair(0.1, 9), pair(0.3, 9))).spearman()[0])
    assert pair(0.1, 9).row()["low"] == pytest.approx(wilson(9, 10)[0])


def test_relation_compares_only_within_kinds():
    """Two kinds that differ in both numbers would correlate by that alone."""

    def pair(kind, cosine, successes):
        return composition.PairResult(kind, "a", "b", "", cosine, successes, 10)

    easy = [pair("easy", c, s) for c, s in ((0.10, 8), (0.12, 9), (0.14, 10))]
    hard = [pair("hard", c, s) for c, s in ((0.70, 0), (0.72, 1), (0.74, 2))]
    rho, p = composition.Relation((*easy, *hard)).spearman()
    assert rho == pytest.approx(1)
    assert p == pytest.approx(2 / 36, abs=0.01)  # of 3! x 3! orders, this one and its reverse are as strong
    assert np.isnan(composition.Relation((easy[0], hard[0])).spearman()[0])


# ---- loading ----------------------------------------------------------------------------------------


def test_any_scheduler_is_replaced_by_euler_on_its_schedule(tmp_path):
    pipe = copy.copy(tiny_pipeline())
    pipe.scheduler = DDIMScheduler.from_config(tiny_pipeline().scheduler.config)
    pipe.save_pretrained(tmp_path, safe_serialization=True)
    loaded = package.load_pipeline(str(tmp_path), "cpu")
    assert type(loaded.scheduler) is EulerDiscreteScheduler
    cond, noise = encode(loaded, ["a red cube"]), initial_noise(loaded, [0])
    expected = sample(tiny_pipeline(), cond, noise, 3, 1.0)
    assert torch.allclose(sample(loaded, cond, noise, 3, 1.0), expected, atol=1e-5)
    assert package.subject_of(str(tmp_path), loaded).size == 32  # a foreign model: the paper's prompts, at its own size
    (tmp_path / "manifest.json").write_text('{"note": "of somebody else"}')
    assert package.subject_of(str(tmp_path), loaded).size == 32
    (tmp_path / "manifest.json").write_text('{"settings": {}, "sha256": {}}')
    assert package.subject_of(str(tmp_path), loaded) is concepts.MINI
    config = json.loads((tmp_path / "scheduler/scheduler_config.json").read_text())
    (tmp_path / "scheduler/scheduler_config.json").write_text(json.dumps(config | {"prediction_type": "sample"}))
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(LcsError, match="predicts 'sample'"):
        package.load_pipeline(str(tmp_path), "cpu")


def test_memory_is_counted_in_what_will_be_loaded(tmp_path):
    for name, dtype in (("unet/a.safetensors", torch.float32), ("unet/a.fp16.safetensors", torch.float16)):
        (tmp_path / "unet").mkdir(exist_ok=True)
        save_file({"w": torch.zeros(10_000, dtype=dtype)}, tmp_path / name)
    save_file({"w": torch.zeros(10_000)}, tmp_path / "everything.safetensors")  # a single-file copy
    for variant in (None, "fp16"):
        assert package._fp16_bytes(tmp_path, variant) == pytest.approx(20_000, rel=0.01)


def test_an_unwritable_folder_is_found_before_anything_is_drawn(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(study, "load_pipeline", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(LcsError, match="cannot write"):
        study.run_study(out=tmp_path / "file" / "x")


def test_what_cannot_be_loaded_says_why(tmp_path):
    with pytest.raises(LcsError, match="train it with"):
        package.load_pipeline("mini-sdxl", "cpu", root=tmp_path)
    with pytest.raises(LcsError, match="neither"):
        package.load_pipeline("no-such-model", "cpu")
    with pytest.raises(LcsError, match="model_index"):
        package.load_pipeline(str(tmp_path), "cpu")
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionXLPipeline"}')
    with pytest.raises(LcsError, match="not a Stable Diffusion XL"):
        package.load_pipeline(str(tmp_path), "cpu")
    with pytest.raises(LcsError, match="no GPU"):
        package.load_pipeline("mini-sdxl", "cpu", offload=True)
    for device in ("foo", "cuda:99"):
        with pytest.raises(LcsError, match=f"device '{device}' cannot be used"):
            package.load_pipeline("mini-sdxl", device)
    (tmp_path / "model_index.json").unlink()
    (tmp_path / "manifest.json").write_text('{"mini/grid-all-m3/late": {}}')  # e.g. the folder of all weights
    with pytest.raises(LcsError, match="model_index"):
        package.load_pipeline(str(tmp_path), "cpu")


def failing_download(monkeypatch, cause):
    def download(*args, **kwargs):
        raise OSError("Cannot load model: a long text") from cause

    monkeypatch.setattr(package.StableDiffusionXLPipeline, "download", download)
    monkeypatch.setattr(package, "_available_memory", lambda: 10**12)


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (GatedRepoError("x", response=httpx2.Response(403, request=httpx2.Request("GET", "http://hub"))), "gated"),
        (httpx2.ConnectError("no route"), "cannot be reached"),
    ],
)
def test_the_hub_s_refusals_are_one_line(monkeypatch, cause, expected):
    failing_download(monkeypatch, cause)
    with pytest.raises(LcsError, match=expected) as error:
        package.load_pipeline(facts.SDXL_BASE, "cpu")
    assert "\n" not in str(error.value)
    assert facts.SDXL_BASE in str(error.value)


def hub_that_answers(status: int, headers: dict):
    """A server on this machine that refuses every request; gives its address."""

    class Refusal(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "21")
            self.end_headers()
            self.wfile.write(b"a text of the server\n" if self.command == "GET" else b"")

        do_HEAD = do_GET

        def log_message(self, *_): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusal)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_address[1]}"


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (401, {"X-Error-Code": "GatedRepo"}, "gated"),
        (401, {"X-Error-Code": "RepoNotFound"}, "someone/private"),
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, "HF_TOKEN"),
        (None, {}, "cannot be reached"),
    ],
)
def test_the_command_s_refusals_are_one_line(tmp_path, status, headers, expected):
    """The whole command against a Hub that refuses, or that is not there: no log of the libraries in between."""
    server, address = hub_that_answers(status or 200, headers)
    if status is None:
        server.shutdown()
        server.server_close()
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_x"}
    command = [sys.executable, "-m", "lcs", "sdxl", "--model", "someone/private", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    server.shutdown()
    assert done.returncode != 0
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert expected in lines[0]
    assert "a text of the server" not in done.stderr


def test_too_little_memory_is_found_before_the_download(monkeypatch):
    monkeypatch.setattr(package, "_available_memory", lambda: 8 * 10**9)
    monkeypatch.setattr(package.StableDiffusionXLPipeline, "download", lambda *a, **k: pytest.fail("downloaded"))
    with pytest.raises(LcsError, match="needs about 18 GB on cpu and 8 GB are free"):
        package.load_pipeline(facts.SDXL_BASE, "cpu")


def test_the_command_ends_with_one_line(monkeypatch, capsys):
    for arguments, expected in ((["--effort", "huge"], "unknown effort"), (["--model", "nope"], "neither")):
        monkeypatch.setattr(sys, "argv", ["lcs", "sdxl", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert len(error) == 1
        assert expected in error[0]


# ---- the study --------------------------------------------------------------------------------------


def test_study_of_a_random_model_draws_every_figure(monkeypatch, tmp_path):
    few = [c for c in concepts.MINI.concepts if c.name in ("red", "blue", "cube", "sphere")]
    subject = replace(
        concepts.MINI, size=32, steps=3, concepts=tuple(few), shown=("red", "cube"),
        compositions=(concepts.Composition(("red", "cube"), "a red cube"),),
    )  # fmt: skip
    monkeypatch.setitem(study.EFFORTS, "tiny", study.Effort(1, 2, 2, 3, 4, 1, 2, False))
    result = study.run_study("tiny", tmp_path, "tiny", progress=False, pipe=tiny_pipeline(), subject=subject)
    for paths in result["figures"].values():
        assert [p.suffix for p in paths] == [".png", ".pdf"]
        assert all(p.stat().st_size > 1000 for p in paths)
    assert set(result["figures"]) == {
        "gradients", "influence", "word-maps", "disentanglement", "concepts", "concept-samples", "attention-maps",
        "attention", "composed-attention", "compositions",
    }  # fmt: skip
    assert [row["space"] for row in result["tables"]["spaces"]] == [
        "down blocks", "mid blocks", "up blocks", "latent", "pixel"
    ]  # fmt: skip
    assert result["numbers"]["transformer_blocks"] == 11
    assert (tmp_path / "sdxl-numbers.json").exists()
    assert not (tmp_path / "parts").exists()  # kept only until all is done
    assert [row["space"] for row in study.shown(result["tables"]["spaces"])][:2] == ["down blocks", "mid blocks"]
    assert study.shown([{"a": 0.12345, "b": [1, 2], "c": None}]) == [{"a": "0.123", "b": "1, 2", "c": "None"}]
    with pytest.raises(LcsError, match="unknown effort"):
        study.run_study(effort="huge")


# ---- the shipped model ------------------------------------------------------------------------------


@needs_mini
def test_shipped_model_is_small_and_loads():
    from diffusers import StableDiffusionXLPipeline

    from lcs.sdxl.generate import generate

    manifest = package.read_json(SHIPPED)
    stored = [p for p in SHIPPED.parent.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in stored) < 40_000_000
    for path in (p for p in stored if p.suffix == ".safetensors"):
        assert {t.dtype for t in load_file(path).values() if t.is_floating_point()} == {torch.float16}, path
    assert manifest["samples"] > 0
    plain = StableDiffusionXLPipeline.from_pretrained(SHIPPED.parent, local_files_only=True)
    assert type(plain.unet).__name__ == "UNet2DConditionModel"
    pipe = package.load_pipeline()
    image = generate(pipe, "a large red metal cube on the left and a small blue rubber sphere on the right", steps=4)
    assert image.shape == (64, 64, 3)


@needs_mini
def test_manifest_states_what_was_measured():
    measured = package.read_json(SHIPPED)["measured"]
    for objects, wanted in ((1, 0.80), (2, 0.50)):
        row = measured[f"{objects} objects"]
        assert row["prompts"] == 200
        assert (row["low"], row["high"]) == pytest.approx(wilson(round(row["right"] * 200), 200))
        assert row["right"] >= wanted
        assert row["strict"] <= row["right"]


@needs_mini
@pytest.mark.slow
def test_shipped_model_obeys_as_its_manifest_says():
    from lcs.counter.detector import load_counter
    from lcs.sdxl.judge import measure_obedience

    measured = package.read_json(SHIPPED)["measured"]
    pipe, counter = package.load_pipeline(), load_counter()
    for row in (row for key, row in measured.items() if key.endswith("objects")):
        again = measure_obedience(pipe, counter, row["objects"], 200, row["steps"], row["guidance"]).row()
        assert again["right"] == pytest.approx(row["right"], abs=0.03)


@needs_mini
@pytest.mark.slow
def test_quick_study_runs_from_the_command_line(tmp_path):
    command = [sys.executable, "-m", "lcs", "sdxl", "--effort", "quick", "--out", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "sdxl-intervention.png").exists()
