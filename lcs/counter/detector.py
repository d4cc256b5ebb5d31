"""The counter: a small convolutional detector that says which objects an image shows, and where.

A U-Net of residual blocks (strides 2, 4 and 8) predicts, for each pixel of the 64x64 image, how likely an
object's centre lies there (CenterNet: Zhou et al. 2019, arXiv 1904.07850) and what that object is. Small
objects are only 4.5x6 pixels, so predictions are made at stride 1: the last layer gives the four pixels of
a stride-2 position as channels. An object's centre is the projection of its 3d centre, which is what the
location conditioners are told; its box is what is visible of it.

`quality` says how clean an object looks: the network is trained on objects that were faded, smeared, warped,
double-exposed or stained with a strength between 0 and 1 (`degrade.py`), and predicts 1 - strength.
A detection counts as an object if its score and its quality reach the two thresholds of `Thresholds`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lcs
from lcs.counter.data import SIZE
from lcs.data.files import sha256_of
from lcs.errors import LcsError
from lcs.scenes import world
from lcs.training import checkpoint
from lcs.weights import WEIGHTS, enter, read_manifest

MANIFEST_KEY = "counter"
FILE = "counter.safetensors"
MAX_DETECTIONS = 32  # per image
DUPLICATE_PIXELS = 1.5  # two peaks whose refined centres are closer are one object

# Channels of the output map, in this order.
FIELDS = {
    "heat": 1,  # logit: an object's centre is here
    "offset": 2,  # (x, y) from the pixel's centre to the object's, in pixels
    "box": 4,  # distances from the object's centre to the left, top, right and bottom of what is visible, in pixels
    "color": len(world.COLOR_NAMES),
    "shape": len(world.SHAPES),
    "size": len(world.SIZE_NAMES),
    "material": len(world.MATERIALS),
    "quality": 1,  # logit of 1 - strength of degradation
}
BOX_UNIT = 4.0  # the network's unit of box distances, in pixels


@dataclass(frozen=True)
class Architecture:
    widths: tuple[int, int, int] = (32, 64, 96)  # channels at strides 2, 4, 8
    blocks: tuple[int, int, int] = (2, 2, 2)  # residual blocks at these strides
    head: int = 64


class _ConvNorm(nn.Sequential):
    def __init__(self, fan_in: int, fan_out: int, stride: int = 1):
        super().__init__(nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False), nn.BatchNorm2d(fan_out))


class _Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = _ConvNorm(width, width), _ConvNorm(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.first(x))))


class Detector(nn.Module):
    """RGB in [0, 1], float32 [B, 3, 64, 64] -> dictionary of maps [B, channels, 64, 64], see FIELDS."""

    def __init__(self, architecture: Architecture = Architecture()):  # noqa: B008
        super().__init__()
        self.architecture = architecture
        (a, b, c), (na, nb, nc) = architecture.widths, architecture.blocks
        self.stem = nn.Sequential(_ConvNorm(3, 16), nn.ReLU(), _ConvNorm(16, a, stride=2), nn.ReLU())
        self.down2 = nn.Sequential(*(_Residual(a) for _ in range(na)))
        self.to4 = nn.Sequential(_ConvNorm(a, b, stride=2), nn.ReLU())
        self.down4 = nn.Sequential(*(_Residual(b) for _ in range(nb)))
        self.to8 = nn.Sequential(_ConvNorm(b, c, stride=2), nn.ReLU())
        self.down8 = nn.Sequential(*(_Residual(c) for _ in range(nc)))
        self.from8, self.from4 = nn.Conv2d(c, b, 1), nn.Conv2d(b, a, 1)
        self.up4 = nn.Sequential(*(_Residual(b) for _ in range(max(nb - 1, 1))))
        self.up2 = nn.Sequential(*(_Residual(a) for _ in range(na)))
        self.head = nn.Sequential(
            _ConvNorm(a, architecture.head), nn.ReLU(), nn.Conv2d(architecture.head, 4 * sum(FIELDS.values()), 1)
        )
        with torch.no_grad():  # objects are rare: start from a low probability everywhere
            self.head[-1].bias.zero_()
            self.head[-1].bias[:4] = -4.0

    def forward(self, rgb: Tensor) -> dict[str, Tensor]:
        x2 = self.down2(self.stem((rgb - 0.5) * 4))  # [B, a, 32, 32]
        x4 = self.down4(self.to4(x2))  # [B, b, 16, 16]
        x8 = self.down8(self.to8(x4))  # [B, c, 8, 8]
        x4 = self.up4(x4 + F.interpolate(self.from8(x8), scale_factor=2.0))
        x2 = self.up2(x2 + F.interpolate(self.from4(x4), scale_factor=2.0))
        maps = F.pixel_shuffle(self.head(x2), 2)  # [B, 23, 64, 64]
        return dict(zip(FIELDS, maps.split(tuple(FIELDS.values()), dim=1), strict=True))


# ---- from maps to objects -------------------------------------------------------------------------


@dataclass(frozen=True)
class Detections:
    """The objects of one image, the surest first. n may be 0."""

    centers: np.ndarray  # float32 [n, 2], (x, y) as fractions of the image
    boxes: np.ndarray  # float32 [n, 4], (left, top, right, bottom) as fractions, of what is visible
    colors: np.ndarray  # int64 [n], index into world.COLOR_NAMES
    shapes: np.ndarray  # int64 [n], index into world.SHAPES
    sizes: np.ndarray  # int64 [n], index into world.SIZE_NAMES
    materials: np.ndarray  # int64 [n], index into world.MATERIALS
    scores: np.ndarray  # float32 [n] in 0..1: that there is an object at all
    quality: np.ndarray  # float32 [n] in 0..1: clean object or smear

    def __len__(self) -> int:
        return len(self.centers)

    def where(self, keep: np.ndarray) -> Detections:
        return Detections(**{name: value[keep] for name, value in self.__dict__.items()})

    def names(self) -> list[str]:
        """One line per object, for captions: 'small red rubber cube'."""
        columns = (self.sizes, self.colors, self.materials, self.shapes)
        words = (world.SIZE_NAMES, world.COLOR_NAMES, world.MATERIALS, world.SHAPES)
        return [" ".join(w[i] for w, i in zip(words, row, strict=True)) for row in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Thresholds:
    score: float  # chosen on validation renders: best exact count
    quality: float  # what passes as an object rather than a smear


def decode(maps: dict[str, Tensor], min_score: float) -> list[Detections]:
    """Local maxima of the heat map above `min_score`, one `Detections` per image."""
    heat = maps["heat"][:, 0].sigmoid()  # [B, H, W]
    height, width = heat.shape[1:]
    peak = (heat == F.max_pool2d(heat[:, None], 3, 1, 1)[:, 0]) & (heat >= min_score)
    found = []
    for image in range(len(heat)):
        rows, cols = peak[image].nonzero(as_tuple=True)
        order = heat[image, rows, cols].argsort(descending=True, stable=True)[:MAX_DETECTIONS]
        rows, cols = rows[order], cols[order]
        at = {name: value[image, :, rows, cols].T for name, value in maps.items()}  # [n, channels]
        center = torch.stack([cols, rows], 1) + 0.5 + at["offset"]  # in pixels
        reach = (at["box"] * BOX_UNIT).clamp(min=0)  # a box never turns inside out
        box = torch.cat([center - reach[:, :2], center + reach[:, 2:]], 1)
        scale = torch.tensor([width, height], dtype=torch.float32)
        keep = _not_duplicates(center)
        found.append(
            Detections(
                centers=(center / scale).numpy(),
                boxes=(box / scale.repeat(2)).clamp(0, 1).numpy(),
                colors=at["color"].argmax(1).numpy(),
                shapes=at["shape"].argmax(1).numpy(),
                sizes=at["size"].argmax(1).numpy(),
                materials=at["material"].argmax(1).numpy(),
                scores=heat[image, rows, cols].numpy(),
                quality=at["quality"][:, 0].sigmoid().numpy(),
            ).where(keep)
        )
    return found


def _not_duplicates(center: Tensor) -> np.ndarray:
    """True for peaks that are not closer than DUPLICATE_PIXELS to a kept, surer one; `center` is sorted by score."""
    near = (torch.cdist(center, center) < DUPLICATE_PIXELS).numpy() if len(center) else np.zeros((0, 0), bool)
    keep = np.ones(len(center), bool)
    for i in range(1, len(center)):
        keep[i] = not (near[i, :i] & keep[:i]).any()
    return keep


# ---- the counter as it is used --------------------------------------------------------------------


@dataclass(frozen=True)
class Counter:
    """A trained detector with its thresholds: `counter(images)` returns the objects of each image."""

    detector: Detector
    thresholds: Thresholds

    def __call__(self, images: np.ndarray) -> list[Detections]:
        """images: uint8 [B, H, W, 3] sRGB of any size. Only detections that count as objects are returned."""
        return [d.where(d.quality >= self.thresholds.quality) for d in self.candidates(images)]

    @torch.no_grad()
    def candidates(self, images: np.ndarray, chunk: int = 64) -> list[Detections]:
        """The same before the quality threshold: smears are still among them, with their quality."""
        self.detector.eval()
        found = []
        for at in range(0, len(images), chunk):
            found += decode(self.detector(prepare(images[at : at + chunk])), self.thresholds.score)
        return found

    def counts(self, images: np.ndarray) -> np.ndarray:
        """How many objects each image shows: int64 [B]."""
        return np.array([len(d) for d in self(images)], np.int64)


def prepare(images: np.ndarray) -> Tensor:
    """uint8 [B, H, W, 3] of any size -> float32 [B, 3, 64, 64] in [0, 1]."""
    images = np.asarray(images)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise LcsError(f"the counter takes uint8 images [B, H, W, 3], got {images.dtype} {list(images.shape)}")
    rgb = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float() / 255
    if rgb.shape[2:] != (SIZE, SIZE) and len(rgb):
        rgb = F.interpolate(rgb, (SIZE, SIZE), mode="bilinear", antialias=True, align_corners=False)
    return rgb


# ---- shipped weights ------------------------------------------------------------------------------


def export_counter(
    detector: Detector, thresholds: Thresholds, settings: dict, measured: dict, root: Path = WEIGHTS
) -> Path:
    """Writes fp16 weights and their entry in the manifest; `measured` is the counter's own error."""
    path = Path(root) / FILE
    tensors = {name: t.half() if t.is_floating_point() else t for name, t in detector.state_dict().items()}
    meta = {"architecture": asdict(detector.architecture), "thresholds": asdict(thresholds)}
    checkpoint.save_tensors(path, tensors, meta)
    enter(root, MANIFEST_KEY, {
        "file": path.name, "sha256": sha256_of(path), "bytes": path.stat().st_size, "version": lcs.__version__,
        "settings": settings, "thresholds": asdict(thresholds), "measured": measured,
    })  # fmt: skip
    return path


def load_counter(root: Path = WEIGHTS) -> Counter:
    """The shipped counter; raises if it is missing or its file does not match the manifest."""
    entry = read_manifest(root).get(MANIFEST_KEY)
    if entry is None:
        raise LcsError(f"no counter in {root}; train one with lcs.counter.training")
    path = Path(root) / entry["file"]
    if not path.exists() or sha256_of(path) != entry["sha256"]:
        raise LcsError(f"{path} is missing or does not match its sha256 in the manifest; fetch it again")
    tensors, meta = checkpoint.load_tensors(path)
    architecture = Architecture(**{name: _tuple(v) for name, v in meta["architecture"].items()})
    detector = Detector(architecture)
    try:
        detector.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in tensors.items()})
    except RuntimeError as error:
        raise LcsError(f"{path} does not fit the detector: {str(error).splitlines()[-1].strip()}") from None
    return Counter(detector.eval().requires_grad_(False), Thresholds(**meta["thresholds"]))


def _tuple(value):
    return tuple(value) if isinstance(value, list) else value
