"""Looking inside an SDXL-class pipeline: sampler, hooks, gradients, words, cosines, regions; all on random weights."""

import copy
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from sdxl_tiny import tiny_pipeline

from lcs.errors import LcsError
from lcs.sdxl import hooks, pixel, regions
from lcs.sdxl.concepts import SDXL
from lcs.sdxl.features import cosine_matrix, ratio, within_between
from lcs.sdxl.generate import generate, generate_many
from lcs.sdxl.sampling import Conditioning, decode, denoised, encode, initial_noise, sample
from lcs.sdxl.words import content_words, dominant_words, token_index, token_span, without

PROMPT = "a red cube on the left and a blue sphere on the right"


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline()


def a_step(pipe, prompts=(PROMPT,)):
    """x_t of the first step, its timestep and sigma, and conditioning."""
    seen = []
    cond = encode(pipe, prompts)
    sample(pipe, cond, initial_noise(pipe, range(len(prompts))), 4, 1.0, seen.append, stop_after=2)
    step = seen[-1]
    return step.x, step.timestep, step.sigma, cond


# ---- sampler ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_our_loop_draws_what_the_pipeline_draws(pipe, guidance):
    theirs = pipe(
        PROMPT, num_inference_steps=4, guidance_scale=guidance, output_type="np",
        latents=initial_noise(pipe, [3]).clone(),
    ).images[0]  # fmt: skip
    ours = generate(pipe, PROMPT, 3, 4, guidance)
    assert np.abs(ours.astype(int) - np.round(theirs * 255)).max() <= 1
    assert ours.std() > 1


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_x0_agrees_with_the_scheduler(kind):
    pipe = copy.deepcopy(tiny_pipeline())
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, prediction_type=kind)
    x, t, sigma, cond = a_step(pipe)
    from lcs.sdxl.sampling import output, x0_of

    out = output(pipe, x, t, sigma, cond)
    pipe.scheduler.set_timesteps(4)
    pipe.scheduler.scale_model_input(x, t)
    expected = pipe.scheduler.step(out, t, x).pred_original_sample
    assert torch.allclose(x0_of(pipe, x, sigma, out), expected, atol=1e-4)


def test_images_do_not_depend_on_their_batch(pipe):
    prompts = [PROMPT, "a cube", "a blue object at night"]
    together = generate_many(pipe, prompts, [5, 6, 7], 3, 2.0)
    alone = generate(pipe, "a cube", 6, 3, 2.0)
    assert np.abs(together[1].astype(int) - alone).max() <= 1
    assert (together[0] != together[1]).any()


# ---- hooks ------------------------------------------------------------------------------------------


def hook_count(unet):
    return sum(len(m._forward_hooks) for m in unet.modules())


def test_hidden_states_are_the_blocks_outputs_and_hooks_go_away(pipe):
    x, t, sigma, cond = a_step(pipe)
    name = hooks.transformer_blocks(pipe.unet)[4]
    expected = []
    handle = pipe.unet.get_submodule(name).register_forward_hook(lambda m, i, o: expected.append(o))
    before = hook_count(pipe.unet)
    with hooks.capture_states(pipe.unet) as seen:
        denoised(pipe, x, t, sigma, cond)  # not on: nothing is recorded
        assert not seen.records
        seen.on = True
        denoised(pipe, x, t, sigma, cond)
    handle.remove()
    assert len(seen.records) == 11
    assert torch.equal(seen.records[name][0], expected[1])
    assert hook_count(pipe.unet) == before - 1
    assert seen.bytes == sum(4 * v[0].numel() for v in seen.records.values())


def test_hooks_go_away_after_an_error_and_silence_is_an_error(pipe):
    with pytest.raises(ZeroDivisionError), hooks.capture_states(pipe.unet):
        1 / 0  # noqa: B018
    assert hook_count(pipe.unet) == 0
    with pytest.raises(LcsError, match="never fired"), hooks.capture_states(pipe.unet) as seen:
        seen.on = True
    with pytest.raises(LcsError, match="no layer"), hooks.capture_states(pipe.unet, ["mid_block.nothing"]):
        pass
    assert hook_count(pipe.unet) == 0


