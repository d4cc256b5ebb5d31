"""The rules by which claims are judged: each looks at the numbers that steps returned and says what was found.

A rule says "came out", "partly" or "not", and gives our value with a 95% interval: of K_max from the posterior of its
samples, of the others by bootstrap over what was drawn (seeds, colours, concepts, prompts, models).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

CAME_OUT, PARTLY, NOT, NOT_RUN = "came out", "partly", "not", "not run"
INTERVENTION = "separate"  # the mode that is judged, chosen beforehand: the one the app shows
ENOUGH_SEEDS, ENOUGH_POINTS, ENOUGH_SAMPLES = 4, 6, 8  # fewer make no interval: at most "partly"


@dataclass(frozen=True)
class Finding:
    ours: str
    verdict: str
    interval: str = ""


class NotRun(Exception):
    """What a claim needs was not drawn: the name of it."""


class Steps(dict):
    """Numbers by step; a step that was not run says so. (A number that a step did not return is an error: KeyError.)"""

    def __missing__(self, step: str) -> dict:
        raise NotRun(step)


def graded(ok: bool, nearly: bool) -> str:
    return CAME_OUT if ok else PARTLY if nearly else NOT


def k_max(run: str) -> Callable[[dict], dict]:
    def look(numbers: dict) -> dict:
        for step in ("table1", "table2"):
            if run in numbers.get(step, {}):
                return numbers[step][run]
        drawn = any(step in numbers for step in ("table1", "table2"))
        raise NotRun(f"weights of {run}" if drawn else "table1 or table2")

    return look


def reached(found: dict) -> str:
    """K_max as the paper prints it; where extras alone keep it lower, also what it is without judging them."""
    more = found["in_place_only"]
    return f"K_max {found['label']}" + (f"; {more} in place" if more != found["k_max"] else "")


def reaches(run: str, wanted: int, partly: int) -> Callable[[dict], Finding]:
    """K_max of at least `wanted` on enough samples; partly from `partly` on. Where that is beyond training, it also has
    to be more likely than not: the median of the rule under the samples' posterior is beyond training, too."""

    def rule(numbers: dict) -> Finding:
        found = k_max(run)(numbers)
        likely = wanted <= found["objects"] or found["median"] > found["objects"]
        enough = likely and found["samples"] >= ENOUGH_SAMPLES
        verdict = graded(found["k_max"] >= wanted and enough, found["k_max"] >= partly)
        return Finding(reached(found), verdict, f"{found['low']}-{found['high']}")

    return rule


def stays_below(run: str, most: int, partly: int) -> Callable[[dict], Finding]:
    """K_max of at most `most` on enough samples, but of at least 1: a model that cannot even draw one object shows
    little by failing. Partly up to `partly`, if the interval does not say that `most` is surpassed."""

    def rule(numbers: dict) -> Finding:
        found = k_max(run)(numbers)
        enough = found["samples"] >= ENOUGH_SAMPLES
        verdict = graded(1 <= found["k_max"] <= most and enough, found["k_max"] <= partly and found["low"] <= most)
        return Finding(reached(found), verdict, f"{found['low']}-{found['high']}")

    return rule


def in_between(numbers: dict) -> Finding:
    found = [k_max(f"{name}-m3")(numbers) for name in ("grid-single", "grid-random", "grid-all")]
    single, random, everything = (f["k_max"] for f in found)
    likely = found[0]["median"] < found[1]["median"] < found[2]["median"]
    enough = likely and min(f["samples"] for f in found) >= ENOUGH_SAMPLES
    verdict = graded(single < random < everything and enough, single < everything)
    intervals = ", ".join(f"{f['low']}-{f['high']}" for f in found)
    return Finding(f"{single}, {random}, {everything}", verdict, intervals)


