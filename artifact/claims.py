"""The paper's claims and the rules by which the artifact judges them. Verdicts are computed, never written.

A claim looks at the numbers that steps returned. It says "came out", "partly" or "not" by its stated rule, or "not run"
if what it needs was not drawn. The paper's value stands beside ours in the report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise

CAME_OUT, PARTLY, NOT, NOT_RUN = "came out", "partly", "not", "not run"
INTERVENTION = "separate"  # the mode that is judged, chosen beforehand: the one the app shows
ENOUGH_SEEDS, ENOUGH_POINTS, ENOUGH_SAMPLES = 4, 6, 8  # fewer make no interval: at most "partly"


@dataclass(frozen=True)
class Finding:
    ours: str
    verdict: str
    interval: str = ""


@dataclass(frozen=True)
class Claim:
    id: str
    claim: str
    paper: str
    rule: str
    judge: Callable[[dict], Finding]  # raises KeyError if the numbers are not there


@dataclass(frozen=True)
class Verdict:
    id: str
    claim: str
    paper: str
    ours: str
    interval: str
    verdict: str
    rule: str


def judge(numbers: dict[str, dict]) -> list[Verdict]:
    """numbers: what each step returned, by step name."""
    verdicts = []
    for claim in CLAIMS:
        try:
            found = claim.judge(numbers)
        except KeyError as missing:
            found = Finding(f"needs {missing.args[0]}", NOT_RUN)
        verdicts.append(
            Verdict(claim.id, claim.claim, claim.paper, found.ours, found.interval, found.verdict, claim.rule)
        )
    return verdicts


def as_rows(verdicts: list[Verdict]) -> list[dict]:
    return [asdict(v) for v in verdicts]


def as_text(verdicts: list[Verdict]) -> str:
    """For the terminal: one line per claim."""
    width = max(len(v.claim) for v in verdicts)
    lines = [
        f"{v.verdict:>9}  {v.claim:<{width}}  paper: {v.paper}; ours: {v.ours} {v.interval}".rstrip() for v in verdicts
    ]
    counts = {name: sum(v.verdict == name for v in verdicts) for name in (CAME_OUT, PARTLY, NOT, NOT_RUN)}
    return "\n".join(lines) + "\n" + ", ".join(f"{n} {name}" for name, n in counts.items())


# ---- rules ----------------------------------------------------------------------------------------


def _graded(ok: bool, nearly: bool) -> str:
    return CAME_OUT if ok else PARTLY if nearly else NOT


def _k_max(run: str) -> Callable[[dict], dict]:
    def look(numbers: dict) -> dict:
        for step in ("table1", "table2"):
            if run in numbers.get(step, {}):
                return numbers[step][run]
        drawn = any(step in numbers for step in ("table1", "table2"))
        raise KeyError(f"weights of {run}" if drawn else "table1 or table2")

    return look


def _reaches(run: str, wanted: int, partly: int) -> Callable[[dict], Finding]:
    """K_max of at least `wanted` on enough samples; partly from `partly` on. Where that is beyond training, it also has
    to be more likely than not: the median of the rule under the samples' posterior is beyond training, too."""

    def rule(numbers: dict) -> Finding:
        found = _k_max(run)(numbers)
        likely = wanted <= found["objects"] or found["median"] > found["objects"]
        enough = likely and found["samples"] >= ENOUGH_SAMPLES
        verdict = _graded(found["k_max"] >= wanted and enough, found["k_max"] >= partly)
        return Finding(f"K_max {found['label']}", verdict, f"{found['low']}-{found['high']}")

    return rule


def _stays_below(run: str, most: int, partly: int) -> Callable[[dict], Finding]:
    """K_max of at most `most` on enough samples, but of at least 1: a model that cannot even draw one object shows
    little by failing."""

    def rule(numbers: dict) -> Finding:
        found = _k_max(run)(numbers)
        enough = found["samples"] >= ENOUGH_SAMPLES
        verdict = _graded(1 <= found["k_max"] <= most and enough, found["k_max"] <= partly)
        return Finding(f"K_max {found['label']}", verdict, f"{found['low']}-{found['high']}")

    return rule


def _in_between(numbers: dict) -> Finding:
    found = [_k_max(f"{name}-m3")(numbers) for name in ("grid-single", "grid-random", "grid-all")]
    single, random, everything = (f["k_max"] for f in found)
    enough = min(f["samples"] for f in found) >= ENOUGH_SAMPLES
    verdict = _graded(single < random < everything and enough, single < everything)
    intervals = ", ".join(f"{f['low']}-{f['high']}" for f in found)
    return Finding(f"{single}, {random}, {everything}", verdict, intervals)