def test_captured_memory_is_bounded(pipe):
    x, t, sigma, cond = a_step(pipe)
    with hooks.capture_states(pipe.unet, limit_bytes=2000) as seen:
        seen.on = True
        with pytest.raises(LcsError, match="exceed"):
            denoised(pipe, x, t, sigma, cond)
        seen.limit_bytes = 10**6
        denoised(pipe, x, t, sigma, cond)
    assert hook_count(pipe.unet) == 0


def test_pooled_states_are_block_means():
    states = torch.arange(16.0).reshape(1, 16, 1)
    pooled = hooks.pool_positions(states, 2).flatten().tolist()
    assert pooled == [2.5, 4.5, 10.5, 12.5]
    assert hooks.pool_positions(states, 4) is states


def test_attention_maps_against_a_loop(pipe):
    x, t, sigma, cond = a_step(pipe, (PROMPT, "a cube"))
    name = hooks.cross_attentions(pipe.unet)[-1]
    attn, parts = pipe.unet.get_submodule(name), {}
    handles = [
        getattr(attn, p).register_forward_hook(lambda m, i, o, p=p: parts.__setitem__(p, o)) for p in ("to_q", "to_k")
    ]
    with hooks.capture_attention(pipe.unet, tokens=[2, 5], last=1) as seen:
        seen.on = True
        denoised(pipe, x, t, sigma, cond)
    for handle in handles:
        handle.remove()
    found = seen.records[name][0]
    q, k = parts["to_q"][1].tolist(), parts["to_k"][1].tolist()  # the last row
    width = len(q[0]) // attn.heads
    assert found.shape == (1, len(q), 2)
    for position in (0, 7, len(q) - 1):
        expected = [0.0, 0.0]
        for head in range(attn.heads):
            span = range(head * width, (head + 1) * width)
            scores = [math.exp(sum(q[position][c] * key[c] for c in span) / math.sqrt(width)) for key in k]
            for j, token in enumerate((2, 5)):
                expected[j] += scores[token] / sum(scores) / attn.heads
        assert found[0, position].tolist() == pytest.approx(expected, rel=1e-4)


def test_layers_are_listed_in_running_order(pipe):
    order = []
    names = hooks.transformer_blocks(pipe.unet)
    handles = [pipe.unet.get_submodule(n).register_forward_hook(lambda m, i, o, n=n: order.append(n)) for n in names]
    x, t, sigma, cond = a_step(pipe)
    order.clear()
    denoised(pipe, x, t, sigma, cond)
    for handle in handles:
        handle.remove()
    assert order == names
    assert hooks.short_name("up_blocks.0.attentions.1.transformer_blocks.2.attn2") == "up0.1.2"


# ---- pixel space ------------------------------------------------------------------------------------


def test_gradient_maps_against_the_full_jacobian(pipe):
    x, t, sigma, cond = a_step(pipe)
    cells = [(2, 3), (7, 0)]
    found = pixel.gradient_maps(pipe, x, t, sigma, cond, cells)
    jacobian = torch.autograd.functional.jacobian(lambda z: denoised(pipe, z, t, sigma, cond)[0], x)[:, :, :, 0]
    for i, (row, column) in enumerate(cells):
        expected = sum(jacobian[c, row, column, c].abs() for c in range(x.shape[1]))
        assert torch.allclose(found[0, i], expected, rtol=1e-3, atol=1e-6)
    assert found.min() >= 0
    assert found.max() > 0


