"""The cost plan against known costs of EDM2-XS; shipped weights: export, hash check, clear errors."""

import json
from dataclasses import replace

import pytest
import torch
from tiny import source, tiny_run

from lcs import weights
from lcs.errors import LcsError
from lcs.experiments import EXPERIMENTS, SCALES, STAGED, get_run, paper_runs
from lcs.model.build import trained_network
from lcs.packing import pack, unpack
from lcs.plan import as_table, plan, run_cost
from lcs.sampling import sample, sample_rgb
from lcs.training import checkpoint
from lcs.training.trainer import TrainSettings, train


def test_paper_scale_costs():
    """349 GFLOP per forward pass at 128 px and about 1.4e20 FLOP per model: the published size of this network."""
    cost = run_cost(get_run("grid-all", 3, "paper"), machine_gflops=100.0)
    assert cost.gflop_forward == pytest.approx(349, rel=0.01)
    assert cost.exaflop == pytest.approx(140, rel=0.02)
    assert cost.samples == 128 * 2**20
    assert cost.machine_hours == pytest.approx(cost.exaflop * 1e18 / 100e9 / 3600)
    assert cost.data_gb == pytest.approx(3 * 500_000 * 128 * 128 * 3 / 1e9)


def test_plan_has_every_run_of_both_scales():
    costs = plan(list(SCALES), machine_gflops=100.0)
    assert len(costs) == sum(len(paper_runs(s)) for s in SCALES)
    table = as_table(costs)
    assert all(run.name in table for run in paper_runs("paper"))


def test_registry_is_consistent():
    names = [run.name for run in paper_runs("mini")]
    assert len(names) == len(set(names))
    assert names[:3] == ["grid-all-m3", "grid-single-m3", "list-all-m3"]
    assert set(EXPERIMENTS) >= {"grid-all", "grid-single", "grid-random", "grid-drop-one", "list-all", "color"}


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    folder, root = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("weights")
    train(tiny_run(), source(), folder, settings=TrainSettings(cpu=True, progress=False))
    weights.export(tiny_run(), folder, root=root)
    return folder, root


def test_export_and_load(shipped):
    folder, root = shipped
    model, original = weights.load(tiny_run(), root=root), weights.load_stage(tiny_run(), folder / "late.safetensors")
    for a, b in zip(model.state_dict().values(), original.state_dict().values(), strict=True):
        assert torch.allclose(a, b, rtol=2e-3, atol=b.abs().max() / 250)  # fp16, or half a 127th of a row's largest
    entry = weights.read_manifest(root)["tiny/grid-single-m2/late"]
    assert entry["samples"] == 64
    assert entry["settings"]["recipe"]["batch"] == 8


def test_packed_weights_are_a_half_step_off_and_pack_to_the_same_again(shipped):
    folder, root = shipped
    exact, _ = checkpoint.load_tensors(folder / "late.safetensors")
    stored, _ = checkpoint.load_tensors(weights.find(tiny_run(), root=root))
    found = unpack(stored)
    assert found.keys() == exact.keys()
    rows = [name for name in exact if stored[name].dtype == torch.uint8]
    for name in rows:
        step = exact[name].flatten(1).abs().amax(1) / 127
        off = (found[name] - exact[name]).flatten(1).abs().amax(1)
        assert (off <= step * 0.5001).all(), name
    fine = [name for name in exact if exact[name].ndim > 1 and name not in rows]
    assert all("16x16" in name or "out_conv" in name for name in fine)  # 32 pixels, unshuffled by 2
    assert len(fine) > 3
    assert sum(exact[name].numel() for name in rows) > sum(exact[name].numel() for name in fine)
    again = pack(found)
    assert all(torch.equal(again[name], stored[name]) for name in rows)


def test_another_scale_ships_fp16(shipped, tmp_path):
    folder, _ = shipped
    plain = replace(tiny_run(), scale=replace(tiny_run().scale, packed=False))
    stored, _ = checkpoint.load_tensors(weights.export(plain, folder, root=tmp_path))
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    for a, b in zip(unpack(stored).values(), stored.values(), strict=True):
        assert torch.equal(a, b.float())


def test_damaged_or_missing_weights(shipped, tmp_path):
    _, root = shipped
    with pytest.raises(LcsError, match=r"no weights for tiny/color-m2/late"):
        weights.load(tiny_run("color"), root=root)
    entry = weights.read_manifest(root)["tiny/grid-single-m2/late"]
    data = bytearray((root / entry["file"]).read_bytes())
    data[-1] ^= 1
    (tmp_path / entry["file"]).write_bytes(data)
    (tmp_path / "manifest.json").write_text(json.dumps({"tiny/grid-single-m2/late": entry}))
    with pytest.raises(LcsError, match="sha256"):
        weights.load(tiny_run(), root=tmp_path)
    with pytest.raises(LcsError, match="does not fit the model"):
        weights.load_stage(tiny_run("color"), root / entry["file"])


def test_sampling_a_batch_equals_its_images_one_by_one(shipped):
    _, root = shipped
    run = tiny_run()
    model = weights.load(run, root=root)
    labels = torch.zeros(1, 256)
    both = sample(run, model, labels, [5, 9], steps=3)
    for i, seed in enumerate((5, 9)):
        # Three steps from sigma 80 enlarge the rounding of a batch's convolutions; another seed would be 7 away.
        assert torch.allclose(sample(run, model, labels, [seed], steps=3), both[i : i + 1], atol=1e-3)
    assert sample_rgb(run, model, labels, [5], steps=2, solver="dpmpp_2m").shape == (1, 32, 32, 3)
    with pytest.raises(LcsError, match="unknown solver 'euler'"):
        sample(run, model, labels, [0], solver="euler")
    with pytest.raises(LcsError, match="0 sampling steps"):
        sample(run, model, labels, [0], steps=0)


def test_a_checkpoint_knows_its_own_network(shipped):
    """The registry may move on; what is shipped still loads."""
    _, root = shipped
    run = tiny_run()
    moved = replace(run, scale=replace(run.scale, network=replace(run.scale.network, channels=16)))
    assert trained_network(weights.load(moved, root=root)).network == run.network
    settings = weights.read_manifest(root)[weights.entry_key(run)]["settings"]
    settings["network"]["wings"] = 2
    with pytest.raises(LcsError, match="another version"):
        weights.stored_network(settings)


@pytest.mark.parametrize("text", ["[]", '{"mini/grid-all-m3/late": {"file": "x"}}', '{"a": 3}'])
def test_a_manifest_of_another_form_is_one_line(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(LcsError, match="is not a manifest"):
        weights.read_manifest(tmp_path)


def test_every_model_of_the_tables_is_shipped_in_less_than_100_mb():
    manifest = weights.read_manifest()
    missing = [run.name for run in paper_runs("mini") if weights.entry_key(run) not in manifest]
    missing += [f"{name}-m3, {stage}" for name in STAGED for stage in weights.STAGES
                if f"mini/{name}-m3/{stage}" not in manifest]  # fmt: skip
    assert not missing
    files = [path for path in weights.WEIGHTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 100e6
    named = {entry["file"] for entry in manifest.values()}
    assert {path.name for path in weights.WEIGHTS.glob("*.safetensors")} == named  # nothing superseded lies about
