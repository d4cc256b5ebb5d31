"""The local patch model against its definition, patch by patch."""

import time

import pytest
import torch

from lcs.errors import LcsError
from lcs.experiments import GRID, Network
from lcs.model.edm2 import EDM2
from lcs.model.local import (
    LocalEDM2,
    all_cells,
    extract_patches,
    grid_patch_labels,
    is_whole,
    list_patch_labels,
    patch_size,
)

NETWORK = Network(channels=16, channel_mult=(1, 2), num_blocks=1, attn_resolutions=(), channels_per_head=16)


def local_model(kind: str = "grid", k: int = 2, resolution: int = 32, network: Network = NETWORK) -> LocalEDM2:
    torch.manual_seed(0)
    model = LocalEDM2(network, resolution, kind, k, list_slots=4).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("gain"):
                p.fill_(0.6)
    return model


def grid_label(*cells: tuple[int, int]) -> torch.Tensor:
    label = torch.zeros(1, GRID, GRID)
    for i, j in cells:
        label[0, i, j] += 1
    return label.flatten(1)


@torch.no_grad()
def naive_forward(model: LocalEDM2, x: torch.Tensor, sigma: float, labels: torch.Tensor) -> torch.Tensor:
    """Grid conditioning, one patch at a time, by plain indexing."""
    k, m = model.k, x.shape[-1] // GRID
    out = torch.empty_like(x)
    for b in range(len(x)):
        grid = labels[b].view(GRID, GRID)
        for i in range(GRID):
            for j in range(GRID):
                side = 2 * k + 1
                patch, counts = torch.zeros(1, 3, side * m, side * m), torch.zeros(side, side)
                for u in range(side):
                    for v in range(side):
                        r, c = i - k + u, j - k + v
                        if 0 <= r < GRID and 0 <= c < GRID:
                            counts[u, v] = grid[r, c]
                            patch[0, :, u * m : u * m + m, v * m : v * m + m] = x[
                                b, :, r * m : r * m + m, c * m : c * m + m
                            ]
                centre = torch.tensor([i / 7.5 - 1, j / 7.5 - 1])
                x0hat = model.denoiser(patch, sigma, torch.cat([counts.flatten(), centre])[None])
                out[b, :, i * m : i * m + m, j * m : j * m + m] = x0hat[0, :, k * m : k * m + m, k * m : k * m + m]
    return out


@pytest.mark.parametrize(
    ("k", "network"), [(2, NETWORK), (1, Network(16, (1,), 1, (), 16)), (2, Network(16, (1,), 1, (), 16, 2))]
)
def test_batched_equals_patch_by_patch(k, network):
    model = local_model(k=k, network=network)
    x, labels = torch.randn(1, 3, 32, 32), grid_label((3, 4), (0, 15), (9, 9))
    with torch.no_grad():
        got = model(x, 0.8, labels)
    want = naive_forward(model, x, 0.8, labels)
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_batched_equals_patch_by_patch_with_a_list():
    """Entry (1, x, y) lies in cell (floor(16 y), floor(16 x)); in a patch it is told where in the patch it is."""
    model = local_model("list", k=2)
    entries = [(0.30, 0.71), (0.36, 0.66), (0.99, 0.02)]
    labels = torch.tensor([[v for x, y in entries for v in (1.0, x, y)] + [0.0] * 3])
    image = torch.randn(1, 3, 32, 32)
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4))
    want = torch.empty_like(image)
    for i in range(GRID):
        for j in range(GRID):
            near = [(x, y) for x, y in entries if abs(int(16 * y) - i) <= 2 and abs(int(16 * x) - j) <= 2]
            told = [v for x, y in near for v in (1.0, (16 * x - (j - 2)) / 5, (16 * y - (i - 2)) / 5)]
            label = torch.tensor([told + [0.0] * (12 - len(told)) + [i / 7.5 - 1, j / 7.5 - 1]])
            patch = padded[:, :, 2 * i : 2 * i + 10, 2 * j : 2 * j + 10]
            with torch.no_grad():
                centre = model.denoiser(patch, 0.8, label)[0, :, 4:6, 4:6]
            want[0, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2] = centre
    with torch.no_grad():
        torch.testing.assert_close(model(image, 0.8, labels), want, atol=1e-5, rtol=0)


def test_batch_and_sigma_per_image():
    model = local_model()
    x, labels = torch.randn(2, 3, 32, 32), torch.cat([grid_label((3, 4)), grid_label((8, 8))])
    sigma = torch.tensor([0.2, 5.0])
    with torch.no_grad():
        both = model(x, sigma, labels)
        for i in range(2):
            torch.testing.assert_close(model(x[i : i + 1], sigma[i], labels[i : i + 1])[0], both[i], atol=1e-5, rtol=0)
        torch.testing.assert_close(model(x, 1.0), model(x, 1.0, torch.zeros(2, 256)))