def test_gradients_of_large_latents_by_checkpointing_are_the_same(pipe, monkeypatch):
    """Latents of more than 64 positions a side, SDXL's own, are differentiated with less memory."""
    torch.manual_seed(3)
    x, t, sigma, cond = a_step(pipe)
    x = torch.randn(1, x.shape[1], 72, 72)
    cells, used = [(40, 3)], []
    plain_enable = pipe.unet.enable_gradient_checkpointing
    monkeypatch.setattr(pipe.unet, "enable_gradient_checkpointing", lambda: (used.append(True), plain_enable())[1])
    found = pixel.gradient_maps(pipe, x, t, sigma, cond, cells)
    assert used
    assert not pipe.unet.training
    monkeypatch.setattr(pixel, "_little_memory", lambda unet, big: nullcontext())
    assert torch.allclose(found, pixel.gradient_maps(pipe, x, t, sigma, cond, cells), rtol=1e-5, atol=1e-9)
    assert found.max() > 0


@pytest.mark.parametrize("upcast", [True, False])
def test_the_autoencoder_is_decoded_in_fp32_where_it_says_so_and_returns_to_fp16(upcast):
    pipe = copy.deepcopy(tiny_pipeline())
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    pipe.vae.half().float()  # weights that fp16 can hold
    expected = decode(pipe, latents.half().float())
    pipe.vae.half().register_to_config(force_upcast=upcast)
    dtypes = []
    plain = pipe.vae.decode
    pipe.vae.decode = lambda z, **options: (dtypes.append(z.dtype), plain(z, **options))[1]
    found = decode(pipe, latents.half())
    assert dtypes == [torch.float32 if upcast else torch.float16]
    assert pipe.vae.dtype == torch.float16
    difference = np.abs(found.astype(int) - expected.astype(int)).max()
    assert difference == 0 if upcast else difference <= 2


def test_influence_against_single_passes(pipe):
    prompts = [without(PROMPT, w) for w in content_words(PROMPT)]
    x, t, sigma, cond = a_step(pipe)
    x = torch.cat([x, x.flip(3)])
    found = pixel.influence_maps(pipe, x, t, sigma, cond, encode(pipe, prompts), chunk=5)
    assert found.shape == (2, 6, 8, 8)
    with torch.no_grad():
        for b, k in ((0, 0), (1, 3)):
            full = denoised(pipe, x[b : b + 1], t, sigma, cond)[0]
            less = denoised(pipe, x[b : b + 1], t, sigma, encode(pipe, [prompts[k]]))[0]
            assert torch.allclose(found[b, k], (full - less).square().sum(0).sqrt(), atol=1e-5)
    assert found.max() > 0


def test_words_have_no_influence_on_a_model_that_does_not_read():
    deaf = copy.deepcopy(tiny_pipeline())
    with torch.no_grad():
        for name, parameter in deaf.unet.named_parameters():
            if "attn2.to_v" in name or name.startswith("add_embedding.linear_2"):
                parameter.zero_()
    words, values, maps = pixel.word_influence_at(deaf, PROMPT, [(0.2, 0.5)], step=1, steps=3)
    assert words == ["red", "cube", "left", "blue", "sphere", "right"]
    assert maps.max() < 1e-5  # batches of different sizes round differently
    assert values.shape == (6, 1)


def test_word_influence_reads_its_map_at_the_location(pipe):
    words, values, maps = pixel.word_influence_at(pipe, PROMPT, [(0.2, 0.9), (0.99, 0.0)], seed=1, step=2, steps=4)
    assert values[3].tolist() == [maps[3, 7, 1], maps[3, 0, 7]]
    assert len(words) == 6
    with pytest.raises(LcsError, match="step"):
        pixel.word_influence_at(pipe, PROMPT, [(0.2, 0.9)], step=4, steps=4)
    with pytest.raises(LcsError, match="fractions"):
        pixel.word_influence_at(pipe, PROMPT, [(1.2, 0.9)], steps=2)


