"""mini-sdxl on disk, and loading of any SDXL-class pipeline with errors that say what to do.

weights/mini-sdxl/ is an ordinary diffusers folder (fp16 safetensors) plus a manifest.json with the settings, the
samples seen, what was measured, and the sha256 of every file; loading checks them.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

import httpx2
import torch
from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline
from huggingface_hub.errors import GatedRepoError
from safetensors import safe_open

import lcs
from lcs.data.files import read_json, sha256_of, write_json
from lcs.errors import LcsError
from lcs.hub.client import reason
from lcs.sampling import check_device
from lcs.sdxl.build import MiniSettings
from lcs.sdxl.concepts import MINI, SDXL, Subject
from lcs.sdxl.facts import SDXL_BASE
from lcs.sdxl.sampling import PREDICTIONS, image_size
from lcs.weights import WEIGHTS

MINI_ID = "mini-sdxl"
MANIFEST = "manifest.json"
SDXL_BYTES = 7_000_000_000  # fp16 weights of SDXL base; twice as much in fp32
WORKING = 1.3  # memory for activations, as a factor
OFFLOAD = "keep only the part at work on the GPU (`lcs sdxl --offload`, `lcs artifact --sdxl-offload`)"


def mini_sha256() -> str | None:
    """What tells one mini-sdxl from another: the hash of its manifest, which lists those of all its files."""
    manifest = WEIGHTS / MINI_ID / MANIFEST
    return sha256_of(manifest) if manifest.exists() else None


def folder_facts(model_id: str) -> list:
    """Names, sizes and times of the files of a model that is a folder; nothing for another."""
    folder = Path(model_id)
    if not folder.is_dir():
        return []
    return sorted((p.relative_to(folder).as_posix(), p.stat().st_size, p.stat().st_mtime_ns)
                  for p in folder.rglob("*") if p.is_file())  # fmt: skip


# ---- mini-sdxl --------------------------------------------------------------------------------------


def export_mini(
    pipe: StableDiffusionXLPipeline, settings: MiniSettings, samples: int, measured: dict, root: Path = WEIGHTS
) -> Path:
    """Writes the folder anew and puts it in place only when it is complete."""
    folder = Path(root) / MINI_ID
    temporary = folder.with_name(f".{MINI_ID}.{os.getpid()}.tmp")
    pipe = pipe.to(dtype=torch.float16)
    try:
        pipe.save_pretrained(temporary, safe_serialization=True)
        pipe.to(dtype=torch.float32)
        (temporary / "README.md").write_text(_card(settings, samples, measured))
        write_json(temporary / MANIFEST, _manifest(temporary, settings, samples, measured))
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)
    return folder


def _manifest(folder: Path, settings: MiniSettings, samples: int, measured: dict) -> dict:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    return {
        "settings": settings.to_json(), "samples": samples, "measured": measured, "version": lcs.__version__,
        "bytes": sum(p.stat().st_size for p in files),
        "sha256": {p.relative_to(folder).as_posix(): sha256_of(p) for p in files},
    }  # fmt: skip


def _card(settings: MiniSettings, samples: int, measured: dict) -> str:
    """The folder's README: what the model is, what it was measured to do, and what it is not."""
    lines = [
        "---", "license: apache-2.0", "library_name: diffusers", "pipeline_tag: text-to-image", "---", "",
        "# mini-sdxl", "",
        f"A `StableDiffusionXLPipeline` at {settings.size}x{settings.size} pixels, trained by this project on "
        "captioned renders of CLEVR scenes with one or two objects, each near one of three spots (left, middle, "
        f"right), seen from twice as near as in CLEVR ({samples:,} samples, one CPU core). It exists so that the SDXL "
        "study can run anywhere; it draws nothing but such scenes.", "",
        "```python", "from diffusers import StableDiffusionXLPipeline",
        'pipe = StableDiffusionXLPipeline.from_pretrained("weights/mini-sdxl")',
        f'pipe("a large red metal cube on the left", guidance_scale={MINI.guidance:g}, num_inference_steps=25)',
        "```", "",
        "Prompts whose text training never shows, judged by the project's counter: colour and shape of every object "
        "right (95% interval); in brackets also with nothing else in the image, in the order of the prompt:", "",
    ]  # fmt: skip
    if not measured:
        lines.append("- not measured yet")
    for key, row in measured.items():
        if key.endswith("objects"):
            lines.append(
                f"- {key}: {row['right']:.1%} of {row['prompts']} ({row['low']:.1%} to {row['high']:.1%}) "
                f"[{row['strict']:.1%}]"
            )
    return "\n".join([*lines, "", "Settings, all numbers and hashes are in `manifest.json`.", ""])


def check_files(folder: Path) -> None:
    """Every file of the manifest is there and unchanged, and no other weights are."""
    listed = read_json(folder / MANIFEST)["sha256"]
    for name, digest in listed.items():
        path = folder / name
        if not path.is_file() or sha256_of(path) != digest:
            raise LcsError(f"{path} is missing or does not match its sha256 in the manifest; fetch it again")
    foreign = [p for p in folder.rglob("*") if p.suffix in (".safetensors", ".bin", ".pt", ".ckpt")
               and p.relative_to(folder).as_posix() not in listed]  # fmt: skip
    if foreign:
        raise LcsError(f"{foreign[0]} is not in the manifest; remove it")


# ---- loading ----------------------------------------------------------------------------------------


def subject_of(model_id: str, pipe: StableDiffusionXLPipeline) -> Subject:
    """A mini-sdxl, whatever its folder is called, has its own concepts; other models get the paper's, at their size."""
    ours = model_id == MINI_ID or _is_mini(Path(model_id))
    return MINI if ours else replace(SDXL, size=image_size(pipe))