def test_nothing_outside_the_patch_matters():
    model = local_model().requires_grad_(False)
    i, j, m = 5, 14, 2
    x = torch.randn(1, 3, 32, 32, requires_grad=True)
    label = grid_label((4, 12))
    out = model(x, 1.0, label)
    (gradient,) = torch.autograd.grad(out[0, :, i * m : i * m + m, j * m : j * m + m].square().sum(), x)
    inside = torch.zeros(32, 32, dtype=torch.bool)
    inside[(i - 2) * m : (i + 3) * m, (j - 2) * m : (j + 3) * m] = True
    assert (gradient[0, :, ~inside] == 0).all()
    assert (gradient[0, :, inside] != 0).float().mean() > 0.9
    # Labels: cell (4, 12) is seen from (5, 14), (4, 11) is not.
    with torch.no_grad():
        cell = lambda y: y[0, :, i * m : i * m + m, j * m : j * m + m]  # noqa: E731
        out = model(x, 1.0, label)
        assert torch.equal(cell(model(x, 1.0, grid_label((4, 12), (4, 11)))), cell(out))
        assert not torch.allclose(cell(model(x, 1.0, grid_label())), cell(out), atol=1e-3)


def test_position_matters():
    """Not translation equivariant: the same patch content gives different answers at different centres."""
    model = local_model()
    with torch.no_grad():
        out = model(torch.full((1, 3, 32, 32), 0.3), 1.0)
    assert not torch.allclose(out[..., 16, 16], out[..., 16, 20], atol=1e-3)


@pytest.mark.parametrize("kind", ["grid", "list"])
def test_k8_is_the_plain_model_on_the_whole_image(kind):
    model = local_model(kind, k=8, resolution=16)
    width = (256 if kind == "grid" else 12) + 2
    plain = EDM2(NETWORK, 16, 3, width).eval()
    plain.load_state_dict(model.denoiser.state_dict())
    x = torch.randn(2, 3, 16, 16)
    labels = torch.rand(2, model.label_dim)
    with torch.no_grad():
        want = plain(x, 1.5, torch.cat([labels, torch.zeros(2, 2)], dim=1))
        assert torch.equal(model(x, 1.5, labels), want)
    images, patch_labels, noise = model.patch_batch(x, labels, 2 * x, model.choose_patches(labels, torch.rand(2, 2)))
    assert torch.equal(images, x)
    assert torch.equal(noise, 2 * x)
    assert torch.equal(patch_labels, torch.cat([labels, torch.zeros(2, 2)], dim=1))
    assert is_whole(8)
    assert not is_whole(7)


# --- patches and labels by hand -------------------------------------------------------------------------------------


def test_patches_by_hand():
    images = torch.arange(2 * 16 * 16, dtype=torch.float32).view(2, 1, 16, 16)  # one pixel per cell
    cells = torch.tensor([[[0, 0]], [[7, 15]]])
    patches = extract_patches(images, cells, 1)
    assert patches[0, 0].tolist() == [[0, 0, 0], [0, 0, 1], [0, 16, 17]]
    first = 256 + 6 * 16 + 14
    assert patches[1, 0].tolist() == [[first, first + 1, 0], [first + 16, first + 17, 0], [first + 32, first + 33, 0]]
    assert patch_size(64, 2) == 20
    assert patch_size(128, 2) == 40
    assert patch_size(64, 8) == 64
    assert all_cells(1, 2)[0, 17].tolist() == [1, 1]


def test_grid_labels_by_hand():
    label = grid_label((0, 1), (0, 1), (2, 2))
    got = grid_patch_labels(label, torch.tensor([[[0, 0], [1, 1], [15, 0]]]), 1)
    assert got[0].tolist() == [0, 0, 0, 0, 0, 2, 0, 0, 0, -1, -1]
    assert got[1, :9].tolist() == [0, 2, 0, 0, 0, 0, 0, 0, 1]
    assert got[1, 9:].tolist() == pytest.approx([1 / 7.5 - 1] * 2)
    assert got[2].tolist() == [0] * 9 + [1, -1]


