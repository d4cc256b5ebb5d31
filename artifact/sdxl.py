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
    "intervention": "The local intervention: each region may attend only to its own words. Same prompts and seeds with "
    "and without it.",
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
        context.table(name, shown(rows), f"SDXL study: {name}.")
    return plain(result["numbers"])


STEPS = [
    Step("sdxl", "SDXL: pixel space, feature space, compositions, a local intervention", "v1 Fig 6, 7, 13; v2 Fig 4, 5",
         sdxl, cost=500, alone=True,
         sources=("sdxl/*.py", "bootstrap.py", "locality.py", "render/*.py", "scenes/*.py")),
]  # fmt: skip