def _is_mini(folder: Path) -> bool:
    """Whether a folder was written by `export_mini`: other folders may have a manifest.json of their own."""
    path = folder / MANIFEST
    found = read_json(path) if path.is_file() else None
    return isinstance(found, dict) and {"settings", "sha256"} <= found.keys()


def load_pipeline(
    model_id: str = MINI_ID, device: str | None = None, offload: bool = False, root: Path = WEIGHTS
) -> StableDiffusionXLPipeline:
    """mini-sdxl, a local folder, or a repository of the Hub; fp16 on a GPU, fp32 on the CPU.

    offload keeps on the GPU only the part that is at work. The autoencoder is run in fp32 where fp16 would overflow
    (`sampling.decode`). Whatever scheduler the model comes with, the study samples by Euler's method on its schedule.
    """
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(place)
    if offload and not place.startswith("cuda"):
        raise LcsError("offloading moves parts between GPU and CPU, but there is no GPU in use")
    dtype = torch.float16 if place.startswith("cuda") else torch.float32
    folder = _folder(model_id, root)
    if folder is None:
        if model_id == SDXL_BASE:
            _check_memory(model_id, SDXL_BYTES, place, offload)
        folder = _download(model_id)
    variant = "fp16" if any(Path(folder).glob("unet/*.fp16.safetensors")) else None
    _check_memory(model_id, _fp16_bytes(Path(folder), variant), place, offload)
    try:
        pipe = StableDiffusionXLPipeline.from_pretrained(
            folder, dtype=dtype, variant=variant, use_safetensors=True, local_files_only=True,
            add_watermarker=False,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LcsError(f"{model_id} is not a Stable Diffusion XL pipeline that can be loaded: {first}") from None
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    if pipe.scheduler.config.prediction_type not in PREDICTIONS:
        raise LcsError(
            f"{model_id} predicts {pipe.scheduler.config.prediction_type!r}; this study knows {', '.join(PREDICTIONS)}"
        )
    pipe.set_progress_bar_config(disable=True)
    for part in (pipe.unet, pipe.vae, pipe.text_encoder, pipe.text_encoder_2):
        part.requires_grad_(False)  # gradients with respect to latents need none of the weights'
    try:
        if offload:
            pipe.enable_model_cpu_offload(device=place)
            return pipe
        return pipe.to(place)
    except (torch.OutOfMemoryError, MemoryError):
        raise LcsError(f"{model_id} does not fit on {place}; {OFFLOAD}, or take a smaller model") from None


def _folder(model_id: str, root: Path) -> Path | None:
    """A folder on this machine, its hashes checked if it has a manifest; None for a repository of the Hub."""
    path = Path(root) / MINI_ID if model_id == MINI_ID else Path(model_id)
    if model_id == MINI_ID and not path.is_dir():
        raise LcsError(f"{path} does not exist; train it with `lcs sdxl train`, or fetch the repository's weights")
    if not path.is_dir():
        if model_id.count("/") != 1 or model_id.startswith((".", "/", "~")):
            raise LcsError(f"{model_id!r} is neither {MINI_ID}, nor a folder, nor a repository as owner/name")
        return None
    if not (path / "model_index.json").exists():
        raise LcsError(f"{path} is not a diffusers folder: it has no model_index.json")
    if _is_mini(path):
        check_files(path)
    return path


def _download(model_id: str) -> Path:
    logger = logging.getLogger("diffusers")  # it would say what goes wrong as well, at length
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        try:
            return Path(StableDiffusionXLPipeline.download(model_id, variant="fp16", use_safetensors=True))
        except ValueError:  # no fp16 files
            return Path(StableDiffusionXLPipeline.download(model_id, use_safetensors=True))
    except (OSError, ValueError, RuntimeError, httpx2.HTTPError) as error:
        if _is_gated(error):
            raise LcsError(
                f"cannot load {model_id}: it is gated; accept its conditions on its page on the Hub, "
                f"then set HF_TOKEN or run `hf auth login`"
            ) from None
        raise LcsError(f"cannot load {model_id}: {reason(error)}; {MINI_ID} needs no network") from None
    finally:
        logger.setLevel(level)


def _is_gated(error: BaseException | None) -> bool:
    """Diffusers raises its own error from, or during, that of the Hub."""
    while error is not None:
        if isinstance(error, GatedRepoError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _fp16_bytes(folder: Path, variant: str | None) -> int:
    """Size in fp16 of what will be loaded: the variant's files if there are any, half of what is stored as fp32."""
    total = 0
    for path in folder.glob("*/*.safetensors"):
        if (".fp16." in path.name) == (variant == "fp16"):
            with safe_open(path, framework="pt") as handle:
                names = list(handle.keys())
                wide = bool(names) and handle.get_slice(names[0]).get_dtype() == "F32"
            total += path.stat().st_size // (2 if wide else 1)
    return total


def _check_memory(model_id: str, fp16_bytes: int, place: str, offload: bool) -> None:
    """Refuses before loading what cannot fit; on the CPU weights take fp32."""
    if place.startswith("cuda"):
        free, need = torch.cuda.mem_get_info(place)[0], fp16_bytes * WORKING * (0.8 if offload else 1.0)
        hint = "take a larger GPU" if offload else OFFLOAD
    else:
        free, need, hint = _available_memory(), 2 * fp16_bytes * WORKING, "take a machine with more memory or a GPU"
    if free is not None and free < need:
        raise LcsError(
            f"{model_id} needs about {need / 1e9:.0f} GB on {place} and {free / 1e9:.0f} GB are free; "
            f"{hint}, or take {MINI_ID}"
        )


def _available_memory() -> int | None:
    """Bytes that can be allocated without swapping; None where the system does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
