"""Looking inside the U-Net: forward hooks in a context manager, and nothing else.

    with capture_states(pipe.unet, reduce=...) as seen:
        seen.on = True      # only what runs while it is on is recorded
        ...
    seen.records["mid_block.attentions.0.transformer_blocks.0"]

Each recorded tensor is reduced and moved to the CPU inside the hook, and the sum of all records is bounded by
`limit_bytes`. Leaving the block removes every hook, also after an error. A hook that never fired while recording
was on is an error: a study of a layer that never ran would be a study of nothing.

Attention maps are computed from the outputs of the processor's own query and key projections,
softmax(q k^T * scale) per head, so that they do not depend on which attention kernel is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor, nn

from lcs.errors import LcsError

LIMIT_BYTES = 2 * 2**30
GROUPS = ("down", "mid", "up")


def transformer_blocks(unet: nn.Module) -> list[str]:
    """Names of every BasicTransformerBlock, in the order in which they run."""
    names = [name for name, module in unet.named_modules() if isinstance(module, BasicTransformerBlock)]
    return sorted(names, key=lambda name: GROUPS.index(group_of(name)))  # named_modules lists up before mid


def cross_attentions(unet: nn.Module) -> list[str]:
    """Names of every cross-attention layer, in the order in which they run."""
    return [f"{name}.attn2" for name in transformer_blocks(unet)]


def group_of(name: str) -> str:
    """'down', 'mid' or 'up'."""
    for group in GROUPS:
        if name.startswith(f"{group}_block"):
            return group
    raise LcsError(f"{name!r} is not a layer of a down, mid or up block")


def short_name(name: str) -> str:
    """'up_blocks.0.attentions.1.transformer_blocks.2.attn2' -> 'up0.1.2'."""
    numbers = [part for part in name.split(".") if part.isdigit()]
    return group_of(name) + ".".join(numbers)


@dataclass
class Capture:
    """What hooks have recorded: per layer, one tensor per forward pass while `on`."""

    limit_bytes: int = LIMIT_BYTES
    on: bool = False
    bytes: int = 0
    records: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        value = value.detach().to("cpu", torch.float32).clone()  # a view would keep the whole batch alive
        self.bytes += value.numel() * value.element_size()
        if self.bytes > self.limit_bytes:
            raise LcsError(
                f"the captured activations exceed {self.limit_bytes / 2**20:.0f} MiB at layer {name}; "
                f"choose fewer layers or steps, or a smaller reduction"
            )
        self.records.setdefault(name, []).append(value)

    def take(self) -> dict[str, list[Tensor]]:
        """The records so far; starts anew (the bound holds for what is kept between two calls)."""
        records, self.records, self.bytes = self.records, {}, 0
        return records


@contextmanager
def _hooked(unet: nn.Module, hooks: dict[str, tuple[str, Callable]], limit_bytes: int) -> Iterator[Capture]:
    """Registers hooks {key: (module name, make(capture) -> hook)}; `key`s must all have recorded something."""
    capture, fired, handles = Capture(limit_bytes), set(), []
    try:
        for key, (name, make) in hooks.items():
            try:
                module = unet.get_submodule(name)
            except AttributeError:
                raise LcsError(f"the U-Net has no layer {name!r}") from None
            handles.append(module.register_forward_hook(_watch(make(capture), key, capture, fired)))
        yield capture
    finally:
        for handle in handles:
            handle.remove()
    silent = [key for key in hooks if key not in fired]
    if silent:
        raise LcsError(
            f"{len(silent)} of {len(hooks)} hooks never fired, the first at {silent[0]}; nothing was recorded"
        )


def _watch(hook: Callable, key: str, capture: Capture, fired: set[str]) -> Callable:
    def run(module: nn.Module, inputs, output) -> None:  # returns None: outputs are never changed
        if capture.on:
            fired.add(key)
            hook(module, output)

    return run


# ---- hidden states ----------------------------------------------------------------------------------


def pool_positions(states: Tensor, max_side: int) -> Tensor:
    """[B, N, C] of a square grid -> [B, n, C] averaged over squares so that a side has at most `max_side` positions."""
    side = round(states.shape[1] ** 0.5)
    if side * side != states.shape[1] or side <= max_side:
        return states
    grid = states.transpose(1, 2).reshape(len(states), -1, side, side)
    return torch.nn.functional.adaptive_avg_pool2d(grid, max_side).flatten(2).transpose(1, 2)


def capture_states(
    unet: nn.Module,
    names: Sequence[str] | None = None,
    last: int | None = None,
    max_side: int = 16,
    limit_bytes: int = LIMIT_BYTES,
):
    """Post-FFN outputs of transformer blocks, [B, n, C] per pass, of the last `last` rows (the conditional half).

    One SDXL block has 1024 x 1280 or 4096 x 640 numbers; pooled to 16 x 16 positions at most 1.3 MB, 85 MB for
    all 70 blocks and one image.
    """

    def make(name: str):
        def bind(capture: Capture):
            def hook(module: nn.Module, output) -> None:
                states = output[0] if isinstance(output, tuple) else output
                states = states if last is None else states[-last:]
                capture.add(name, pool_positions(states, max_side))

            return hook

        return bind

    chosen = transformer_blocks(unet) if names is None else list(names)
    return _hooked(unet, {name: (name, make(name)) for name in chosen}, limit_bytes)


# ---- attention maps ---------------------------------------------------------------------------------


def attention_map(attn: nn.Module, query: Tensor, key: Tensor) -> Tensor:
    """softmax(q k^T * scale), averaged over heads: [B, N, T] from to_q's output [B, N, I] and to_k's [B, T, I]."""
    heads = attn.heads
    q = query.float().unflatten(2, (heads, -1)).transpose(1, 2)  # [B, H, N, d]
    k = key.float().unflatten(2, (heads, -1)).transpose(1, 2)  # [B, H, T, d]
    if getattr(attn, "norm_q", None) is not None:
        q = attn.norm_q(q)
    if getattr(attn, "norm_k", None) is not None:
        k = attn.norm_k(k)
    return (q @ k.transpose(2, 3) * attn.scale).softmax(-1).mean(1)


def capture_attention(
    unet: nn.Module,
    tokens: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    last: int | None = None,
    limit_bytes: int = LIMIT_BYTES,
):
    """Cross-attention maps [B, N, len(tokens)] per pass (all tokens if None), of the last `last` rows of a batch.

    Memory: what is kept is 4 B N len(tokens) bytes per layer and pass on the CPU, at most `limit_bytes` in all; while a
    layer runs, its scores for all heads and tokens, 4 B heads N T bytes on the device.
    """
    chosen = cross_attentions(unet) if names is None else list(names)
    queries: dict[str, Tensor] = {}
    hooks: dict[str, tuple[str, Callable]] = {}

    def make_query(name: str):
        def hook(module: nn.Module, output: Tensor) -> None:
            queries[name] = output.detach() if last is None else output.detach()[-last:]

        return lambda capture: hook

    def make_key(name: str, attn: nn.Module):
        def bind(capture: Capture):
            def hook(module: nn.Module, output: Tensor) -> None:
                key = output.detach() if last is None else output.detach()[-last:]
                weights = attention_map(attn, queries.pop(name), key)
                capture.add(name, weights if tokens is None else weights[:, :, list(tokens)])

            return hook

        return bind

    for name in chosen:
        try:
            attn = unet.get_submodule(name)
        except AttributeError:
            raise LcsError(f"the U-Net has no layer {name!r}") from None
        hooks[f"{name}.to_q"] = (f"{name}.to_q", make_query(name))
        hooks[f"{name}.to_k"] = (f"{name}.to_k", make_key(name, attn))
    return _hooked(unet, hooks, limit_bytes)
