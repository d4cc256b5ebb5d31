"""mini-sdxl: captions, tokenizer, training, resuming, and the shipped folder."""

import math
from dataclasses import replace
from itertools import combinations, islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sdxl_tiny import TINY, tiny_pipeline

from lcs.counter.detector import load_counter
from lcs.counter.matching import pairs_within
from lcs.errors import LcsError
from lcs.scenes import world
from lcs.scenes.placement import random_scene
from lcs.scenes.scene import project
from lcs.scenes.table import table_of
from lcs.sdxl import captions, gain, text, views
from lcs.sdxl.autoencoder import psnr
from lcs.sdxl.build import Denoiser, MiniSettings, build_scheduler
from lcs.sdxl.package import check_files, export_mini, load_pipeline
from lcs.sdxl.sampling import decode, encode, initial_noise, sample
from lcs.sdxl.tokenizer import build_tokenizer
from lcs.sdxl.training import learning_rate, loss_weight, noised, timesteps, train_mini


@pytest.fixture(scope="module")
def table():
    return table_of([random_scene(seed, 1 + seed % 2) for seed in range(40)])


# ---- captions ---------------------------------------------------------------------------------------


def test_captions_are_true_of_their_scene_and_never_held_out(table):
    rng = np.random.default_rng(0)
    styles = ["", *captions.STYLES]
    for row in range(len(table)):
        n = int(table.counts[row])
        order = np.argsort(table.locations[row, :n, 0])
        for k in range(10):
            style = styles[k % len(styles)]
            caption, said = captions.random_caption(captions.things_of(table, row), style, rng)
            if not caption:
                continue
            assert caption == captions.compose(said, style)
            assert not captions.held_out(caption)
            if style:
                assert caption.endswith(captions.STYLES[style])
                caption = caption.removesuffix(captions.STYLES[style])
            phrases = caption.split(" and ")
            assert len(phrases) == n
            for phrase, i in zip(phrases, order, strict=True):
                words = set(phrase.split())
                assert words & set(world.COLOR_NAMES) <= {world.COLOR_NAMES[table.colors[row, i]]}
                assert words & set(world.SHAPES) <= {world.SHAPES[table.shapes[row, i]]}
                assert words & set(world.SIZE_NAMES) <= {world.SIZE_NAMES[table.sizes[row, i]]}
                assert words & set(world.MATERIALS) <= {world.MATERIALS[table.materials[row, i]]}
                x = table.locations[row, i, 0]
                assert ("left" in words) <= (x < captions.LEFT)
                assert ("right" in words) <= (x > captions.RIGHT)
                assert ("middle" in words) <= (captions.LEFT <= x <= captions.RIGHT)


def test_a_caption_that_says_everything():
    things = [
        captions.Thing("cube", "red", "large", "metal", "left"),
        captions.Thing("sphere", "blue", "small", "rubber", "right"),
    ]
    text = "a large red metal cube on the left and a small blue rubber sphere on the right"
    assert captions.compose(things) == text
    assert captions.compose(things, "warm") == f"{text} in warm light"
    assert captions.compose([captions.Thing()]) == "an object"


def test_styles_change_what_they_name():
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3)).astype(np.uint8)
    assert (captions.apply_style(images, "") == images).all()
    gray = captions.apply_style(images, "monochrome")
    assert (gray == gray[..., :1]).all()
    assert captions.apply_style(images, "night").mean() < 0.6 * images.mean()
    warm, cool = (captions.apply_style(images, s).astype(int).mean((0, 1, 2)) for s in ("warm", "cool"))
    assert warm[0] - warm[2] > 30
    assert cool[2] - cool[0] > 30
    assert captions.apply_style(images, "fog").std() < 0.6 * images.std()
    with pytest.raises(LcsError, match="unknown style"):
        captions.apply_style(images, "cubism")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_objects_of_a_view_stand_at_spots_of_their_own_and_a_third_of_them_is_small(count):
    scenes = list(islice(views.view_scenes(count, base_seed=0), 400))
    spots = np.array(list(views.SPOTS.values()))
    used = np.zeros(len(spots))
    for scene in scenes:
        points = views.in_view(np.array([o.location for o in scene.objects]))
        away = np.abs(points[:, None] - spots) <= np.array(views.JITTER) + 1e-9  # [object, spot, 2]
        at = away.all(2)
        assert (at.sum(1) == 1).all()
        assert at.sum(0).max() == 1
        used += at.sum(0)
        for a, b in combinations(scene.objects, 2):
            assert math.dist(a.position[:2], b.position[:2]) - a.radius - b.radius > 0.1  # none touch
        for o in scene.objects:
            assert o.position[2] == o.radius
            assert project(scene.camera, o.position) == pytest.approx(o.pixel)
            assert captions.place_of(float(views.in_view(np.array(o.location))[0])) in views.SPOTS
    total = used.sum()
    assert np.abs(used / total - 1 / 3).max() < 4 * (2 / 9 / total) ** 0.5 + 1e-9  # every spot as often
    small = np.mean([o.size == "small" for scene in scenes for o in scene.objects])
    assert abs(small - captions.SMALL_SHARE) < 4 * (2 / 9 / total) ** 0.5


