"""What the text encoders know before the U-Net sees them: SDXL's come from CLIP, these from reading captions.

Trained together from the start, words and pictures wait for each other: the U-Net cannot use words that mean nothing
yet, and the words get no meaning from a U-Net that does not use them. So both encoders first learn, from captions
alone, to tell what a caption says. Linear heads, thrown away afterwards, read

* at the last token of each object's phrase (attention is causal: it has seen the whole phrase), from the states
  that the U-Net attends to: the object's shape, colour, size, material and place, or that it is not said;
* from the pooled embedding: all of these for each object in turn, how many objects there are, and the style.

Everything random in step n comes from (seed, n): a resumed run repeats an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPTokenizer

from lcs.scenes import world
from lcs.sdxl.build import Denoiser, MiniSettings
from lcs.sdxl.captions import PLACES, STYLED, STYLES, Thing, all_told, random_caption
from lcs.sdxl.fit import fit

STATE = "text-state.safetensors"
MOST = 2  # objects in a caption, as in the training scenes
NAMES = {"shape": world.SHAPES, "color": world.COLOR_NAMES, "size": world.SIZE_NAMES, "material": world.MATERIALS,
         "place": tuple(PLACES)}  # fmt: skip
CHOICES = [len(names) + 1 for names in NAMES.values()]  # 0: not said


def meaning(thing: Thing | None) -> list[int]:
    """One class per attribute: 0 if it is not said, else 1 + its place in NAMES."""
    said = [None if thing is None else getattr(thing, attribute) for attribute in NAMES]
    pairs = zip(said, NAMES.values(), strict=True)
    return [0 if value is None else 1 + list(names).index(value) for value, names in pairs]


def phrase_ends(tokenizer: CLIPTokenizer, things: Sequence[Thing]) -> list[int]:
    """Position of the last token of each object's phrase in the caption that names them in this order.

    The caption is "phrase and phrase": the start token, then phrases with one token ("and" or a comma) between them.
    """
    lengths = [len(tokenizer.tokenize(thing.words())) for thing in things]
    return [sum(lengths[: i + 1]) + i for i in range(len(lengths))]


class Reader(nn.Module):
    """The heads. Sizes: D states, P pooled."""

    def __init__(self, states: int, pooled: int) -> None:
        super().__init__()
        self.phrase = nn.Linear(states, sum(CHOICES))
        self.whole = nn.Linear(pooled, MOST * sum(CHOICES) + MOST + 1 + len(STYLES) + 1)

    def forward(self, states: Tensor, pooled: Tensor, ends: Tensor, said: Tensor, rest: Tensor) -> Tensor:
        """states [B, T, D], pooled [B, P], ends [B, MOST] (-1: no such object), said [B, MOST, 5] classes,
        rest [B, 2] (number of objects, style) -> mean cross entropy."""
        rows, slots = (ends >= 0).nonzero(as_tuple=True)
        at_phrases = self.phrase(states[rows, ends[rows, slots]]).split(CHOICES, -1)
        loss = sum(F.cross_entropy(logits, said[rows, slots, a]) for a, logits in enumerate(at_phrases))
        of_whole = self.whole(pooled).split([*CHOICES * MOST, MOST + 1, len(STYLES) + 1], -1)
        targets = torch.cat([said.flatten(1), rest], dim=1)  # [B, MOST * 5 + 2]
        return loss + sum(F.cross_entropy(logits, targets[:, a]) for a, logits in enumerate(of_whole))


def reading_batch(tokenizer: CLIPTokenizer, settings: MiniSettings, step: int) -> tuple[Tensor, ...]:
    """Token ids, ends, said and rest of one step, for captions that are not held out."""
    rng = np.random.default_rng([settings.seed, 5, step])
    names = ["", *STYLES]
    captions, ends, said, rest = [], [], [], []
    while len(captions) < settings.text_batch:
        style = int(rng.integers(1, len(names))) if rng.random() < STYLED else 0
        caption, things = random_caption(all_told(int(rng.integers(1, MOST + 1)), rng), names[style], rng)
        captions.append(caption)
        missing = [None] * (MOST - len(things))
        ends.append([*phrase_ends(tokenizer, things), *(-1 for _ in missing)])
        said.append([meaning(thing) for thing in [*things, *missing]])
        rest.append([len(things), style if things else 0])
    ids = tokenizer(captions, padding="max_length", max_length=settings.max_tokens, truncation=True,
                    return_tensors="pt").input_ids  # fmt: skip
    return ids, *(torch.tensor(part) for part in (ends, said, rest))


def train_text(
    model: Denoiser, tokenizer: CLIPTokenizer, settings: MiniSettings, folder: Path, progress: bool = True
) -> None:
    """Teaches both text encoders of `model` to read, in place; goes on from FOLDER/text-state.safetensors."""
    torch.manual_seed(settings.seed)
    reader = Reader(settings.text_width + settings.text_width_2, settings.pooled)
    parts = nn.ModuleDict({"one": model.text_encoder, "two": model.text_encoder_2, "reader": reader}).train()

    def loss_at(step: int, _steps: int) -> Tensor:
        ids, ends, said, rest = reading_batch(tokenizer, settings, step)
        return reader(*model.embed(ids), ends, said, rest)

    steps = -(-settings.text_samples // settings.text_batch)
    fit(parts, loss_at, steps, settings.text_lr, Path(folder) / STATE, "reading", progress=progress)