def test_pixel_study_has_every_part(pipe):
    study = pixel.run_pixel_study(pipe, PROMPT, [(0.2, 0.5), (0.8, 0.5)], range(3), 4, 2.0, batch=2)
    assert study.influence.shape == (3, 4, 6, 2)
    assert study.gradients.shape == (3, 2, 8, 8)
    assert study.images.shape == (3, 32, 32, 3)
    assert (np.diff(study.sigmas) < 0).all()
    again = pixel.run_pixel_study(pipe, PROMPT, [(0.2, 0.5), (0.8, 0.5)], range(3), 4, 2.0, batch=3)
    assert np.allclose(study.influence, again.influence, rtol=1e-3, atol=1e-5)
    assert np.allclose(study.gradients, again.gradients, rtol=1e-3, atol=1e-5)
    assert ((study.squares() > 0) & (study.squares() <= 1)).all()


def test_profile_similarity_tells_local_from_global():
    def study(influence):
        return pixel.PixelStudy(
            "", ("a", "b"), (1,), np.ones(1), (0,), ((0, 0), (0, 1)), np.zeros((1, 2, 2, 3)), np.zeros((1, 2, 2, 2)),
            np.array(influence, float)[None, None], np.zeros((1, 2, 2, 2)),
        )  # fmt: skip

    assert study([[1, 2], [2, 4]]).profile_similarity() == pytest.approx([1.0])  # the same words everywhere
    assert study([[1, 0], [0, 3]]).profile_similarity() == pytest.approx([0.0])  # each location its own word


# ---- words ------------------------------------------------------------------------------------------


def test_words_and_prompts_without_them():
    words = content_words("a red cube, and a red sphere on the left")
    assert [w.label for w in words] == ["red 1", "cube", "red 2", "sphere", "left"]
    text = "a red cube, and a red sphere on the left"
    assert without(text, words[2]) == "a red cube, and a sphere on the left"
    assert without(text, words[1]) == "a red, and a red sphere on the left"


@pytest.mark.parametrize(
    ("influence", "expected"),
    [
        ({"horse": 4.0, "dog": 1.9, "cat": 1.0}, ["horse"]),
        ({"horse": 4.0, "dog": 3.0, "cat": 1.5}, ["horse", "dog"]),
        ({"horse": 4.0, "dog": 3.0, "cat": 2.0}, []),
        ({"horse": 0.0, "dog": 0.0}, []),
    ],
)
def test_dominant_words(influence, expected):
    assert dominant_words(influence) == expected


def test_tokens_are_found(pipe):
    tokenizer = pipe.tokenizer
    assert token_index(tokenizer, PROMPT, "cube") == 3
    assert token_index(tokenizer, PROMPT, None) == 14
    assert token_span(tokenizer, PROMPT, "a blue sphere on the right") == range(8, 14)
    with pytest.raises(LcsError, match="no token"):
        token_index(tokenizer, PROMPT, "green")


# ---- cosines ----------------------------------------------------------------------------------------


def test_cosine_matrix_and_means_against_loops():
    vectors = np.random.default_rng(0).normal(size=(5, 7))
    vectors[4] = 0
    found, categories = cosine_matrix(vectors), ["a", "a", "b", "b", "b"]
    within, between = [], []
    for i in range(5):
        for j in range(5):
            norms = np.sqrt((vectors[i] ** 2).sum() * (vectors[j] ** 2).sum())
            expected = (vectors[i] * vectors[j]).sum() / norms if norms else 0.0
            assert found[i, j] == pytest.approx(expected)
            if i != j:
                (within if categories[i] == categories[j] else between).append(expected)
    assert within_between(found, categories) == pytest.approx((np.mean(within), np.mean(between)))
    assert math.isnan(ratio(0.5, -0.1))
    assert ratio(0.6, 0.2) == pytest.approx(3)
    with pytest.raises(LcsError, match="two categories"):
        within_between(found, ["a"] * 5)


# ---- regions ----------------------------------------------------------------------------------------


