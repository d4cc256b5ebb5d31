"""Tab 4: does a text-to-image model compose locally? Placeholder until the study's library is there."""

from __future__ import annotations

import gradio as gr

from lcs.app import draw
from lcs.app.inputs import Linked, Site

TAB = "sdxl"


def build(site: Site) -> Linked | None:
    gr.HTML(
        draw.empty(
            "No text-to-image pipeline is shipped yet",
            "This tab will show which word of a prompt moves which place of the image.",
        )
    )
    return None