def at_zero(run: str, ok: Callable[[int], bool], nearly: Callable[[int], bool]) -> Callable[[dict], Finding]:
    """The 95th percentile of what is drawn for K = 0, on enough samples; the interval is of the mean."""

    def rule(numbers: dict) -> Finding:
        found = k_max(run)(numbers)
        zero, (low, high) = found["drawn_at_0"], found["mean_at_0"]
        verdict = graded(ok(zero["p95"]) and found["samples"] >= ENOUGH_SAMPLES, nearly(zero["p95"]))
        return Finding(f"{zero['p5']}-{zero['p95']}", verdict, f"mean {low:.1f}-{high:.1f}")

    return rule


def grows_with_training(experiment: str, beyond_from: int) -> Callable[[dict], Finding]:
    """K_max of an experiment over three or more M never falls and rises in all, so does its posterior median, and from
    M = `beyond_from` on it is above M."""

    def rule(numbers: dict) -> Finding:
        known = _of_every_m(numbers, experiment)
        if len(known) < 3:
            raise NotRun(f"weights of {experiment} for three or more M")

        def grows(kind: str) -> bool:
            ordered = [f[kind] for f in known.values()]
            return all(b >= a for a, b in pairwise(ordered)) and ordered[-1] > ordered[0]

        values = [f["k_max"] for f in known.values()]
        enough = min(f["samples"] for f in known.values()) >= ENOUGH_SAMPLES
        beyond = all(f["k_max"] > m for m, f in known.items() if m >= beyond_from)
        verdict = graded(grows("k_max") and grows("median") and beyond and enough, values[-1] > values[0])
        return _by_m(known, verdict)

    return rule


def never_grows(experiment: str, most: int, partly: int) -> Callable[[dict], Finding]:
    """K_max of an experiment is from 1 to `most` at every M, on enough samples of each; partly: at most `partly`."""

    def rule(numbers: dict) -> Finding:
        known = _of_every_m(numbers, experiment)
        if len(known) < 3:
            raise NotRun(f"weights of {experiment} for three or more M")
        values = [f["k_max"] for f in known.values()]
        enough = min(f["samples"] for f in known.values()) >= ENOUGH_SAMPLES
        return _by_m(known, graded(min(values) >= 1 and max(values) <= most and enough, max(values) <= partly))

    return rule


def _of_every_m(numbers: dict, experiment: str) -> dict[int, dict]:
    """What was counted of an experiment, by the M of its training."""
    drawn = [numbers[step] for step in ("table1", "table2") if step in numbers]
    if not drawn:
        raise NotRun("table1 or table2")
    known = {m: table[f"{experiment}-m{m}"] for m in range(1, 7) for table in drawn if f"{experiment}-m{m}" in table}
    return dict(sorted(known.items()))


def _by_m(known: dict[int, dict], verdict: str) -> Finding:
    text = ", ".join(f"M={m}: {f['k_max']}" for m, f in known.items())
    return Finding(text, verdict, ", ".join(f"{f['low']}-{f['high']}" for f in known.values()))


def more_local_than(better: str, worse: str) -> Callable[[dict], Finding]:
    def rule(numbers: dict) -> Finding:
        a, b = map_of(numbers, better), map_of(numbers, worse)
        text = f"{a['conditional_locality']:.2f} against {b['conditional_locality']:.2f}"
        verdict = graded(seeded(a, b) and a["low"] > b["high"], a["conditional_locality"] > b["conditional_locality"])
        return Finding(text, verdict, f"{a['low']:.2f}-{a['high']:.2f}, {b['low']:.2f}-{b['high']:.2f}")

    return rule


def correlation(numbers: dict) -> Finding:
    found, everything = numbers["scatter"]["learned"], numbers["scatter"]["all"]
    if "pearson" not in found:
        raise NotRun("three different points in the scatter")
    text = f"r = {found['pearson']:.2f} (n = {found['n']}); with the local models {everything['pearson']:.2f}"
    verdict = graded(found["n"] >= ENOUGH_POINTS and found["low"] > 0, found["pearson"] > 0)
    return Finding(text, verdict, f"{found['low']:.2f} to {found['high']:.2f}")


def map_of(numbers: dict, name: str) -> dict:
    if name not in numbers["fig2"]:
        raise NotRun(f"fig2 of {name}")
    return numbers["fig2"][name]