def _at_zero(run: str, ok: Callable[[int], bool], nearly: Callable[[int], bool]) -> Callable[[dict], Finding]:
    """The 95th percentile of what is drawn for K = 0, on enough samples; the interval is of the mean."""

    def rule(numbers: dict) -> Finding:
        found = _k_max(run)(numbers)
        zero, (low, high) = found["drawn_at_0"], found["mean_at_0"]
        verdict = _graded(ok(zero["p95"]) and found["samples"] >= ENOUGH_SAMPLES, nearly(zero["p95"]))
        return Finding(f"{zero['p5']}-{zero['p95']}", verdict, f"mean {low:.1f}-{high:.1f}")

    return rule


def _grows_with_training(numbers: dict) -> Finding:
    found = {m: numbers["table1"].get(f"grid-all-m{m}") for m in range(1, 7)}
    known = {m: f for m, f in found.items() if f}
    if len(known) < 3:
        raise KeyError("weights of grid-all for three or more M")
    values = [f["k_max"] for f in known.values()]
    enough = min(f["samples"] for f in known.values()) >= ENOUGH_SAMPLES
    never_falls = all(b >= a for a, b in pairwise(values))
    verdict = _graded(never_falls and values[-1] > values[0] and enough, values[-1] > values[0])
    text = ", ".join(f"M={m}: {f['k_max']}" for m, f in known.items())
    return Finding(text, verdict, ", ".join(f"{f['low']}-{f['high']}" for f in known.values()))


def _more_local_than(better: str, worse: str) -> Callable[[dict], Finding]:
    def rule(numbers: dict) -> Finding:
        maps = numbers.get("fig2", {})
        for name in (better, worse):
            if name not in maps:
                raise KeyError(f"fig2 of {name}")
        a, b = maps[better], maps[worse]
        text = f"{a['conditional_locality']:.2f} against {b['conditional_locality']:.2f}"
        enough = min(a["seeds"], b["seeds"]) >= ENOUGH_SEEDS
        verdict = _graded(enough and a["low"] > b["high"], a["conditional_locality"] > b["conditional_locality"])
        return Finding(text, verdict, f"{a['low']:.2f}-{a['high']:.2f}, {b['low']:.2f}-{b['high']:.2f}")

    return rule


def _correlation(numbers: dict) -> Finding:
    found = numbers["scatter"]
    if "pearson" not in found:
        raise KeyError("three different points in the scatter")
    text = f"r = {found['pearson']:.2f} (n = {found['n']})"
    verdict = _graded(found["n"] >= ENOUGH_POINTS and found["low"] > 0, found["pearson"] > 0)
    return Finding(text, verdict, f"{found['low']:.2f} to {found['high']:.2f}")


def _local_at_both_ends(numbers: dict) -> Finding:
    found, cifar = [numbers["fig2"][name] for name in ("grid-all-m3", "grid-single-m3")], numbers["fig12"]["area_high"]
    high, low = (max(f[name] for f in found) for name in ("area_high", "area_low"))
    each = " and ".join(f"{f['area_high']:.1%}" for f in found)
    text = f"{each} (high), {low:.1%} (low noise); CIFAR-10 {cifar:.0%} (high)"
    return Finding(text, _graded(max(high, low) <= 0.1 and high < cifar / 3, max(high, low) <= 0.25 and high < cifar))


def _wider_in_between(numbers: dict) -> Finding:
    found = numbers["fig2"]["grid-all-m3"]
    between = max((a for a, s in zip(found["area"], found["sigmas"], strict=True) if 0.2 <= s <= 5), default=None)
    if between is None:
        raise KeyError("noise levels between 0.2 and 5")
    ends = max(found["area_high"], found["area_low"])
    return Finding(f"{between:.1%} against {ends:.1%} at the ends", _graded(between > 2 * ends, between > ends))


def _locality_is_lost(numbers: dict) -> Finding:
    high, low = numbers["fig12"]["area_high"], numbers["fig12"]["area_low"]
    verdict = _graded(high >= 0.5 and high > 5 * low, high >= 0.25 and high > 5 * low)
    return Finding(f"{high:.0%} of the image against {low:.0%}", verdict)


def _color_features(numbers: dict) -> Finding:
    for run in ("color-m5", "color-m3"):
        if run in numbers.get("fig5", {}):
            found = numbers["fig5"][run]
            text = f"{run}: {found['feature_space']:.2f} in early encoder layers, {found['image']:.2f} in the image"
            lower = found["feature_space"] < found["image"]
            return Finding(text, _graded(lower and abs(found["feature_space"]) < 0.3, lower))
    raise KeyError("fig5 of a colour model")