def test_the_counter_finds_in_a_view_what_was_rendered_there():
    images, table = views.held_out_views(60, 64)
    right = counted = 0
    for row, found in enumerate(views.look(load_counter(), images)):
        n = int(table.counts[row])
        asked, drawn = pairs_within(table.locations[row, :n], found.centers, views.ZOOM)  # a cell of the frame
        counted += len(found) == n == len(asked)
        left, top, right_, bottom = found.boxes[drawn].T
        x, y = found.centers[drawn].T
        assert ((left < x) & (x < right_) & (top < y) & (y < bottom)).all()
        same = [getattr(found, of)[drawn] == getattr(table, of)[row, asked] for of in ("colors", "shapes")]
        right += np.logical_and(*same).sum()
    assert counted >= 0.95 * len(images)
    assert right >= 0.93 * table.counts.sum()


@pytest.mark.parametrize("objects", [1, 2, 3])
def test_evaluation_prompts_are_held_out_and_name_colour_and_shape(objects):
    prompts = captions.evaluation_prompts(objects, 200)
    assert prompts == captions.evaluation_prompts(objects, 200)
    assert len({p for p, _ in prompts}) == 200
    for prompt, things in prompts:
        assert captions.held_out(prompt)
        assert len(things) == objects
        assert all(t.color in prompt and t.shape in prompt for t in things)
        assert len({t.place for t in things}) == objects
    with pytest.raises(LcsError, match="only"):
        captions.evaluation_prompts(1, 300)


# ---- tokenizer --------------------------------------------------------------------------------------


def test_every_caption_word_is_one_token_and_others_are_spelled():
    tokenizer = build_tokenizer(32)
    for word in captions.all_words():
        ids = tokenizer(word).input_ids
        assert len(ids) == 3, word
        assert tokenizer.convert_ids_to_tokens(ids)[1] == f"{word}</w>"
    spelled = tokenizer.convert_ids_to_tokens(tokenizer("zebra").input_ids)[1:-1]
    assert "".join(spelled) == "zebra</w>"
    assert tokenizer.unk_token_id not in tokenizer("zebra").input_ids[1:-1]
    full = tokenizer("a red cube", padding="max_length", max_length=32).input_ids
    assert len(full) == 32
    assert full[5:] == [tokenizer.pad_token_id] * 27


# ---- text encoders ----------------------------------------------------------------------------------


def test_phrases_end_where_the_tokenizer_puts_their_last_word():
    tokenizer = build_tokenizer(32)
    things = [captions.Thing("cube", "red", "large", "metal", "left"), captions.Thing(None, "blue")]
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(captions.compose(things, "warm")).input_ids)
    assert [tokens[end] for end in text.phrase_ends(tokenizer, things)] == ["left</w>", "object</w>"]
    three = [captions.Thing("cube"), captions.Thing("sphere"), captions.Thing("cylinder")]
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(captions.compose(three)).input_ids)
    assert [tokens[end] for end in text.phrase_ends(tokenizer, three)] == ["cube</w>", "sphere</w>", "cylinder</w>"]


def test_what_a_caption_says_can_be_read_from_its_words():
    tokenizer = build_tokenizer(32)
    names = [list(n) for n in text.NAMES.values()]
    ids, ends, said, rest = text.reading_batch(tokenizer, replace(TINY, text_batch=64), 0)
    for row in range(64):
        words = tokenizer.decode(ids[row], skip_special_tokens=True).split()
        assert rest[row, 0] == (ends[row] >= 0).sum()
        told = [names[a][c - 1] for slot in said[row].tolist() for a, c in enumerate(slot) if c]
        assert all(word in words for word in told)
        known = [w for w in words if any(w in n for n in names)]
        assert sorted(known) == sorted(told)  # and nothing that is said is left out


def test_text_encoders_learn_to_read(tmp_path):
    settings = replace(TINY, text_width=32, text_width_2=32, pooled=32, text_samples=6_400, text_batch=64, text_lr=5e-3)
    tokenizer = build_tokenizer(settings.max_tokens)
    torch.manual_seed(0)
    model = Denoiser(settings, tokenizer)
    losses = []
    original = text.Reader.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text.Reader, "forward", lambda *a: losses.append(original(*a)) or losses[-1])
        text.train_text(model, tokenizer, settings, tmp_path, progress=False)
    assert len(losses) == 100
    guess = 2 * sum(np.log(c) for c in text.CHOICES)  # about what knowing nothing costs, phrases and whole
    assert float(losses[0]) > guess
    assert float(torch.stack(losses[-10:]).mean()) < 0.6 * float(losses[0])