def area(found: dict, noise: str) -> float:
    """Share of the image in the 90% square at high, low or intermediate ("between") noise"""
    if found[f"area_{noise}"] is None:
        raise NotRun(f"measurements at {noise} noise")
    return found[f"area_{noise}"]


def span(found: dict, name: str, form: str = ".2f") -> str:
    low, high = found[f"{name}_interval"]
    return f"{low:{form}} to {high:{form}}"


def seeded(*found: dict) -> bool:
    return min(f["seeds"] for f in found) >= ENOUGH_SEEDS


def local_at_both_ends(numbers: dict) -> Finding:
    found, cifar = [map_of(numbers, name) for name in ("grid-all-m3", "grid-single-m3")], numbers["fig12"]
    high, low = (max(area(f, noise) for f in found) for noise in ("high", "low"))
    centre = max(area(f["centre"], "high") for f in found)
    spans = ", ".join(span(f, "area_high", ".1%") for f in (*found, cifar))
    enough, cifar = seeded(*found, cifar), area(cifar, "high")
    each, unasked = (
        " and ".join(f"{f['area_high']:.1%}" for f in places) for places in (found, [f["centre"] for f in found])
    )
    text = f"{each} (high), {low:.1%} (low noise); where nothing is asked {unasked}; CIFAR-10 {cifar:.0%} (high)"
    local = max(high, low, centre) <= 0.1 and high < cifar / 3
    return Finding(text, graded(local and enough, max(high, low) <= 0.25 and high < cifar), spans)


def list_is_less_local(numbers: dict) -> Finding:
    """v2: the list's model lacks pixel locality, too; the grid's has it."""
    grid, listed = map_of(numbers, "grid-all-m3"), map_of(numbers, "list-all-m3")
    a, b = area(grid, "high"), area(listed, "high")
    apart = listed["area_high_interval"][0] > grid["area_high_interval"][1]
    spans = f"{span(listed, 'area_high', '.1%')}, {span(grid, 'area_high', '.1%')}"
    verdict = graded(b > 0.25 and apart and seeded(grid, listed), b > a)
    return Finding(f"{b:.1%} of the image (list) against {a:.1%} (grid)", verdict, spans)


def more_energy_at_low_noise(numbers: dict) -> Finding:
    found = [map_of(numbers, name) for name in ("grid-all-m3", "grid-single-m3")]
    if any(f[name] is None for f in found for name in ("energy_high", "energy_low")):
        raise NotRun("measurements at high and low noise")
    ratios = [f["energy_low"] / f["energy_high"] for f in found]
    verdict = graded(min(ratios) > 2 and seeded(*found), max(ratios) > 1)
    return Finding(" and ".join(f"{r:,.0f} times" for r in ratios), verdict, "means over seeds, no interval")


def wider_in_between(numbers: dict) -> Finding:
    found = map_of(numbers, "grid-all-m3")
    between, ends = area(found, "between"), max(area(found, "high"), area(found, "low"))
    verdict = graded(between > 2 * ends and seeded(found), between > ends)
    return Finding(f"{between:.1%} against {ends:.1%} at the ends", verdict, span(found, "area_between", ".1%"))


def locality_is_lost(numbers: dict) -> Finding:
    found = numbers["fig12"]
    high, low = area(found, "high"), area(found, "low")
    verdict = graded(high >= 0.5 and high > 5 * low and seeded(found), high >= 0.25 and high > 5 * low)
    return Finding(f"{high:.0%} of the image against {low:.0%}", verdict, span(found, "area_high", ".0%"))


def color_features(numbers: dict) -> Finding:
    for run in ("color-m5", "color-m3"):
        if run in numbers.get("fig5", {}):
            found = numbers["fig5"][run]
            text = f"{run}: {found['feature_space']:.2f} in early encoder layers, {found['image']:.2f} in the image"
            lower = found["feature_space"] < found["image"]
            spans = f"{span(found, 'feature_space')}, {span(found, 'image')}"
            return Finding(text, graded(lower and abs(found["feature_space"]) < 0.3, lower), spans)
    raise NotRun("fig5 of a colour model")