def test_regions_are_read_from_the_prompt():
    found = regions.regions_from_prompt(PROMPT)
    assert [(r.phrase, r.begin, r.end) for r in found] == [
        ("a red cube on the left", 0.0, 0.5), ("a blue sphere on the right", 0.5, 1.0)
    ]  # fmt: skip
    three = regions.regions_from_prompt(SDXL.pixel_prompt)
    assert [r.phrase for r in three] == ["a dog on the left", "a horse in the middle", "a cat on the right"]
    assert [regions.own_prompt(SDXL.pixel_prompt, three, r) for r in three] == [
        f"a beautiful photograph with {r.phrase}" for r in three
    ]
    assert three[1].begin == pytest.approx(1 / 3)
    foggy = regions.regions_from_prompt(f"{PROMPT} in fog")
    assert regions.own_prompt(f"{PROMPT} in fog", foggy, foggy[1]) == "a blue sphere on the right in fog"
    named = regions.regions_from_prompt("A left-handed dog on the Left and a cat on the right")
    assert [r.phrase for r in named] == ["A left-handed dog on the Left", "a cat on the right"]
    with pytest.raises(LcsError, match="different places"):
        regions.regions_from_prompt("a cube on the left and a sphere")


@pytest.mark.parametrize(("begin", "end"), [(0.5, 0.5), (0.7, 0.2), (-0.1, 0.5), (0.5, 1.1), (float("nan"), 1.0)])
def test_regions_that_are_not_possible_are_refused(begin, end):
    with pytest.raises(LcsError, match="not possible"):
        regions.Region("a red cube", begin, end)


def test_regions_of_the_user(pipe):
    mine = [regions.Region(r.phrase, r.begin, r.end) for r in regions.regions_from_prompt(PROMPT, regions.OURS)]
    assert np.array_equal(generate(pipe, PROMPT, 1, 3, regions=mine), generate(pipe, PROMPT, 1, 3, regions="separate"))
    narrow = [regions.Region("a red cube on the left", 0, 0.25)]  # what lies outside sees everything
    allowed = regions.plan_regions(pipe, PROMPT, narrow, "mask").allowed[0, 0]  # [w, T]
    span = list(token_span(pipe.tokenizer, PROMPT, narrow[0].phrase))
    assert allowed[:2, span].all()
    assert allowed[2:].all()
    with pytest.raises(LcsError, match="no regions"):
        regions.plan_regions(pipe, PROMPT, [])
    with pytest.raises(LcsError, match="does not contain"):
        regions.plan_regions(pipe, PROMPT, [regions.Region("a green cube", 0, 1)])
    with pytest.raises(LcsError, match="needs words"):
        regions.Region(" ", 0, 1)


def test_a_phrase_that_is_repeated_belongs_to_each_region_once(pipe):
    prompt = "a red cube and a red cube"
    twice = [regions.Region("a red cube", 0, 0.5), regions.Region("a red cube", 0.5, 1)]
    allowed = regions.plan_regions(pipe, prompt, twice, "mask").allowed[0, 0]  # [w, T]
    assert allowed[0, 1:4].all()
    assert not allowed[0, 5:8].any()
    assert not allowed[-1, 1:4].any()
    assert allowed[-1, 5:8].all()
    with pytest.raises(LcsError, match="once more"):
        regions.plan_regions(pipe, "a red cube", twice, "mask")


def test_a_mask_that_hides_nothing_changes_nothing(pipe):
    x, t, sigma, cond = a_step(pipe)
    everything = regions.RegionPlan(cond, torch.ones(1, 8, 8, cond.states.shape[1], dtype=torch.bool), 32)
    with torch.no_grad():
        plain = denoised(pipe, x, t, sigma, cond)
        before = dict(pipe.unet.attn_processors)
        with regions.restricted(pipe, everything):
            assert torch.allclose(denoised(pipe, x, t, sigma, cond), plain, atol=1e-6)
        plan = regions.plan_regions(pipe, PROMPT)
        with regions.restricted(pipe, plan):
            assert not torch.allclose(denoised(pipe, x, t, sigma, plan.cond), plain, atol=1e-4)
        assert pipe.unet.attn_processors == before
        assert torch.equal(denoised(pipe, x, t, sigma, cond), plain)


