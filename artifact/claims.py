"""The paper's claims, each with the rule by which the artifact judges it. Verdicts are computed, never written.

A claim looks at the numbers that steps returned. It says "came out", "partly" or "not" by its stated rule, or "not run"
if what it needs was not drawn. The paper's value stands beside ours in the report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from artifact.rules import (
    CAME_OUT,
    ENOUGH_SAMPLES,
    NOT,
    NOT_RUN,
    PARTLY,
    Finding,
    NotRun,
    Steps,
    at_zero,
    claim2_text,
    color_features,
    correlation,
    graded,
    grows_with_training,
    in_between,
    list_is_less_local,
    local_at_both_ends,
    locality_is_lost,
    more_energy_at_low_noise,
    more_local_than,
    never_grows,
    reaches,
    sdxl_arch,
    sdxl_attention,
    sdxl_attention_noise,
    sdxl_features,
    sdxl_intervention,
    sdxl_pixels,
    sdxl_relation,
    stays_below,
    theory,
    wider_in_between,
)


@dataclass(frozen=True)
class Claim:
    id: str
    claim: str
    paper: str
    rule: str
    judge: Callable[[dict], Finding]  # raises NotRun if the numbers are not there


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
    return [judge_one(claim, numbers) for claim in CLAIMS]


def judge_one(claim: Claim, numbers: dict[str, dict]) -> Verdict:
    try:
        found = claim.judge(Steps(numbers))
    except NotRun as missing:
        found = Finding(f"needs {missing}", NOT_RUN)
    return Verdict(claim.id, claim.claim, claim.paper, found.ours, found.interval, found.verdict, claim.rule)


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


def _counted(rule: str) -> str:
    return f"{rule}; at most partly on fewer than {ENOUGH_SAMPLES} samples per K"


def _beyond(rule: str) -> str:
    return _counted(rule) + ", or if the posterior median of K_max is not beyond the objects of training"


def _fails(rule: str) -> str:
    return _counted(rule + ", with an interval that reaches down to what was wanted")


def _grows(experiment: str, beyond_from: int) -> str:
    return _counted(
        f"K_max of {experiment} for three or more M never falls with M and rises in all, so does its posterior median, "
        f"and it is above M from M = {beyond_from} on; partly: rises from the first to the last"
    )


CLAIMS = [
    Claim("grid-all", "All locations labelled: length-generalizes beyond the 3 objects of training", "9 (v1), 7 (v2)",
          _beyond("K_max of grid-all-m3 at least 6; partly: at least 4"), reaches("grid-all-m3", 6, 4)),
    Claim("grid-single", "One location labelled: does not", "1+(0-2)",
          _fails("K_max of grid-single-m3 1 or 2; partly: 0 or 3"), stays_below("grid-single-m3", 2, 3)),
    Claim("list-all", "The same locations as a list: does not", "fails beyond 3 (v2)",
          _fails("K_max of list-all-m3 from 1 to 3; partly: 0 or 4"), stays_below("list-all-m3", 3, 4)),
    Claim("local", "Forcing locality by architecture restores it (one labelled)", "9+(0-2)",
          _beyond("K_max of grid-single-local-m3 at least 6; partly: at least 4"),
          reaches("grid-single-local-m3", 6, 4)),
    Claim("list-local", "Forcing locality by architecture restores it (list)", "restored (v2)",
          _beyond("K_max of list-all-local-m3 at least 6; partly: at least 4"), reaches("list-all-local-m3", 6, 4)),
    Claim("single-object", "Trained on one object: the standard model stays at one", "1",
          _fails("K_max of grid-all-m1 is 1; partly: 0 or 2"), stays_below("grid-all-m1", 1, 2)),
    Claim("single-object-local", "Trained on one object: the local model draws several", "6",
          _beyond("K_max of grid-single-local-m1 at least 3; partly: at least 2"),
          reaches("grid-single-local-m1", 3, 2)),
    Claim("more-objects", "The more objects in training, the more are drawn, beyond them too", "1, 5, 9, 10, 10, 11",
          _grows("grid-all", 2), grows_with_training("grid-all", 2)),
    Claim("single-any", "One location labelled: however many objects in training, one or two are drawn in place",
          "1 at M = 2-6", _counted("K_max of grid-single 1 or 2 at every M; partly: at most 3 at every M"),
          never_grows("grid-single", 2, 3)),
    Claim("local-5", "Forcing locality by architecture restores it (one labelled, 1-5 objects)", "10+(0-2)",
          _beyond("K_max of grid-single-local-m5 at least 7; partly: 6"), reaches("grid-single-local-m5", 7, 6)),
    Claim("random", "A random number labelled lies between one and all", "1, 5, 9 (M = 3)",
          _counted("K_max of single < random < all at M = 3, and so their posterior medians; partly: single < all"),
          in_between),
    Claim("drop-one", "All but one labelled: draws what it was trained on", "3+(0-1) (M = 3)",
          _counted("K_max of grid-drop-one-m3 at least 3; partly: at least 2"), reaches("grid-drop-one-m3", 3, 2)),
    Claim("more-objects-random", "A random number labelled: the more objects in training, the more are drawn",
          "3, 5, 6, 8, 9 (M = 2-6)",
          _grows("grid-random", 2), grows_with_training("grid-random", 2)),
    Claim("more-objects-drop-one", "All but one labelled: the more objects in training, the more are drawn",
          "3, 8, 9, 10 (M = 3-6)",
          _grows("grid-drop-one", 4), grows_with_training("grid-drop-one", 4)),
    Claim("zero-all", "Asked for nothing, a model of full labels draws nothing", "0",
          _counted("grid-all-m3, K = 0: 95th percentile 0; partly: at most 1"),
          at_zero("grid-all-m3", lambda n: n == 0, lambda n: n <= 1)),
    Claim("zero-single", "Asked for nothing, a model of single labels still draws", "0-3",
          _counted("grid-single-m3, K = 0: 95th percentile at least 2; partly: at least 1"),
          at_zero("grid-single-m3", lambda n: n >= 2, lambda n: n >= 1)),
    Claim("zero-random", "Asked for nothing, a model of randomly many labels still draws", "0-3",
          _counted("grid-random-m3, K = 0: 95th percentile at least 2; partly: at least 1"),
          at_zero("grid-random-m3", lambda n: n >= 2, lambda n: n >= 1)),
    Claim("zero-drop-one", "Asked for nothing, a model of all-but-one labels draws at most one", "0-1",
          _counted("grid-drop-one-m3, K = 0: 95th percentile at most 1; partly: at most 2"),
          at_zero("grid-drop-one-m3", lambda n: n <= 1, lambda n: n <= 2)),
    Claim("color-1", "Colours, trained on one object: stays at one", "1",
          _fails("K_max of color-m1 is 1; partly: 0 or 2"), stays_below("color-m1", 1, 2)),
    Claim("color-3", "Colours length-generalize a little (1-3 objects)", "4",
          _beyond("K_max of color-m3 at least 4; nothing less is partly"), reaches("color-m3", 4, 4)),
    Claim("color-5", "Colours length-generalize a little (1-5 objects)", "7",
          _beyond("K_max of color-m5 at least 7; partly: 6"), reaches("color-m5", 7, 6)),
    Claim("locality-single", "The model that composes has a more local conditional score (against one label)", "Fig 2",
          "conditional locality of grid-all-m3 above grid-single-m3, intervals (4 or more seeds) apart; partly: above",
          more_local_than("grid-all-m3", "grid-single-m3")),
    Claim("locality-list", "The model that composes has a more local conditional score (against a list)", "Fig 2",
          "conditional locality of grid-all-m3 above list-all-m3, intervals (4 or more seeds) apart; partly: above",
          more_local_than("grid-all-m3", "list-all-m3")),
    Claim("scatter", "Length generalization goes with conditional locality", "v2 Fig 2, correlated",
          "Pearson r over 6 or more checkpoints of models that learned their locality (not by architecture) above 0 "
          "with its 95% interval over models; partly: r above 0", correlation),
    Claim("pixels", "Pixel locality is kept at high and at low noise (CLEVR), unlike CIFAR-10", "v1 Fig 2, 10",
          "90% squares at conditioned pixels of grid-all-m3 and grid-single-m3 at most a tenth of the image at sigma > "
          "5 and < 0.2, at high noise also at the centre, where nothing is asked, and below a third of CIFAR-10's, on "
          "4 or more seeds; partly: at conditioned pixels at most a quarter, and below CIFAR-10's",
          local_at_both_ends),
    Claim("pixels-list", "The list's model lacks pixel locality, too", "v2 Fig 2",
          "90% square at conditioned pixels of list-all-m3 at sigma > 5 above a quarter of the image and above "
          "grid-all-m3's, intervals (4 or more seeds) apart; partly: above grid-all-m3's", list_is_less_local),
    Claim("energy", "Gradients are larger at low noise", "v1 Fig 10",
          "energy at conditioned pixels of grid-all-m3 and grid-single-m3 more than twice as large at sigma < 0.2 as "
          "at sigma > 5, on 4 or more seeds; partly: larger for one", more_energy_at_low_noise),
    Claim("pixels-between", "Pixel locality is lost at intermediate noise (CLEVR)", "v1 Fig 10",
          "largest 90% square at conditioned pixels of grid-all-m3 at sigma 0.2 to 5 more than twice those above and "
          "below, on 4 or more seeds; partly: larger",
          wider_in_between),
    Claim("cifar", "Pixel locality is lost at high noise (CIFAR-10)", "Fig 12",
          "90% square at sigma > 5 at least half of the image, and 5 times that at sigma < 0.2, on 4 or more seeds; "
          "partly: at least a quarter, and 5 times",
          locality_is_lost),
    Claim("color-features", "Colours are disentangled in early encoder layers", "Fig 5",
          "mean off-diagonal cosine there below 0.3 and below the image's; partly: below the image's", color_features),
    Claim("sdxl-features", "SDXL-class model: concepts group by category in mid blocks", "v1 Fig 7, v2 Fig 5",
          "within minus between category cosine larger in mid blocks than in latents and pixels; partly: pixels only",
          sdxl_features),
    Claim("sdxl-arch", "SDXL-class model: grouping is strongest near the bottleneck", "v2 Fig 5: ratio arches",
          "within minus between larger in mid blocks than in down and in up blocks; partly: than in one of them",
          sdxl_arch),
    Claim("sdxl-pixels", "SDXL-class model: in pixel space words act everywhere alike", "v1 Fig 6, v2 Fig 4",
          "mean cosine of the words' influence at two locations, at high noise, above 0.8, on 4 or more seeds; partly: "
          "above 0.5",
          sdxl_pixels),
    Claim("sdxl-attention", "SDXL-class model: a token in a composed prompt attends as alone", "v1 Fig 7",
          "cosine with its own concept above 0.5 and twice that with others; partly: above others", sdxl_attention),
    Claim("sdxl-attention-noise", "SDXL-class model: attention tells concepts apart less at low noise", "v1 Fig 13",
          "within minus between category cosine of attention maps, mean over layers, at the first step more than twice "
          "that at the last; partly: above it", sdxl_attention_noise),
    Claim("sdxl-relation", "SDXL-class model: disentangled concepts compose more successfully", "v1 Fig 7, examples",
          "rank correlation of success and cosine within kinds of pairs below 0 with p < 0.05; partly: below 0",
          sdxl_relation),
    Claim("sdxl-local", "Beyond the paper: locality forced at inference helps composition", "not in the paper",
          "gain on two-object prompts (mode separate) above 0 with its 95% interval; partly: above 0",
          sdxl_intervention),
    Claim("lemma-1", "Lemma 1: a composition has a local conditional score", "exact",
          "relative score error at most 1e-9 on a composition, above 1e-2 on another family",
          theory(lambda n: (f"{n['lemma1_error']:.0e} against {n['lemma1_other']:.1f}",
                             graded(n["lemma1_error"] <= 1e-9 and n["lemma1_other"] > 1e-2, False)))),
    Claim("lemma-1-premise", "Lemma 1 holds under Definition 2 alone", "stated so",
          "score error at most 1e-9 also if uncontrolled pixels are coupled; partly: only if they are not",
          theory(lambda n: (f"{n['background_coupled']:.1e} with coupling, {n['background_uncoupled']:.0e} without",
                             graded(n["background_coupled"] <= 1e-9, n["background_uncoupled"] <= 1e-9)))),
    Claim("lemma-2", "Lemma 2: KL from a composition is at most the sum of the errors", "bound",
          "bound minus KL at least -1e-9 everywhere",
          theory(lambda n: (f"smallest slack {n['lemma2_slack']:.1e} nats",
                             graded(n["lemma2_slack"] >= -1e-9, False)))),
    Claim("claim-1", "Claim 1: KL falls with noise at the stated rate", "exact",
          "KL never rises and the slope agrees to 1e-6; partly: never rises",
          theory(lambda n: (f"slope error {n['claim1_slope_error']:.0e}",
                             graded(n["claim1_falls"] and n["claim1_slope_error"] < 1e-6, n["claim1_falls"])))),
    Claim("lemma-3", "Lemma 3: the errors fall with noise", "exact", "no error rises with noise",
          theory(lambda n: ("fall" if n["lemma3_falls"] else "rise", graded(n["lemma3_falls"], False)))),
    Claim("lemma-1-converse", "Lemma 1, converse: what the score misses of being local is the divergence", "iff (v2)",
          "integral over noise and KL differ by at most 1e-6 nats",
          theory(lambda n: (f"differ by {n['converse_error']:.0e} nats",
                             graded(n["converse_error"] <= 1e-6, False)))),
    Claim("corollary-1", "Corollary 1: a composition in features is local there", "exact",
          "for two transforms, relative score error in features at most 1e-9, above 1e-2 in pixels",
          theory(lambda n: (f"{n['corollary1_error']:.0e} in features, {n['corollary1_pixels']:.1f} in pixels",
                             graded(n["corollary1_error"] <= 1e-9 and n["corollary1_pixels"] > 1e-2, False)))),
    Claim("claim-2", "Claim 2: transform and noise commute better the more noise", "always",
          "the divergence falls at every noise level, or is zero, for every transform; partly: at high noise for one",
          theory(lambda n: (claim2_text(n), graded(n["claim2_holds"], any(n["claim2_falls_beyond"]))))),
]  # fmt: skip