# ---- training ---------------------------------------------------------------------------------------


def test_noise_and_target_determine_the_image():
    torch.manual_seed(0)
    x, eps = torch.randn(4, 2, 3, 3), torch.randn(4, 2, 3, 3)
    alphas, t = build_scheduler().alphas_cumprod, torch.tensor([0, 300, 700, 999])
    x_t, v = noised(x, t, eps, alphas)
    for i in range(4):
        a, s = alphas[t[i]] ** 0.5, (1 - alphas[t[i]]) ** 0.5
        assert torch.allclose(a * x_t[i] - s * v[i], x[i], atol=1e-5)
        assert torch.allclose(s * x_t[i] + a * v[i], eps[i], atol=1e-5)


def test_a_share_of_the_timesteps_is_at_high_noise():
    u = (np.arange(100_000) + 0.5) / 100_000
    assert np.abs(timesteps(u, 1000, 0.4) - u * 1000 + 0.5).max() < 0.51  # uniform
    t = timesteps(u, 1000, 0.5)
    assert (t.min(), t.max()) == (0, 999)
    assert (t >= 600).mean() == pytest.approx(0.5, abs=1e-4)
    assert t[t >= 600].mean() == pytest.approx(799.5, abs=0.1)  # even within either part
    assert t[t < 600].mean() == pytest.approx(299.5, abs=0.1)


@pytest.mark.parametrize("scale", [0.3, 0.5, 1.0])
def test_the_weighted_loss_is_edm_s(scale):
    """(sigma^2 + b^2) / (sigma b)^2 |x0hat - x0|^2, whatever is predicted."""
    alphas = build_scheduler().alphas_cumprod
    t = torch.tensor([0, 10, 300, 700, 999])
    generator = torch.Generator().manual_seed(0)
    x, eps, guess = (torch.randn(5, 4, 2, 2, generator=generator) for _ in range(3))
    x_t, v = noised(scale * x, t, eps, alphas)
    a, s = (c.sqrt().view(-1, 1, 1, 1) for c in (alphas[t], 1 - alphas[t]))
    error = (a * x_t - s * guess - scale * x).square().mean((1, 2, 3))
    sigma = (s / a).flatten()
    edm = (sigma**2 + scale**2) / (sigma * scale) ** 2 * error
    ours = loss_weight(t, alphas, scale) * (guess - v).square().mean((1, 2, 3))
    assert torch.allclose(ours, edm, rtol=1e-3)


def test_latents_have_the_asked_spread_and_decode_as_before(tmp_path):
    pipe, _ = train_mini(tmp_path, replace(TINY, latent_scale=0.25), progress=False)
    assert pipe.vae.config.scaling_factor == 0.25
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    raw = pipe.vae.encode(images).latent_dist.mean
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std))
    plain = (pipe.vae.decode(raw).sample / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1) * 255
    decoded = decode(pipe, (raw - mean) / std * 0.25)
    assert np.abs(decoded - plain.numpy()).max() < 0.6  # rounding to whole numbers


@pytest.mark.parametrize("follows", [0.0, 0.5, 1.0])
def test_word_gain_is_the_share_of_the_difference_that_is_followed(monkeypatch, follows):
    """A denoiser that draws `follows` of what its caption says and otherwise what it likes."""
    pipe, seen, real = tiny_pipeline(), {}, gain.latents_and_captions
    pipe = SimpleNamespace(vae=pipe.vae, scheduler=build_scheduler())
    statistics = {"latents_mean": [0.1] * 4, "latents_std": [2.0] * 4, "scaling_factor": 0.5, "sample_size": 32}
    pipe.vae = SimpleNamespace(config=SimpleNamespace(**statistics), encode=pipe.vae.encode)

    def remember(pipe, scenes):
        z, captions = real(pipe, scenes)
        seen[tuple(captions)] = z
        return z, captions

    def draw(pipe, x, t, sigma, captions):
        return follows * seen[tuple(captions)] + torch.sin(x)

    monkeypatch.setattr(gain, "latents_and_captions", remember)
    monkeypatch.setattr(gain, "encode", lambda pipe, captions: captions)
    monkeypatch.setattr(gain, "denoised", draw)
    rows = gain.word_gains(pipe, scenes=12)
    assert [row["sigma"] for row in rows] == sorted((row["sigma"] for row in rows), reverse=True)
    assert 27 < rows[0]["sigma"] < 29  # 13.8 over the latents' standard deviation
    for row in rows:
        assert [row[f"{a} {s}"] for a in ("shape", "color") for s in ("large", "small")] == pytest.approx([follows] * 4)
    first, *others = seen
    for said in others:
        changed = [set(a.split()) ^ set(b.split()) for a, b in zip(first, said, strict=True)]
        assert all(len(words - {"a", "an"}) == 2 for words in changed)  # one word for another