def layer_output(pipe, plan, states):
    """Output [N, C] of one cross-attention layer at 4x4 positions for fixed queries."""
    attn = pipe.unet.get_submodule(hooks.cross_attentions(pipe.unet)[0])
    queries = torch.randn(1, 16, attn.to_q.in_features, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), regions.restricted(pipe, plan):
        return attn(queries, encoder_hidden_states=states)[0]


@pytest.mark.parametrize("mode", regions.MODES)
def test_a_region_does_not_see_the_other_regions_words(pipe, mode):
    plan = regions.plan_regions(pipe, PROMPT, mode=mode)
    hidden = ~plan.allowed[0, 0, 0]  # tokens that the leftmost column may not see
    assert hidden.any()
    base = layer_output(pipe, plan, plan.cond.states)
    changed = plan.cond.states.clone()
    changed[:, hidden] += torch.randn(changed[:, hidden].shape, generator=torch.Generator().manual_seed(1))
    other = layer_output(pipe, plan, changed)
    left = torch.arange(16) % 4 < 2
    assert torch.equal(base[left], other[left])
    assert not torch.allclose(base[~left], other[~left])


def test_a_separate_region_attends_as_to_its_phrase_alone(pipe):
    plan = regions.plan_regions(pipe, PROMPT, mode="separate")
    alone = encode(pipe, ["a blue sphere on the right"])
    attn = pipe.unet.get_submodule(hooks.cross_attentions(pipe.unet)[0])
    queries = torch.randn(1, 16, attn.to_q.in_features, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = attn(queries, encoder_hidden_states=alone.states)[0]
    right = torch.arange(16) % 4 >= 2
    assert torch.allclose(layer_output(pipe, plan, plan.cond.states)[right], expected[right], atol=1e-5)


def test_only_the_conditional_half_is_restricted_and_plans_stack(pipe):
    a = regions.plan_regions(pipe, PROMPT, mode="separate")
    b = regions.plan_regions(pipe, PROMPT, mode="mask")
    plan = regions.stack_plans([a, b])
    bias = plan.bias(16, 4, torch.float32, "cpu")
    assert bias.shape == (4, 16, 64)
    assert (bias[:2, :, :32] == 0).all()
    assert torch.isinf(bias[:2, :, 32:]).all()  # the unconditional rows have 32 tokens
    assert torch.isinf(bias[3, :, 32:]).all()
    assert (bias[2, 0, :32] == 0).all()
    assert torch.isinf(bias[2, 0, 32:]).all()
    many = generate_many(pipe, [PROMPT] * 2, [1, 2], 2, 2.0, "separate")
    assert np.abs(many[1].astype(int) - generate(pipe, PROMPT, 2, 2, 2.0, "separate")).max() <= 1


def test_processors_return_after_an_error_and_blind_positions_are_refused(pipe):
    before = dict(pipe.unet.attn_processors)
    plan = regions.plan_regions(pipe, PROMPT)
    with pytest.raises(ZeroDivisionError), regions.restricted(pipe, plan):
        1 / 0  # noqa: B018
    assert pipe.unet.attn_processors == before
    blind = regions.RegionPlan(plan.cond, torch.zeros_like(plan.allowed), 32)
    with pytest.raises(LcsError, match="no token"), regions.restricted(pipe, blind):
        pass
    with pytest.raises(LcsError, match="unknown mode"):
        regions.plan_regions(pipe, PROMPT, mode="loud")


def test_conditioning_repeats_rows_in_succession():
    cond = Conditioning(torch.arange(2.0)[:, None, None], torch.zeros(2, 1), torch.zeros(2, 6))
    assert cond.repeat(2).states.flatten().tolist() == [0, 0, 1, 1]
