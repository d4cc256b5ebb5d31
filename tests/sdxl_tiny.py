"""An SDXL-class pipeline so small that a forward pass takes milliseconds, for tests."""

from functools import lru_cache

import torch

from lcs.sdxl.build import MiniSettings, build_pipeline

TINY = MiniSettings(
    size=32, vae_channels=(8, 8, 8), text_width=16, text_width_2=16, text_layers=2, pooled=16,
    unet_channels=(8, 16, 16), transformer_layers=(1, 1, 2), head=8, groups=4, time_embed=4, scenes=8,
    vae_samples=8, vae_batch=4, decoder_samples=4, text_samples=8, text_batch=4, samples=8, batch=2, warmup=2,
)  # fmt: skip


@lru_cache
def _tiny(seed: int):
    torch.manual_seed(seed)
    pipe = build_pipeline(TINY)
    for part in (pipe.unet, pipe.vae, pipe.text_encoder, pipe.text_encoder_2):
        part.eval().requires_grad_(False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tiny_pipeline(seed: int = 0):
    """Random weights; shared between tests, which must not change it."""
    return _tiny(seed)
