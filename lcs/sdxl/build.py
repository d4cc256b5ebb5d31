"""The parts of mini-sdxl: the same classes as SDXL's, at a size that one CPU core can train.

What is kept of SDXL: two text encoders whose penultimate states are concatenated, the pooled projection and
six size numbers as added conditioning, a first U-Net level without attention and then several transformer
blocks per attention. What differs: 64x64 pixels in 16x16x4 latents (factor 4 instead of 8), v-prediction
instead of epsilon (it learns faster from few samples), prompts of at most 32 tokens instead of 77.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from lcs.sdxl.tokenizer import build_tokenizer

TIME_IDS = 6  # original height, width, crop top, left, target height, width


@dataclass(frozen=True)
class MiniSettings:
    """Everything that shapes the model and its training; written to the manifest."""

    size: int = 64  # pixels per side
    vae_channels: tuple[int, ...] = (16, 32, 64)
    latent_channels: int = 4
    max_tokens: int = 32
    text_width: int = 64
    text_width_2: int = 64
    text_layers: int = 3  # SDXL conditions on the last but one
    pooled: int = 64
    unet_channels: tuple[int, ...] = (32, 64, 128)
    transformer_layers: tuple[int, ...] = (1, 1, 2)
    head: int = 32  # channels per attention head
    groups: int = 8  # of GroupNorm
    time_embed: int = 8  # features per time id
    # training
    scenes: int = 40_000
    vae_samples: int = 25_600
    vae_batch: int = 16
    vae_lr: float = 2e-3
    decoder_samples: int = 16_000
    decoder_lr: float = 1e-3
    text_samples: int = 60_000  # captions that the text encoders read before the U-Net is trained, see `text`
    text_batch: int = 128
    text_lr: float = 2e-3
    samples: int = 200_000
    batch: int = 32
    lr: float = 1.2e-3
    warmup: int = 2_000  # samples
    latent_scale: float = 0.5  # standard deviation of the latents: the smaller, the more noise the schedule reaches
    high_noise: float = 0.55  # share of the samples at high noise, see `training.timesteps`: first what is where,
    early: int = 64_000  # then, after so many samples,
    high_noise_later: float = 0.2  # how it looks
    decay: float = 0.35  # share of the samples, at the end, over which the rate falls to zero
    ema_std: float = 0.10  # relative width of the weights' average
    seed: int = 0
    begun: int = 0  # samples seen by the weights a run began with, if not at random

    def to_json(self) -> dict:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, data: dict) -> MiniSettings:
        data = {"latent_scale": 1.0, **data}  # earlier versions did not write it
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})

    @property
    def latent_size(self) -> int:
        return self.size // 2 ** (len(self.vae_channels) - 1)


def build_vae(s: MiniSettings) -> AutoencoderKL:
    """Without attention in the middle, so that it can be trained on crops."""
    levels = len(s.vae_channels)
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=s.vae_channels,
        layers_per_block=1,
        latent_channels=s.latent_channels,
        norm_num_groups=s.groups,
        sample_size=s.size,
        mid_block_add_attention=False,
        force_upcast=False,
    )


def build_text_encoders(s: MiniSettings, tokenizer: CLIPTokenizer):
    """SDXL's pair: CLIPTextModel, and CLIPTextModelWithProjection that also gives the pooled embedding."""

    def config(width: int, act: str) -> CLIPTextConfig:
        return CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=4 * width,
            projection_dim=s.pooled,
            num_hidden_layers=s.text_layers,
            num_attention_heads=max(1, width // s.head),
            max_position_embeddings=s.max_tokens,
            hidden_act=act,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )

    return CLIPTextModel(config(s.text_width, "quick_gelu")), CLIPTextModelWithProjection(
        config(s.text_width_2, "gelu")
    )


def build_unet(s: MiniSettings) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=s.latent_size,
        in_channels=s.latent_channels,
        out_channels=s.latent_channels,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=s.unet_channels,
        layers_per_block=1,
        transformer_layers_per_block=list(s.transformer_layers),
        attention_head_dim=[max(1, c // s.head) for c in s.unet_channels],  # diffusers means: number of heads
        cross_attention_dim=s.text_width + s.text_width_2,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=s.time_embed,
        projection_class_embeddings_input_dim=s.pooled + TIME_IDS * s.time_embed,
        norm_num_groups=s.groups,
    )


def build_scheduler() -> EulerDiscreteScheduler:
    """SDXL's noise schedule."""
    return EulerDiscreteScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        timestep_spacing="leading",
        steps_offset=1,
        prediction_type="v_prediction",
        interpolation_type="linear",
    )


class Denoiser(nn.Module):
    """What is trained together: both text encoders and the U-Net."""

    def __init__(self, s: MiniSettings, tokenizer: CLIPTokenizer):
        super().__init__()
        self.text_encoder, self.text_encoder_2 = build_text_encoders(s, tokenizer)
        self.unet = build_unet(s)
        self.size = s.size

    def embed(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [B, T] -> states [B, T, D] and pooled [B, P], as the pipeline's `encode_prompt` makes them."""
        first = self.text_encoder(ids, output_hidden_states=True).hidden_states[-2]
        second = self.text_encoder_2(ids, output_hidden_states=True)
        return torch.cat([first, second.hidden_states[-2]], -1), second.text_embeds

    def forward(self, x: torch.Tensor, t: torch.Tensor, ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """x [B, C, h, w], t [B], ids [B, T], keep [B] (0: zero embeddings, SDXL's unconditional branch)."""
        states, pooled = self.embed(ids)
        sizes = torch.tensor([self.size, self.size, 0, 0, self.size, self.size], dtype=x.dtype, device=x.device)
        added = {"text_embeds": pooled * keep[:, None], "time_ids": sizes.expand(len(x), -1)}
        return self.unet(x, t, states * keep[:, None, None], added_cond_kwargs=added).sample


def build_pipeline(s: MiniSettings) -> StableDiffusionXLPipeline:
    """The whole pipeline with random weights, from torch's current random state."""
    tokenizer = build_tokenizer(s.max_tokens)
    return assemble(s, build_vae(s), Denoiser(s, tokenizer))


def assemble(s: MiniSettings, vae: AutoencoderKL, denoiser: Denoiser) -> StableDiffusionXLPipeline:
    return StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=denoiser.text_encoder,
        text_encoder_2=denoiser.text_encoder_2,
        tokenizer=build_tokenizer(s.max_tokens),
        tokenizer_2=build_tokenizer(s.max_tokens),
        unet=denoiser.unet,
        scheduler=build_scheduler(),
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )
