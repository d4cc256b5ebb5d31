"""A local intervention at inference: each region of the image may attend only to its own words.

The paper restores length generalization in CLEVR by making the score local by construction. Here the same idea is
applied to a trained SDXL-class model, without training: in every cross-attention layer, a latent position sees
only the tokens of the phrases that belong to its region. Two ways to say what a region may see:

mask      the whole prompt is encoded once; tokens of other regions' phrases are hidden. Text encoders are causal,
          so later tokens still carry something of the earlier words, and so would end-of-text and padding: those
          are hidden too.
separate  each region's phrase is encoded on its own; a region sees only its own encoding. Nothing of the other
          phrases is left in the tokens.

In both, the pooled embedding, which enters through the time embedding and has no place in the image, is that of the
whole prompt, and self-attention and convolutions still connect the regions: the intervention makes cross-attention
local, not the whole score. It is set through the public `set_attn_processor` and taken back afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import Tensor

from lcs.errors import LcsError
from lcs.sdxl.captions import LEFT, RIGHT
from lcs.sdxl.concepts import MINI
from lcs.sdxl.sampling import Conditioning, Pipe, encode, image_size, initial_noise
from lcs.sdxl.words import token_span

# Centres of the places named in a prompt, as fractions of the width; regions meet halfway between them. In mini-sdxl's
# captions the words change at LEFT and RIGHT, so its regions do; elsewhere the image has three equal parts.
THIRDS = {"left": 1 / 6, "middle": 1 / 2, "right": 5 / 6}
OURS = {"left": 2 * LEFT - 0.5, "middle": 0.5, "right": 2 * RIGHT - 0.5}
MODES = ("separate", "mask")
PLACEHOLDER = "\0"
# What kind of picture it is, at the beginning of a prompt: "a beautiful photograph with ", "an oil painting of ".
LEAD = re.compile(
    r"^(?:an?\s|the\s)?(?:[\w-]+\s)*?(?:photo|photograph|picture|image|painting|drawing|print|render|rendering|scene)"
    r"\s(?:with|of|showing)\s+",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Region:
    """A phrase of the prompt and the columns it may be seen from, e.g. Region("a red cube", 0, 0.5)."""

    phrase: str
    begin: float  # columns, as fractions of the width
    end: float

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end <= 1:
            raise LcsError(f"a region from {self.begin} to {self.end} is not possible; give 0 <= begin < end <= 1")
        if not self.phrase.strip():
            raise LcsError("a region needs words of the prompt")


def regions_from_prompt(prompt: str, centres: dict[str, float] = THIRDS) -> list[Region]:
    """Phrases that end in 'left', 'middle' or 'right', each with the columns nearest to its place.

    Phrases end at 'and', a comma or the end. Words outside them (a style, "a photograph with" at the beginning) belong
    to every region.
    """
    found = []
    for piece in re.split(r",\s*(?:and\s+)?|\s+and\s+", prompt):
        match = re.match(rf"(.*\b({'|'.join(centres)}))\b", LEAD.sub("", piece.strip()), re.IGNORECASE)
        if match:
            found.append((centres[match.group(2).lower()], match.group(1)))
    if len(found) < 2 or len({centre for centre, _ in found}) < len(found):
        raise LcsError(
            f"{prompt!r} does not place at least two things at different places; "
            f"say which is on the left, in the middle or on the right"
        )
    found.sort()
    edges = [0.0, *((a + b) / 2 for (a, _), (b, _) in pairwise(found)), 1.0]
    return [Region(phrase, a, b) for (_, phrase), (a, b) in zip(found, pairwise(edges), strict=True)]


@dataclass(frozen=True)
class RegionPlan:
    """What the sampler needs for B images: conditioning with T' tokens, and who may see which."""

    cond: Conditioning  # B rows
    allowed: Tensor  # bool [B, h, w, T']
    tokens: int  # T of an ordinary prompt: all that the unconditional branch has

    def repeat(self, n: int) -> RegionPlan:
        """Each image n times in succession."""
        return RegionPlan(self.cond.repeat(n), self.allowed.repeat_interleave(n, 0), self.tokens)

    def bias(self, positions: int, batch: int, dtype: torch.dtype, device) -> Tensor:
        """[batch, positions, T']: 0 where attention is allowed, -inf elsewhere; the last B rows are restricted.

        A coarser layer's position may see what any latent position inside it may see.
        """
        side = round(positions**0.5)
        if side * side != positions:
            raise LcsError(f"regions need square feature maps, got {positions} positions")
        grid = self.allowed.permute(0, 3, 1, 2).float()  # [B, T', h, w]
        may = torch.nn.functional.adaptive_max_pool2d(grid, side).flatten(2).transpose(1, 2) > 0.5  # [B, N, T']
        free = torch.arange(may.shape[2]) < self.tokens
        all_rows = torch.cat([free.expand(batch - len(may), positions, -1), may])
        return torch.zeros(all_rows.shape, dtype=dtype).masked_fill(~all_rows, float("-inf")).to(device)


