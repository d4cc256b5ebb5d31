"""The SDXL study, on the embedded mini-sdxl by default: pixel space, feature space, compositions, the intervention."""

from __future__ import annotations

from artifact.context import Context
from artifact.steps import Step
from lcs.errors import LcsError
from lcs.sdxl.package import load_pipeline
from lcs.sdxl.study import plain, run_study, shown

CAPTIONS = {
    "gradients": "Latent-space gradients at chosen locations, at high, middle and low noise.",
    "influence": "Influence of each word on each location while the noise falls: the prompt with the word removed "
    "against the whole prompt.",
    "word-maps": "Where in the image each word matters.",
    "disentanglement": "Hidden states of every transformer block: cosines between mean differences of concepts within "
    "and between categories, by block group, in the latents and in the image.",
    "concepts": "Cosine matrices of all concepts, by block group and in the output spaces.",
    "concept-samples": "What the model draws for each concept.",
    "attention-maps": "Cross-attention maps of each concept's token, layer by layer, early in sampling.",
    "attention": "Cross-attention maps of the most relevant token, by layer: cosines between concepts.",
    "composed-attention": "A token inside a composed prompt against the same concept alone.",
    "compositions": "Composed prompts.",
    "samples": "Held-out prompts with one and two objects, and what the counter says of them.",
    "relation": "Does composition succeed more often where concepts are disentangled?",
    "intervention": "The local intervention: each third of the image may attend only to its own object's words. Same "
    "prompts and seeds with and without it. Separate: each object's phrase is encoded on its own; mask: the whole "
    "prompt is encoded, and the other objects' tokens are hidden.",
}
TABLES = {
    "locality": "Per location and noise level: share of the image that holds 90% of the latent gradient, and the words "
    "whose influence there is at least twice the next one's.",
    "spaces": "Mean cosine of concepts within a category and between categories, their difference (gap) and ratio, in "
    "groups of blocks, in the latents and in the image.",
    "layers": "The same difference and ratio for every transformer block, in running order.",
    "composed-attention": "The attention map of a token in a composed prompt: cosine with its own concept alone (own), "
    "mean cosine with the other concepts (others), and the own one's rank among all of them.",
    "obedience": "Held-out prompts drawn right: colour and shape of every object (right), either alone, nothing else "
    "in the image and in order (strict), as many objects as asked (count), at the asked place (placed).",
    "relation": "Pairs of concepts: cosine in the middle block, and how often the composed prompt is drawn right.",
    "intervention": "Prompts drawn right before and with the intervention; gained and lost: right only with and only "
    "without it; p of an exact McNemar test.",
}


def sdxl(context: Context) -> dict:
    settings = context.settings
    model = settings.sdxl_model
    pipe = load_pipeline(model, settings.device, settings.sdxl_offload)  # raises if it is not shipped or damaged
    result = run_study(
        model, None, context.effort.name, progress=context.progress, pipe=pipe, seed=settings.seed, parts=context.parts
    )
    for name, figure in result["figures"].items():
        if name not in CAPTIONS:
            raise LcsError(f"the SDXL study drew {name!r}, which has no caption")
        context.figure(name, figure, CAPTIONS[name])
    for name, rows in result["tables"].items():
        context.table(name, shown(rows), TABLES[name])
    return plain(result["numbers"])


STEPS = [
    Step("sdxl", "SDXL: pixel space, feature space, compositions, a local intervention", "v1 Fig 6, 7, 13; v2 Fig 4, 5",
         sdxl, cost=500, makes=(*CAPTIONS, *TABLES), also=("fig6", "fig7", "fig13"),
         sources=("sdxl/*.py", "bootstrap.py", "locality.py", "render/*.py", "scenes/*.py")),
]  # fmt: skip
