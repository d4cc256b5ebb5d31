"""The paper's theory, checked with numbers on distributions whose scores are known in closed form.

Everything is a Gaussian mixture (`mixture`): noise, marginals and linear maps of a mixture are mixtures again, so the
score at any noise level is exact and no network is involved. Each check is a pure function that returns a small
dataclass of numbers; `figures` draws one picture per check.

| statement of v1 | in v2 | function |
|---|---|---|
| Definition 1, local conditional score | Definition 1 | `composition.local_conditional_score` |
| Definition 2, conditional projective composition | Definition 2 | `composition.projective_composition` |
| Lemma 1, the score of a composition is local | Lemma 1 | `exact.check_lemma1` |
| its converse, and what a violation costs | Lemma 1 | `exact.check_converse`, `exact.dependencies` |
| what Lemma 1 needs beyond Definition 2 | | `exact.check_background` |
| Definition 3 and Lemma 2, KL <= sum of errors | Definition 3, Lemma 3 | `approximate.check_lemma2` |
| Claim 1, KL falls with noise, and how fast | ? | `noise.check_claim1` |
| Lemma 3, the errors fall with noise | ? | `noise.check_lemma3` |
| Definition 4 and Corollary 1, feature space | Corollary 1 | `features.check_corollary1` |
| Equation 3, mean differences are orthogonal | Lemma 2 | `features.check_heuristic` |
| Claim 2, transform and noise commute at high noise | ? | `commuting.check_claim2` |

(The summary of v2 that we know numbers only the first ten of its statements; ? is beyond them.)

Three findings that a reader of the paper should know, each computed by the function named:

* Lemma 1 needs a little more than Definition 2 says: the *unconditional* distribution must also be independent across
  the sets M_j. The proof uses it ("j not in J, i in M_j"), the definition does not give it (`check_background`).
* With unbounded Gaussians the suprema of Definition 3 are infinite for any correlation, so Lemma 2 says nothing about
  them; mixtures have finite errors (`gaussian_error`).
* Claim 2 does not hold as stated. Both distributions it compares are equal without noise, so their divergence must
  first grow; for a linear transform that is not orthogonal it keeps growing to a positive limit. The proof takes the
  heat equation for a pushed-forward distribution, which diffuses along A A^T instead (`check_claim2`).
"""