def stack_plans(plans: Sequence[RegionPlan]) -> RegionPlan:
    """Plans of several images as one; shorter ones are filled up with tokens nobody may see."""
    longest = max(p.allowed.shape[-1] for p in plans)
    pad = torch.nn.functional.pad
    states = [pad(p.cond.states, (0, 0, 0, longest - p.cond.states.shape[1])) for p in plans]
    cond = Conditioning(
        torch.cat(states), torch.cat([p.cond.pooled for p in plans]), torch.cat([p.cond.time_ids for p in plans])
    )
    allowed = torch.cat([pad(p.allowed, (0, longest - p.allowed.shape[-1])) for p in plans])
    return RegionPlan(cond, allowed, plans[0].tokens)


class RegionProcessor:
    """Diffusers' own attention with the plan's mask; only for cross-attention layers."""

    def __init__(self, plan: RegionPlan):
        self.plan, self.inner, self.cache = plan, AttnProcessor2_0(), {}

    def __call__(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None, *args, **kwargs
    ) -> Tensor:
        key = (hidden_states.shape[1], len(hidden_states))
        if key not in self.cache:
            positions, batch = key
            self.cache[key] = self.plan.bias(positions, batch, hidden_states.dtype, hidden_states.device)
        return self.inner(attn, hidden_states, encoder_hidden_states, attention_mask=self.cache[key], temb=temb)


@contextmanager
def restricted(pipe: Pipe, plan: RegionPlan) -> Iterator[None]:
    """Inside, the last rows of every U-Net batch, one per image of the plan, attend as it says; restored after."""
    if not bool(plan.allowed.any(-1).all()):
        raise LcsError("some position of the image may attend to no token at all")
    before = pipe.unet.attn_processors
    processors = {
        name: RegionProcessor(plan) if name.endswith("attn2.processor") else processor
        for name, processor in before.items()
    }
    pipe.unet.set_attn_processor(processors)
    try:
        yield
    finally:
        pipe.unet.set_attn_processor(before)


def plan_regions(
    pipe: Pipe, prompt: str, regions: Sequence[Region] | None = None, mode: str = "separate", size: int | None = None
) -> RegionPlan:
    """Regions are the user's, or by default from the prompt's own left, middle and right; several may have one phrase
    each that the prompt repeats, in its order."""
    if regions is not None and not regions:
        raise LcsError("no regions are given; leave them out to take the prompt's left, middle and right")
    if mode not in MODES:
        raise LcsError(f"unknown mode {mode!r}; choose from {', '.join(MODES)}")
    if regions is None:
        regions = regions_from_prompt(prompt, OURS if image_size(pipe) <= MINI.size else THIRDS)
    side = initial_noise(pipe, [0], size).shape[-1]
    whole = encode(pipe, [prompt], size)
    tokens = whole.states.shape[1]
    columns = (torch.arange(side) + 0.5) / side
    inside = torch.stack([(columns >= r.begin) & (columns < r.end) for r in regions])  # [R, w]
    if mode == "separate":
        parts = encode(pipe, [own_prompt(prompt, regions, r) for r in regions], size)
        states = parts.states.flatten(0, 1)[None]  # [1, R T, D]
        allowed = inside.T.repeat_interleave(tokens, 1)  # [w, R T]
        allowed[~inside.any(0)] = True  # columns of no region see everything
        cond = Conditioning(states, whole.pooled, whole.time_ids)
    else:
        spans: list[range] = []
        for region in regions:
            spans.append(token_span(pipe.tokenizer, prompt, region.phrase, spans))
        ids = pipe.tokenizer(prompt, padding="max_length", max_length=tokens, truncation=True).input_ids
        open_to_all = torch.tensor([token != pipe.tokenizer.eos_token_id for token in ids])
        allowed = open_to_all.expand(side, -1).clone()  # [w, T]
        for r, span in enumerate(spans):
            allowed[:, list(span)] = inside[r][:, None]
        allowed[~inside.any(0)] = True
        cond = whole
    return RegionPlan(cond, allowed.expand(1, side, -1, -1), tokens)


def own_prompt(prompt: str, regions: Sequence[Region], own: Region) -> str:
    """The prompt without the other regions' phrases: what is left says a style, or what kind of picture it is."""
    for region in regions:
        if region.phrase not in prompt:
            raise LcsError(f"{prompt!r} does not contain {region.phrase!r}")
        prompt = prompt.replace(region.phrase, PLACEHOLDER if region is own else " ", 1)
    words = [w for w in re.split(r"[\s,]+", prompt) if w and w != "and"]
    return " ".join(words).replace(PLACEHOLDER, own.phrase)