def test_learning_rate_rises_stays_and_falls_to_zero():
    s = MiniSettings(samples=1000, batch=10, warmup=100, lr=1.0, decay=0.5)
    assert learning_rate(s, 0) == pytest.approx(0.1)
    assert learning_rate(s, 90) == learning_rate(s, 500) == 1.0
    assert learning_rate(s, 750) == pytest.approx(0.5)
    assert learning_rate(s, 1000) == 0.0


def test_resumed_training_equals_uninterrupted(tmp_path):
    whole, seen = train_mini(tmp_path / "a", TINY, progress=False)
    assert seen == TINY.samples
    train_mini(tmp_path / "b", TINY, progress=False, stop_after=4)
    again, _ = train_mini(tmp_path / "b", TINY, progress=False)
    for part in ("unet", "vae", "text_encoder", "text_encoder_2"):
        a, b = getattr(whole, part).state_dict(), getattr(again, part).state_dict()
        assert all(torch.equal(a[k], b[k]) for k in a), part
    assert not any(p.suffix in (".pt", ".pkl", ".bin") for p in (tmp_path / "b").iterdir())
    with pytest.raises(LcsError, match="other settings"):
        train_mini(tmp_path / "b", replace(TINY, lr=0.5), progress=False)
    image = whole("a red cube", num_inference_steps=2, output_type="np").images
    assert image.shape == (1, 32, 32, 3)
    assert np.isfinite(image).all()


def test_training_can_go_on_from_a_finished_model(tmp_path):
    begin = tiny_pipeline(1)
    settings = replace(TINY, begun=100, samples=4, lr=1e-9)
    again, seen = train_mini(tmp_path, settings, progress=False, vae=begin.vae, begin=begin)
    assert seen == 104
    for part in ("unet", "text_encoder", "text_encoder_2"):
        a, b = getattr(begin, part).state_dict(), getattr(again, part).state_dict()
        assert all(torch.allclose(a[k], b[k], atol=1e-6) for k in a), part
    assert not (tmp_path / "text-state.safetensors").exists()


def test_latents_belong_to_one_encoder_and_a_falling_rate_to_one_length(tmp_path):
    train_mini(tmp_path, TINY, progress=False, stop_after=6)
    with pytest.raises(LcsError, match="made by another autoencoder"):
        train_mini(tmp_path, TINY, progress=False, vae=tiny_pipeline(1).vae)
    for samples in (6, 40):
        with pytest.raises(LcsError, match="go on with --samples 8"):
            train_mini(tmp_path, replace(TINY, samples=samples), progress=False)


def test_training_views_have_the_asked_mix_and_are_rendered_once(tmp_path, monkeypatch):
    settings = replace(TINY, scenes=12)
    images, table = views.training_views(settings, tmp_path, progress=False).fetch(np.arange(12))
    assert images.shape == (12, 32, 32, 3)
    assert table.counts.tolist() == [1, 2] * 6
    monkeypatch.setattr(views, "render", None)  # what is there is not rendered again
    again = views.training_views(settings, tmp_path, progress=False)
    assert (again.fetch(np.arange(12))[0] == images).all()
    plain = np.flatnonzero(again.styles == 0)
    assert (images[plain] == again.shards[0][plain]).all()
    styled = np.flatnonzero(again.styles)
    assert all((images[i] != again.shards[0][i]).any() for i in styled)


def test_psnr_of_a_known_error():
    a = np.full((2, 4, 4, 3), 100, np.uint8)
    assert psnr(a, a + 5) == pytest.approx(10 * np.log10(255**2 / 25))


# ---- the folder -------------------------------------------------------------------------------------


def test_exported_folder_draws_the_same_and_is_guarded(tmp_path):
    torch.manual_seed(0)
    pipe = tiny_pipeline()
    noise = initial_noise(pipe, [0])
    before = decode(pipe, sample(pipe, encode(pipe, ["a red cube"]), noise, 3, 2.0))
    folder = export_mini(pipe, TINY, 8, {"note": 1}, tmp_path)
    loaded = load_pipeline("mini-sdxl", "cpu", root=tmp_path)
    after = decode(loaded, sample(loaded, encode(loaded, ["a red cube"]), noise, 3, 2.0))
    assert np.abs(before.astype(int) - after).max() <= 3  # fp16 weights
    assert loaded.unet.dtype == torch.float32
    foreign = folder / "unet" / "more.bin"
    foreign.write_bytes(b"x")
    with pytest.raises(LcsError, match="not in the manifest"):
        check_files(folder)
    foreign.unlink()
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(LcsError, match="sha256"):
        load_pipeline("mini-sdxl", "cpu", root=tmp_path)
