"""What is known of SDXL base: its U-Net's configuration.

The configuration is that of `stabilityai/stable-diffusion-xl-base-1.0` (unet/config.json). On the meta device it
shows, without weights, that every layer the study names exists: 70 transformer blocks, 24 on the way down, 10 in
the middle and 36 on the way up.
"""

from __future__ import annotations

SDXL_BASE = "stabilityai/stable-diffusion-xl-base-1.0"
SDXL_BASE_BLOCKS = {"down": 24, "mid": 10, "up": 36}

SDXL_BASE_UNET = {
    "act_fn": "silu",
    "addition_embed_type": "text_time",
    "addition_embed_type_num_heads": 64,
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "center_input_sample": False,
    "conv_in_kernel": 3,
    "conv_out_kernel": 3,
    "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "downsample_padding": 1,
    "dual_cross_attention": False,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "in_channels": 4,
    "layers_per_block": 2,
    "mid_block_scale_factor": 1,
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "norm_eps": 1e-05,
    "norm_num_groups": 32,
    "only_cross_attention": False,
    "out_channels": 4,
    "projection_class_embeddings_input_dim": 2816,
    "resnet_time_scale_shift": "default",
    "sample_size": 128,
    "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "use_linear_projection": True,
}


def meta_unet(config: dict | None = None):
    """The U-Net of `config` (SDXL base by default) without memory for its weights."""
    import torch
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        return UNet2DConditionModel.from_config(config or SDXL_BASE_UNET)