def test_list_labels_by_hand():
    # Slots (present, x, y). Patch of cell row 4, column 8 with k = 2 covers x in [6, 11)/16 and y in [2, 7)/16.
    slots = [[1, 0.9, 0.9], [1, 8.5 / 16, 4.5 / 16], [0, 8.5 / 16, 4.5 / 16], [1, 6 / 16, 6.9 / 16]]
    label = torch.tensor(slots).view(1, 12)
    (got,) = list_patch_labels(label, torch.tensor([[[4, 8]]]), 2)
    want = [1, 0.5, 0.5, 1, 0, 4.9 / 5, 0, 0, 0, 0, 0, 0, 4 / 7.5 - 1, 8 / 7.5 - 1]
    assert got.tolist() == pytest.approx(want, abs=1e-6)
    # One cell to the right the second entry drops out and x moves by a fifth of a patch.
    (got,) = list_patch_labels(label, torch.tensor([[[4, 9]]]), 2)
    assert got[:6].tolist() == pytest.approx([1, 0.3, 0.5, 0, 0, 0], abs=1e-6)
    # The far edge of the image belongs to the last cell.
    (got,) = list_patch_labels(torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor([[[15, 15]]]), 2)
    assert got[:3].tolist() == pytest.approx([1, 0.6, 0.6])


@pytest.mark.parametrize("kind", ["grid", "list"])
def test_chosen_patches_are_positive_and_negative(kind):
    model = local_model(kind)
    u = torch.rand(400, 2, generator=torch.Generator().manual_seed(0))
    if kind == "grid":
        labels = torch.cat([grid_label((0, 0), (8, 3))] * 400)
        empty = torch.zeros(400, 256)
    else:
        labels = torch.tensor([[1, 0.5 / 16, 0.5 / 16, 1, 3.5 / 16, 8.5 / 16] + [0] * 6]).expand(400, -1)
        empty = torch.zeros(400, 12)
    cells = model.choose_patches(labels, u)
    assert cells.shape == (400, 2, 2)
    near = lambda c: ((c <= 2).all(-1)) | ((c - torch.tensor([8, 3])).abs() <= 2).all(-1)  # noqa: E731
    assert near(cells[:, 0]).all()
    assert not near(cells[:, 1]).any()
    # Every positive place is used: 9 around the corner, 25 around the other.
    assert len({tuple(c) for c in cells[:, 0].tolist()}) == 34
    active = model.patch_labels(labels, cells)[:, :-2].unflatten(0, (400, 2)).sum(-1) > 0
    assert active[:, 0].all()
    assert not active[:, 1].any()
    spread = model.choose_patches(empty, u).flatten(0, 1)
    assert len({tuple(c) for c in spread.tolist()}) > 200  # of 256, in 800 draws
    ends = torch.tensor([[0.0, 0.0], [1 - 2**-24, 1 - 2**-24]])
    first, last = model.choose_patches(labels[:2], ends)
    assert first.tolist() == [[0, 0], [0, 3]]  # the first cell in reading order that fits
    assert last.tolist() == [[10, 5], [15, 15]]  # and the last


def test_noisy_patch_is_the_patch_of_the_noisy_image():
    model = local_model()
    images, noise = torch.randn(3, 3, 32, 32), torch.randn(3, 3, 32, 32)
    labels = torch.cat([grid_label((0, 0)), grid_label((8, 8)), grid_label()])
    cells = model.choose_patches(labels, torch.rand(3, 2))
    patches, patch_labels, patch_noise = model.patch_batch(images, labels, noise, cells)
    assert patches.shape == (6, 3, 10, 10)
    assert patch_labels.shape == (6, 27)
    torch.testing.assert_close(patches + 3 * patch_noise, extract_patches(images + 3 * noise, cells, 2))


def test_wrong_use_is_refused():
    with pytest.raises(LcsError, match="not 'color'"):
        LocalEDM2(NETWORK, 32, "color")
    with pytest.raises(LcsError, match="resolution 40 is not a multiple"):
        LocalEDM2(NETWORK, 40, "grid")
    with pytest.raises(LcsError, match="labels have width 12; this model takes 256"):
        local_model()(torch.randn(1, 3, 32, 32), 1.0, torch.zeros(1, 12))


def test_batched_is_much_faster_than_the_loop():
    """The requirement is 5x at mini scale (`lcs bench local`); here, on a small network, only a sanity bound."""
    model = local_model().requires_grad_(False)
    x, labels = torch.randn(1, 3, 32, 32), grid_label()
    cells = all_cells(1, 2)
    patches, patch_labels = extract_patches(x, cells, 2), model.patch_labels(labels, cells)
    with torch.no_grad():
        model(x, 1.0, labels)
        start = time.process_time()
        model(x, 1.0, labels)
        batched = time.process_time() - start
        start = time.process_time()
        for n in range(64):
            model.denoiser(patches[n : n + 1], 1.0, patch_labels[n : n + 1])
        naive = 4 * (time.process_time() - start)
    assert naive > 3 * batched
