"""The whole SDXL study in one call: every analysis, its figures, tables and numbers.

    result = run_study("mini-sdxl", Path("out/sdxl-study"), "standard")
    result["figures"], result["tables"], result["numbers"]

On mini-sdxl everything runs, with the counter as judge. On other models what needs the counter (obedience, the
relation to composition success, the intervention's gain) is left out, because it knows only our objects.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from tqdm import tqdm

from lcs.bootstrap import interval
from lcs.data.files import atomic_write, content_hash, sha256_of, write_json
from lcs.errors import LcsError
from lcs.sdxl import figures
from lcs.sdxl.composition import PAIRS, measure_intervention, relate
from lcs.sdxl.concepts import MINI, Subject
from lcs.sdxl.features import FeatureStudy, find_tokens, run_feature_study, within_between
from lcs.sdxl.generate import generate_many
from lcs.sdxl.hooks import group_of
from lcs.sdxl.judge import measure_obedience
from lcs.sdxl.kept import keeping
from lcs.sdxl.package import MINI_ID, OFFLOAD, folder_facts, load_pipeline, mini_sha256, subject_of
from lcs.sdxl.pixel import PixelStudy, run_pixel_study
from lcs.sdxl.sampling import Pipe


@dataclass(frozen=True)
class Effort:
    pixel_seeds: int
    pixel_every: int  # influence at every so many steps
    feature_seeds: int
    feature_steps: int
    prompts: int  # per object count, for obedience and the intervention
    pair_seeds: int
    steps: int  # of sampling for everything judged
    three: bool  # three objects as well


EFFORTS = {
    "quick": Effort(2, 5, 2, 6, 32, 4, 12, False),
    "standard": Effort(10, 1, 10, 15, 100, 10, 20, True),  # the paper's 10 seeds, every step
    "full": Effort(10, 1, 10, 15, 200, 24, 25, True),
}


def run_study(
    model_id: str = MINI_ID,
    out: Path | None = None,
    effort: str = "standard",
    offload: bool = False,
    progress: bool = True,
    pipe: Pipe | None = None,
    subject: Subject | None = None,
    seed: int = 0,
    device: str | None = None,
    parts: Path | None = None,
) -> dict:
    """{"figures": {name: [png, pdf]}, "tables": {name: rows}, "numbers": {name: value}}.

    Without `out` the figures are returned as matplotlib figures and nothing is written; with it they are files, written
    part by part as they are done, beside sdxl-numbers.json, sdxl-tables.json and the arrays behind the figures. Seeds
    count from `seed`. `parts` is where batches are kept until all is done, so that the same call goes on after a kill;
    its name must stand for model, code and device. Without it that is a folder in `out`.
    """
    if effort not in EFFORTS:
        raise LcsError(f"unknown effort {effort!r}; choose from {', '.join(EFFORTS)}")
    if out is not None:
        _check_folder(Path(out))
    pipe = load_pipeline(model_id, device, offload=offload) if pipe is None else pipe
    subject = subject_of(model_id, pipe) if subject is None else subject
    find_tokens(pipe.tokenizer, subject, subject.compositions)
    result: dict = {"figures": {}, "tables": {}, "numbers": {"model": model_id, "effort": effort}}
    if parts is None and out is not None:
        parts = Path(out) / "parts" / _identity(model_id, pipe)
    try:
        with keeping(parts):
            for drawn, tables, numbers, arrays in _parts(pipe, subject, EFFORTS[effort], progress, seed):
                if out is not None:
                    drawn = {name: figures.save(figure, Path(out), f"sdxl-{name}") for name, figure in drawn.items()}
                for kind, part in (("figures", drawn), ("tables", tables), ("numbers", numbers)):
                    result[kind] |= part
                if out is not None:
                    _write(Path(out), result, arrays)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        raise LcsError(f"{model_id} ran out of memory; {OFFLOAD}, or give --effort quick") from None
    if out is not None:
        shutil.rmtree(Path(out) / "parts", ignore_errors=True)
    return result


def _identity(model_id: str, pipe: Pipe) -> str:
    """What the results depend on besides the settings: the model, the device and the code of this folder."""
    code = [sha256_of(path) for path in sorted(Path(__file__).parent.glob("*.py"))]
    return content_hash([model_id, folder_facts(model_id), mini_sha256(), str(pipe.device), str(pipe.unet.dtype), code])


def _check_folder(out: Path) -> None:
    """Hours of work must not end at a folder that cannot be written."""
    with atomic_write(out / ".writable") as temporary:
        temporary.write_text("")
    (out / ".writable").unlink()


def _write(out: Path, result: dict, arrays: dict[str, np.ndarray]) -> None:
    write_json(out / "sdxl-numbers.json", plain(result["numbers"]))
    write_json(out / "sdxl-tables.json", plain(result["tables"]))
    for name, array in arrays.items():
        with atomic_write(out / f"sdxl-{name}.safetensors") as temporary:
            save_file({"values": np.ascontiguousarray(array)}, temporary)


Part = tuple[dict, dict, dict, dict[str, np.ndarray]]  # figures, tables, numbers, arrays


def _parts(pipe: Pipe, subject: Subject, level: Effort, progress: bool, seed: int = 0) -> Iterator[Part]:
    """Pixel space, feature space, compositions, and what needs the counter: each as soon as it is done."""
    batch = 8 if subject.size <= 128 else 1  # images at once: one, with guidance, is what SDXL leaves room for
    pixel = run_pixel_study(
        pipe, subject.pixel_prompt, subject.locations, range(seed, seed + level.pixel_seeds), subject.steps,
        subject.guidance, subject.size, level.pixel_every, batch, progress,
    )  # fmt: skip
    drawn = {
        "gradients": figures.figure_gradients(pixel),
        "influence": figures.figure_influence(pixel),
        "word-maps": figures.figure_word_maps(pixel),
    }
    yield drawn, {"locality": pixel_rows(pixel)}, pixel_numbers(pixel), {
        "gradient-values": pixel.gradients, "influence-values": pixel.influence
    }  # fmt: skip
    seeds = range(seed, seed + level.feature_seeds)
    feature = run_feature_study(
        pipe, subject, seeds, level.feature_steps, subject.size, batch=batch, progress=progress
    )  # fmt: skip
    drawn = {
        "disentanglement": figures.figure_disentanglement(feature, subject),
        "concepts": figures.figure_all_concepts(feature),
        "concept-samples": figures.figure_concept_samples(feature),
        "attention-maps": figures.figure_attention_maps(feature, subject),
        "attention": figures.figure_attention(feature, subject),
        "composed-attention": figures.figure_composed_attention(feature),
    }
    tables = {"spaces": feature.table(), "layers": layer_rows(feature), "composed-attention": composed_rows(feature)}
    arrays = {"hidden-cosines": feature.hidden, "attention-cosines": feature.attention}
    yield drawn, tables, feature_numbers(feature), arrays
    yield {"compositions": _drawn_compositions(pipe, subject, feature, level, seed, progress)}, {}, {}, {}
    if subject is MINI:
        yield *_judged(pipe, feature, level, progress, seed), {}


def _drawn_compositions(
    pipe: Pipe, subject: Subject, feature: FeatureStudy, level: Effort, seed: int, progress: bool, seeds: int = 3
):
    prompts = [c.prompt for c in subject.compositions for _ in range(seeds)]
    batch = 32 if subject.size <= 128 else 1
    numbers = list(range(seed, seed + seeds)) * len(subject.compositions)
    with tqdm(total=len(prompts), disable=not progress, desc="compositions", unit="img") as bar:
        images = generate_many(pipe, prompts, numbers, level.steps, subject.guidance, batch=batch, done=bar.update)
    grid = images.reshape(len(subject.compositions), seeds, *images.shape[1:])
    return figures.figure_compositions(subject.compositions, grid, feature)


def _judged(pipe: Pipe, feature: FeatureStudy, level: Effort, progress: bool, seed: int) -> tuple[dict, dict, dict]:
    """What needs the counter: obedience, relation of success to disentanglement, the intervention."""
    from lcs.counter.detector import load_counter

    counter, n = load_counter(), level.prompts
    pairs = sum(map(len, PAIRS.values()))
    total = 2 * n + pairs * level.pair_seeds + 2 * n + (3 * n if level.three else 0)
    guidance = MINI.guidance
    with tqdm(total=total, disable=not progress, desc="judged images", unit="img") as bar:
        obey = [measure_obedience(pipe, counter, k, n, level.steps, guidance, seed, done=bar.update) for k in (1, 2)]
        relation = relate(
            pipe, counter, feature, range(seed, seed + level.pair_seeds), level.steps, guidance, bar.update
        )
        changed = [
            measure_intervention(
                pipe,
                counter,
                2,
                n,
                steps=level.steps,
                guidance=guidance,
                seed=seed,
                plain_images=obey[1].images,
                done=bar.update,
            )
        ]
        if level.three:
            changed.append(
                measure_intervention(
                    pipe, counter, 3, n, steps=level.steps, guidance=guidance, seed=seed, done=bar.update
                )
            )
    drawn = {
        "samples": figures.figure_samples(obey),
        "relation": figures.figure_relation(relation),
        "intervention": figures.figure_intervention(changed),
    }
    tables = {
        "obedience": [o.row() for o in obey],
        "relation": [p.row() for p in relation.pairs],
        "intervention": [row for c in changed for row in c.rows()],
    }
    rho, p = relation.spearman()
    numbers = {"relation_spearman": rho, "relation_p": p, "relation_interval": relation.interval()}
    for o in obey:
        numbers |= {
            f"obey_{o.objects}": o.row()["right"],
            f"obey_{o.objects}_interval": [o.row()["low"], o.row()["high"]],
        }
    for c in changed:
        for mode in c.local:
            row = c.paired(mode).row()
            numbers[f"intervention_{c.objects}_{mode}"] = row["difference"]
            numbers[f"intervention_{c.objects}_{mode}_interval"] = [row["low"], row["high"]]
    return drawn, tables, numbers


# ---- numbers ----------------------------------------------------------------------------------------


def pixel_rows(study: PixelStudy) -> list[dict]:
    squares = study.squares()
    return [
        {"location": i + 1, "cell": list(cell), "noise": figures.NOISE[p], "sigma": float(study.sigmas[step]),
         "share of image with 90% of the gradient": float(squares[p, i]),
         "dominant words": figures.dominant_label(study.dominant(step, i))}
        for i, cell in enumerate(study.cells) for p, step in enumerate(study.probed)
    ]  # fmt: skip


def pixel_numbers(study: PixelStudy) -> dict:
    similarity, squares = study.profile_similarity(), study.squares().mean(1)
    return {
        "pixel_square_share": [float(v) for v in squares],  # high, mid, low noise
        "influence_profile_cosine": float(similarity.mean()),
        "influence_profile_cosine_interval": interval(
            lambda seeds: study.profile_similarity(seeds).mean(), len(study.influence)
        ),
        "pixel_seeds": len(study.influence),
        "influence_profile_cosine_by_noise": [float(similarity[s]) for s in study.probed],
        "influence_cosine_high_noise": float(similarity[study.probed[0]]),
        "influence_cosine_high_noise_interval": interval(
            lambda seeds: study.profile_similarity(seeds)[study.probed[0]], len(study.influence)
        ),
    }


def layer_rows(study: FeatureStudy) -> list[dict]:
    """Per transformer block, in running order: within minus between, and their ratio (v2 Fig 5)."""
    columns = zip(study.blocks, study.gaps(), study.ratios(), strict=True)
    return [{"block": b, "group": group_of(b), "gap": float(g), "ratio": float(r)} for b, g, r in columns]


def feature_numbers(study: FeatureStudy) -> dict:
    gaps = study.gaps()
    best = int(np.argmax(gaps))
    rows, composed = {row["space"]: row for row in study.table()}, composed_rows(study)
    down, mid, up = (study.group(name) for name in ("down", "mid", "up"))
    own, others = (np.array([r[name] for r in composed]) for name in ("own", "others"))
    attention = [float(np.subtract(*within_between(level.mean(0), study.categories))) for level in study.attention]
    return {
        "transformer_blocks": len(study.blocks),
        "gap_down": rows["down blocks"]["gap"],
        "gap_up": rows["up blocks"]["gap"],
        "gap_mid": rows["mid blocks"]["gap"],
        "gap_latent": rows["latent"]["gap"],
        "gap_pixel": rows["pixel"]["gap"],
        "largest_gap_block": study.blocks[best],
        "largest_gap": float(gaps[best]),
        "gap_mid_over_output_interval": study.gap_interval(mid, (study.latent, study.pixel)),
        "gap_mid_over_blocks_interval": study.gap_interval(mid, (down, up)),
        "attention_gap_by_noise": attention,
        "attention_gap_fall_interval": study.gap_interval(study.attention[0].mean(0), (study.attention[-1].mean(0),)),
        "composed_attention_own": float(own.mean()),
        "composed_attention_others": float(others.mean()),
        "composed_attention_interval": interval(lambda chosen: (own - others)[chosen].mean(), len(own)),
    }


def composed_rows(study: FeatureStudy) -> list[dict]:
    """Per composed prompt and token: cosine with its own concept alone, mean with all others, and its rank."""
    names, rows = [c.name for c in study.concepts], []
    for key, cosines in study.composed.items():
        own, mean = names.index(key.split(": ")[1]), cosines.mean(1)
        rows.append({"token": key, "own": float(mean[own]), "others": float(np.delete(mean, own).mean()),
                     "rank": int((mean > mean[own]).sum()) + 1, "of": len(names)})  # fmt: skip
    return rows


def shown(rows: Sequence[dict]) -> list[dict[str, str]]:
    """Rows of a table as they are printed: three decimals, lists without brackets."""
    return [{key: _cell(value) for key, value in row.items()} for row in rows]


def _cell(value) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def plain(value):
    """Numbers as JSON knows them: NaN becomes None."""
    return json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