def sdxl_features(numbers: dict) -> Finding:
    found = numbers["sdxl"]
    text = f"{found['gap_mid']:.2f} (mid), {found['gap_latent']:.2f} (latents), {found['gap_pixel']:.2f} (pixels)"
    most = max(found["gap_latent"], found["gap_pixel"])
    verdict = graded(found["gap_mid"] > most, found["gap_mid"] > found["gap_pixel"])
    return Finding(text, verdict, f"mid above both by {span(found, 'gap_mid_over_output')}")


def sdxl_arch(numbers: dict) -> Finding:
    found = numbers["sdxl"]
    down, mid, up = (found[f"gap_{name}"] for name in ("down", "mid", "up"))
    text = f"{down:.2f} (down), {mid:.2f} (mid), {up:.2f} (up); largest at {found['largest_gap_block']}"
    verdict = graded(mid > down and mid > up, mid > up or mid > down)
    return Finding(text, verdict, f"mid above both by {span(found, 'gap_mid_over_blocks')}")


def sdxl_pixels(numbers: dict) -> Finding:
    found = numbers["sdxl"]
    cosine, enough = found["influence_cosine_high_noise"], found["pixel_seeds"] >= ENOUGH_SEEDS
    verdict = graded(cosine > 0.8 and enough, cosine > 0.5)
    text = (
        f"cosine {cosine:.2f} between locations at high noise, {found['influence_profile_cosine']:.2f} over all steps"
    )
    return Finding(text, verdict, span(found, "influence_cosine_high_noise"))


def sdxl_attention_noise(numbers: dict) -> Finding:
    found = numbers["sdxl"]
    high, *_, low = found["attention_gap_by_noise"]
    verdict = graded(high > 2 * low, high > low)
    return Finding(f"{high:.2f} at high noise, {low:.2f} at low", verdict, span(found, "attention_gap_fall"))


def sdxl_attention(numbers: dict) -> Finding:
    found = numbers["sdxl"]
    own, others = found["composed_attention_own"], found["composed_attention_others"]
    verdict = graded(own > 0.5 and own > 2 * others, own > others)
    text = f"{own:.2f} with itself, {others:.2f} with others"
    return Finding(text, verdict, f"above others by {span(found, 'composed_attention')}")


def sdxl_relation(numbers: dict) -> Finding:
    found = numbers["sdxl"]
    if found["relation_spearman"] is None:
        raise NotRun("compositions that differ in success")
    rho = found["relation_spearman"]  # of success and cosine: disentangled concepts have a low one
    text = f"rank correlation {rho:.2f} of success and cosine, p = {found['relation_p']:.2g}"
    return Finding(text, graded(rho < 0 and found["relation_p"] < 0.05, rho < 0), span(found, "relation"))


def sdxl_intervention(numbers: dict) -> Finding:
    found = numbers["sdxl"]
    name = f"intervention_2_{INTERVENTION}"
    if name not in found:
        raise NotRun("the intervention on two objects")
    low, high = found[f"{name}_interval"]
    verdict = graded(low > 0, found[name] > 0)
    return Finding(f"{found[name]:+.0%} of prompts drawn right ({INTERVENTION})", verdict, f"{low:+.0%} to {high:+.0%}")


def theory(test: Callable[[dict], tuple[str, str]]) -> Callable[[dict], Finding]:
    return lambda numbers: Finding(*test(numbers["theory"]), "computed, nothing drawn")


def claim2_text(n: dict) -> str:
    parts = []
    for name, beyond, largest in zip(n["claim2_names"], n["claim2_falls_beyond"], n["claim2_largest"], strict=True):
        fall = "never falls" if beyond is None else f"falls beyond t = {beyond:.2g}"
        parts.append(f"{name}: " + ("zero" if largest < 1e-12 else fall))
    return "; ".join(parts)