def _sdxl_features(numbers: dict) -> Finding:
    found = numbers["sdxl"]
    text = f"{found['gap_mid']:.2f} (mid), {found['gap_latent']:.2f} (latents), {found['gap_pixel']:.2f} (pixels)"
    most = max(found["gap_latent"], found["gap_pixel"])
    return Finding(text, _graded(found["gap_mid"] > most, found["gap_mid"] > found["gap_pixel"]))


def _sdxl_arch(numbers: dict) -> Finding:
    found = numbers["sdxl"]
    down, mid, up = (found[f"gap_{name}"] for name in ("down", "mid", "up"))
    text = f"{down:.2f} (down), {mid:.2f} (mid), {up:.2f} (up); largest at {found['largest_gap_block']}"
    return Finding(text, _graded(mid > down and mid > up, mid > up or mid > down))


def _sdxl_pixels(numbers: dict) -> Finding:
    cosine = numbers["sdxl"]["influence_profile_cosine"]
    return Finding(f"cosine {cosine:.2f} between locations", _graded(cosine > 0.8, cosine > 0.5))


def _sdxl_attention(numbers: dict) -> Finding:
    found = numbers["sdxl"]
    own, others = found["composed_attention_own"], found["composed_attention_others"]
    return Finding(
        f"{own:.2f} with itself, {others:.2f} with others", _graded(own > 0.5 and own > 2 * others, own > others)
    )


def _sdxl_relation(numbers: dict) -> Finding:
    found = numbers["sdxl"]
    if found["relation_spearman"] is None:
        raise KeyError("compositions that differ in success")
    rho = found["relation_spearman"]  # of success and cosine: disentangled concepts have a low one
    text = f"rank correlation {rho:.2f} of success and cosine, p = {found['relation_p']:.2g}"
    return Finding(text, _graded(rho < 0 and found["relation_p"] < 0.05, rho < 0))


def _sdxl_intervention(numbers: dict) -> Finding:
    found = numbers["sdxl"]
    name = f"intervention_2_{INTERVENTION}"
    if name not in found:
        raise KeyError("the intervention on two objects")
    low, high = found[f"{name}_interval"]
    verdict = _graded(low > 0, found[name] > 0)
    return Finding(f"{found[name]:+.0%} of prompts drawn right ({INTERVENTION})", verdict, f"{low:+.0%} to {high:+.0%}")


def _theory(test: Callable[[dict], tuple[str, str]]) -> Callable[[dict], Finding]:
    return lambda numbers: Finding(*test(numbers["theory"]))


def _counted(rule: str) -> str:
    return f"{rule}; at most partly on fewer than {ENOUGH_SAMPLES} samples per K"


def _beyond(rule: str) -> str:
    return _counted(rule) + ", or if the posterior median of K_max is not beyond the objects of training"


CLAIMS = [
    Claim("grid-all", "All locations labelled: length-generalizes beyond the 3 objects of training", "9 (v1), 7 (v2)",
          _beyond("K_max of grid-all-m3 at least 6; partly: at least 4"), _reaches("grid-all-m3", 6, 4)),
    Claim("grid-single", "One location labelled: does not", "1+(0-2)",
          _counted("K_max of grid-single-m3 1 or 2; partly: 0 or 3"), _stays_below("grid-single-m3", 2, 3)),
    Claim("list-all", "The same locations as a list: does not", "fails beyond 3 (v2)",
          _counted("K_max of list-all-m3 from 1 to 3; partly: 0 or 4"), _stays_below("list-all-m3", 3, 4)),
    Claim("local", "Forcing locality by architecture restores it (one labelled)", "9+(0-2)",
          _beyond("K_max of grid-single-local-m3 at least 6; partly: at least 4"),
          _reaches("grid-single-local-m3", 6, 4)),
    Claim("list-local", "Forcing locality by architecture restores it (list)", "restored (v2)",
          _beyond("K_max of list-all-local-m3 at least 6; partly: at least 4"), _reaches("list-all-local-m3", 6, 4)),
    Claim("single-object", "Trained on one object: the standard model stays at one", "1",
          _counted("K_max of grid-all-m1 is 1; partly: 0 or 2"), _stays_below("grid-all-m1", 1, 2)),
    Claim("single-object-local", "Trained on one object: the local model draws several", "6",
          _beyond("K_max of grid-single-local-m1 at least 3; partly: at least 2"),
          _reaches("grid-single-local-m1", 3, 2)),
    Claim("more-objects", "More objects in training, more beyond it", "1, 5, 9, 10, 10, 11",
          _counted("K_max of grid-all for three or more M never falls with M and rises in all; partly: rises from the "
                   "first to the last"), _grows_with_training),
    Claim("random", "A random number labelled lies between one and all", "1, 5, 9 (M = 3)",
          _counted("K_max of single < random < all at M = 3; partly: single < all"), _in_between),
    Claim("drop-one", "All but one labelled: draws what it was trained on", "3+(0-1) (M = 3)",
          _counted("K_max of grid-drop-one-m3 at least 3; partly: at least 2"), _reaches("grid-drop-one-m3", 3, 2)),
    Claim("zero-all", "Asked for nothing, a model of full labels draws nothing", "0",
          _counted("grid-all-m3, K = 0: 95th percentile 0; partly: at most 1"),
          _at_zero("grid-all-m3", lambda n: n == 0, lambda n: n <= 1)),
    Claim("zero-single", "Asked for nothing, a model of single labels still draws", "0-3",
          _counted("grid-single-m3, K = 0: 95th percentile at least 2; partly: at least 1"),
          _at_zero("grid-single-m3", lambda n: n >= 2, lambda n: n >= 1)),
    Claim("zero-random", "Asked for nothing, a model of randomly many labels still draws", "0-3",
          _counted("grid-random-m3, K = 0: 95th percentile at least 2; partly: at least 1"),
          _at_zero("grid-random-m3", lambda n: n >= 2, lambda n: n >= 1)),
    Claim("zero-drop-one", "Asked for nothing, a model of all-but-one labels draws at most one", "0-1",
          _counted("grid-drop-one-m3, K = 0: 95th percentile at most 1; partly: at most 2"),
          _at_zero("grid-drop-one-m3", lambda n: n <= 1, lambda n: n <= 2)),
    Claim("color-3", "Colours length-generalize a little (1-3 objects)", "4",
          _beyond("K_max of color-m3 at least 4; nothing less is partly"), _reaches("color-m3", 4, 4)),
    Claim("color-5", "Colours length-generalize a little (1-5 objects)", "7",
          _beyond("K_max of color-m5 at least 7; partly: 6"), _reaches("color-m5", 7, 6)),
    Claim("locality-single", "The model that composes has a more local conditional score (against one label)", "Fig 2",
          "conditional locality of grid-all-m3 above grid-single-m3, intervals (4 or more seeds) apart; partly: above",
          _more_local_than("grid-all-m3", "grid-single-m3")),
    Claim("locality-list", "The model that composes has a more local conditional score (against a list)", "Fig 2",
          "conditional locality of grid-all-m3 above list-all-m3, intervals (4 or more seeds) apart; partly: above",
          _more_local_than("grid-all-m3", "list-all-m3")),
    Claim("scatter", "Length generalization goes with conditional locality", "v2 Fig 2, correlated",
          "Pearson r over 6 or more checkpoints above 0 with its 95% interval; partly: r above 0", _correlation),
    Claim("pixels", "Pixel locality is kept at high and at low noise (CLEVR), unlike CIFAR-10", "v1 Fig 2, 10",
          "90% squares at conditioned pixels of grid-all-m3 and grid-single-m3 at most a tenth of the image at sigma > "
          "5 and < 0.2, and at high noise below a third of CIFAR-10's; partly: at most a quarter, and below CIFAR-10's",
          _local_at_both_ends),
    Claim("pixels-between", "Pixel locality is lost at intermediate noise (CLEVR)", "v1 Fig 10",
          "largest 90% square at conditioned pixels of grid-all-m3 at sigma 0.2 to 5 more than twice those above and "
          "below; partly: larger",
          _wider_in_between),
    Claim("cifar", "Pixel locality is lost at high noise (CIFAR-10)", "Fig 12",
          "90% square at sigma > 5 at least half of the image, and 5 times that at sigma < 0.2; partly: at least a "
          "quarter, and 5 times",
          _locality_is_lost),
    Claim("color-features", "Colours are disentangled in early encoder layers", "Fig 5",
          "mean off-diagonal cosine there below 0.3 and below the image's; partly: below the image's", _color_features),
    Claim("sdxl-features", "SDXL-class model: concepts group by category in mid blocks", "v1 Fig 7, v2 Fig 5",
          "within minus between category cosine larger in mid blocks than in latents and pixels; partly: pixels only",
          _sdxl_features),
    Claim("sdxl-arch", "SDXL-class model: grouping is strongest near the bottleneck", "v2 Fig 5: ratio arches",
          "within minus between larger in mid blocks than in down and in up blocks; partly: than in one of them",
          _sdxl_arch),
    Claim("sdxl-pixels", "SDXL-class model: in pixel space words act everywhere alike", "v1 Fig 6, v2 Fig 4",
          "mean cosine of the words' influence at two locations above 0.8; partly: above 0.5", _sdxl_pixels),
    Claim("sdxl-attention", "SDXL-class model: a token in a composed prompt attends as alone", "v1 Fig 7",
          "cosine with its own concept above 0.5 and twice that with others; partly: above others", _sdxl_attention),
    Claim("sdxl-relation", "SDXL-class model: disentangled concepts compose more successfully", "v1 Fig 7, examples",
          "rank correlation of success and cosine within kinds of pairs below 0 with p < 0.05; partly: below 0",
          _sdxl_relation),
    Claim("sdxl-local", "Beyond the paper: locality forced at inference helps composition", "not in the paper",
          "gain on two-object prompts (mode separate) above 0 with its 95% interval; partly: above 0",
          _sdxl_intervention),
    Claim("lemma-1", "Lemma 1: a composition has a local conditional score", "exact",
          "relative score error at most 1e-9 on a composition, above 1e-2 on another family",
          _theory(lambda n: (f"{n['lemma1_error']:.0e} against {n['lemma1_other']:.1f}",
                             _graded(n["lemma1_error"] <= 1e-9 and n["lemma1_other"] > 1e-2, False)))),
    Claim("lemma-1-premise", "Lemma 1 holds under Definition 2 alone", "stated so",
          "score error at most 1e-9 also if uncontrolled pixels are coupled; partly: only if they are not",
          _theory(lambda n: (f"{n['background_coupled']:.1e} with coupling, {n['background_uncoupled']:.0e} without",
                             _graded(n["background_coupled"] <= 1e-9, n["background_uncoupled"] <= 1e-9)))),
    Claim("lemma-2", "Lemma 2: KL from a composition is at most the sum of the errors", "bound",
          "bound minus KL at least -1e-9 everywhere",
          _theory(lambda n: (f"smallest slack {n['lemma2_slack']:.1e} nats",
                             _graded(n["lemma2_slack"] >= -1e-9, False)))),
    Claim("claim-1", "Claim 1: KL falls with noise at the stated rate", "exact",
          "KL never rises and the slope agrees to 1e-6; partly: never rises",
          _theory(lambda n: (f"slope error {n['claim1_slope_error']:.0e}",
                             _graded(n["claim1_falls"] and n["claim1_slope_error"] < 1e-6, n["claim1_falls"])))),
    Claim("lemma-3", "Lemma 3: the errors fall with noise", "exact", "no error rises with noise",
          _theory(lambda n: ("fall" if n["lemma3_falls"] else "rise", _graded(n["lemma3_falls"], False)))),
    Claim("lemma-1-converse", "Lemma 1, converse: what the score misses of being local is the divergence", "iff (v2)",
          "integral over noise and KL differ by at most 1e-6 nats",
          _theory(lambda n: (f"differ by {n['converse_error']:.0e} nats",
                             _graded(n["converse_error"] <= 1e-6, False)))),
    Claim("corollary-1", "Corollary 1: a composition in features is local there", "exact",
          "for two transforms, relative score error in features at most 1e-9, above 1e-2 in pixels",
          _theory(lambda n: (f"{n['corollary1_error']:.0e} in features, {n['corollary1_pixels']:.1f} in pixels",
                             _graded(n["corollary1_error"] <= 1e-9 and n["corollary1_pixels"] > 1e-2, False)))),
    Claim("claim-2", "Claim 2: transform and noise commute better the more noise", "always",
          "the divergence falls at every noise level, or is zero, for every transform; partly: at high noise for one",
          _theory(lambda n: (_claim2_text(n), _graded(n["claim2_holds"], any(n["claim2_falls_beyond"]))))),
]  # fmt: skip


def _claim2_text(n: dict) -> str:
    parts = []
    for name, beyond, largest in zip(n["claim2_names"], n["claim2_falls_beyond"], n["claim2_largest"], strict=True):
        fall = "never falls" if beyond is None else f"falls beyond t = {beyond:.2g}"
        parts.append(f"{name}: " + ("zero" if largest < 1e-12 else fall))
    return "; ".join(parts)
