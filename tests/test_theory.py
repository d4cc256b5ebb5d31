"""The theory's closed forms against autograd, Monte Carlo and brute force; then what the checks say."""

import io

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scipy import integrate, optimize, stats

from lcs.errors import LcsError
from lcs.theory import approximate, commuting, composition, exact, features, figures, noise
from lcs.theory.mixture import Mixture, gaussian, gaussian_kl, mix, product

RNG = np.random.default_rng(7)


def random_mixture(components: int = 3, n: int = 3) -> Mixture:
    roots = RNG.standard_normal((components, n, n))
    weights = RNG.random(components) + 0.2
    return Mixture(
        weights / weights.sum(),
        RNG.standard_normal((components, n)) * 2,
        roots @ roots.transpose(0, 2, 1) + 0.3 * np.eye(n),
    )


def scipy_log_density(p: Mixture, x: np.ndarray) -> np.ndarray:
    parts = [
        w * stats.multivariate_normal(m, c).pdf(x) for w, m, c in zip(p.weights, p.means, p.covariances, strict=True)
    ]
    return np.log(np.sum(parts, axis=0))


def autograd_score(p: Mixture, x: np.ndarray) -> np.ndarray:
    at = torch.tensor(x, requires_grad=True)
    normal = torch.distributions.MultivariateNormal(torch.tensor(p.means), torch.tensor(p.covariances))
    weights = torch.distributions.Categorical(probs=torch.tensor(p.weights))
    torch.distributions.MixtureSameFamily(weights, normal).log_prob(at).sum().backward()
    return at.grad.numpy()


# ---- mixtures -------------------------------------------------------------------------------------------------------


def test_density_score_and_jacobian():
    p, x = random_mixture(), RNG.standard_normal((20, 3)) * 2
    np.testing.assert_allclose(p.log_density(x), scipy_log_density(p, x), rtol=1e-12)
    np.testing.assert_allclose(p.score(x), autograd_score(p, x), rtol=1e-10, atol=1e-12)
    for j in range(3):
        step = 1e-5 * np.eye(3)[j]
        change = (p.score(x + step) - p.score(x - step)) / 2e-5
        np.testing.assert_allclose(p.score_jacobian(x)[:, :, j], change, atol=1e-7)


def test_marginal_map_product_and_noise():
    p, x = random_mixture(), RNG.standard_normal((5, 3))
    value, _ = integrate.quad(lambda v: np.exp(p.log_density(np.array([[x[0, 0], v, x[0, 2]]]))[0]), -30, 30, limit=200)
    assert np.exp(p.marginal([0, 2]).log_density(x[:1, [0, 2]])[0]) == pytest.approx(value, rel=1e-7)
    a = features.stretch(3)
    moved = p.mapped(a).log_density(x @ a.T) + np.log(abs(np.linalg.det(a)))
    np.testing.assert_allclose(moved, p.log_density(x), rtol=1e-10)
    q = random_mixture(2, 2)
    joint = product([((3, 0), q), ((1, 4, 2), p)])
    y = RNG.standard_normal((5, 5))
    np.testing.assert_allclose(
        joint.log_density(y), q.log_density(y[:, [3, 0]]) + p.log_density(y[:, [1, 4, 2]]), rtol=1e-10
    )
    rng = np.random.default_rng(0)
    samples = p.sample(200_000, rng) + 0.7 * rng.standard_normal((200_000, 3))
    noisy = p.noised(0.7)
    assert np.abs(samples.mean(axis=0) - noisy.mean).max() < 0.03
    share = (samples < 0.5).all(axis=1).mean()
    want = sum(
        w * stats.multivariate_normal(m, c).cdf([0.5] * 3)
        for w, m, c in zip(noisy.weights, noisy.means, noisy.covariances, strict=True)
    )
    assert share == pytest.approx(want, abs=0.005)


def test_gaussian_kl_by_monte_carlo():
    q, r = random_mixture(1), random_mixture(1)
    x = q.sample(400_000, np.random.default_rng(0))
    ratio = q.log_density(x) - r.log_density(x)
    exact_kl = gaussian_kl(q.means[0], q.covariances[0], r.means[0], r.covariances[0])
    assert exact_kl == pytest.approx(ratio.mean(), abs=5 * ratio.std() / 400_000**0.5)


def test_wrong_mixtures_are_refused():
    with pytest.raises(LcsError, match=r"weights \[0\.5\] are not a distribution"):
        Mixture(np.array([0.5]), np.zeros((1, 2)), np.eye(2)[None])
    with pytest.raises(LcsError, match="1 components in 2 dimensions"):
        Mixture(np.ones(1), np.zeros((1, 2)), np.eye(3)[None])
    with pytest.raises(LcsError, match=r"they cover \[0, 0, 1\]"):
        product([((0,), gaussian([0], np.eye(1))), ((0, 1), gaussian([0, 0], np.eye(2)))])
    with pytest.raises(LcsError, match=r"unknown condition in \[0, 3\]"):
        composition.every_object().conditional(frozenset({0, 3}))
    with pytest.raises(LcsError, match="unknown transform 'bent'"):
        features.check_corollary1("bent")
    with pytest.raises(LcsError, match="singular values from 0 to 2"):
        features.stretch(3, low=0)


# ---- Definitions 1 and 2, Lemma 1 -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lemma1():
    return exact.check_lemma1(noise_levels=(0.01, 0.3, 1.0, 10.0), samples=100)


def test_examples_are_what_they_say():
    every, either = composition.every_object(), composition.any_object()
    x = RNG.standard_normal((10, 12))
    for active in every.subsets:
        same = np.allclose(every.conditional(active).log_density(x), either.conditional(active).log_density(x))
        assert same == (len(active) <= 1)  # indistinguishable for a model that is shown one label at a time
    assert every.background == (3, 7, 11)
    for family in (composition.shared_light(0.0), composition.shadows(0.0), composition.tied_background(0.0)):
        for active in every.subsets:
            np.testing.assert_allclose(
                family.conditional(active).log_density(x), every.conditional(active).log_density(x)
            )


def test_local_score_is_the_true_score_by_autograd():
    family, t = composition.every_object(), 0.4
    for active in family.subsets:
        noisy = family.conditional(active).noised(t)
        x = noisy.sample(20, np.random.default_rng(1))
        local = composition.local_conditional_score(family, active, t, x)
        np.testing.assert_allclose(local, autograd_score(noisy, x), rtol=1e-9, atol=1e-11)


def test_lemma1(lemma1):
    assert lemma1.names[0] == "every object"
    assert lemma1.largest[0].max() < 1e-12
    assert lemma1.largest[1:].min() > 1e-3  # none of the others is local at any noise level
    assert (lemma1.mean_square[1:, -1] < lemma1.mean_square[1:, 0]).all()  # but all become more so with noise


def test_dependencies():
    every = exact.dependencies(composition.every_object())
    allowed = np.zeros((12, 12), bool)
    for block in (*composition.BLOCKS, composition.BACKGROUND):
        allowed[np.ix_(block, block)] = True
    assert every.pixels[~allowed].max() < 1e-12
    assert every.pixels[allowed].min() > 0.01
    own = np.zeros((12, 3), bool)
    for j, block in enumerate(composition.BLOCKS):
        own[list(block), j] = True
    assert every.conditions[~own].max() < 1e-12
    assert every.conditions[own].min() > 0.1
    either = exact.dependencies(composition.any_object(), t=1.0)
    controlled = [i for block in composition.BLOCKS for i in block]
    assert either.pixels[np.ix_(controlled, controlled)].min() > 1e-3
    assert either.conditions[controlled].min() > 0.05


def test_converse():
    result = exact.check_converse()
    assert result.kl[0] == pytest.approx(0, abs=1e-15)
    assert result.violation[0].max() < 1e-20
    assert (np.diff(result.kl) > 0).all()
    np.testing.assert_allclose(result.integral, result.kl, atol=1e-9)
    # The closed form of the violation, by Monte Carlo with the mixture's own scores.
    inner = np.array([[1.0, 0.5], [0.5, 1.0]])
    p = gaussian(np.zeros(4), np.block([[inner, 0.7 * inner], [0.7 * inner, inner]]))
    family = composition.Family("two", 4, ((0, 1), (2, 3)), lambda active: p)
    i = int(np.abs(result.noise_levels - 0.5).argmin())
    difference, _ = exact.score_difference(family, family.all, result.noise_levels[i], 100_000, 0)
    assert result.violation[7, i] == pytest.approx((difference**2).sum(axis=1).mean(), rel=0.02)


def test_lemma1_needs_an_uncoupled_background():
    result = exact.check_background()
    assert result.is_composition.max() < 1e-9  # Definition 2 holds to the letter
    assert result.lemma_subsets[0] < 1e-12
    assert result.lemma_subsets[1:].min() > 0.1
    assert result.joint_subsets.max() < 1e-12


# ---- Definition 3, Lemma 2 ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lemma2():
    return approximate.check_lemma2(strengths=(0.0, 0.1, 0.6, 1.0), noise_levels=(0.0, 0.5, 2.0))


def as_mixture(light: approximate.Light, active, t: float) -> Mixture:
    covariance = (approximate.VARIANCE + t**2) * np.eye(4)
    means = light.means(active)
    return mix([gaussian(means - light.strength, covariance), gaussian(means + light.strength, covariance)])


@pytest.mark.parametrize("active", [frozenset(), frozenset({1}), approximate.ALL])
def test_divergence_by_monte_carlo(active):
    light, t = approximate.Light(0.6, 0.2), 0.3
    p = as_mixture(light, active, t)
    family = composition.Family("light", 4, ((0,), (1,), (2,)), lambda told: as_mixture(light, told, t))
    c = composition.factorised_composition(family, active)
    x = p.sample(200_000, np.random.default_rng(0))
    ratio = p.log_density(x) - c.log_density(x)
    assert approximate.divergence(light, active, t) == pytest.approx(ratio.mean(), abs=5 * ratio.std() / 200_000**0.5)


def test_errors_are_the_suprema():
    """eps_1 by brute force over J and over the other pixels: never above, and approached far out."""
    light, j = approximate.Light(0.4, 0.2), 1
    eps = approximate.errors(light, 0.0)["eps"][j]
    target = light.pixel(j, frozenset({j}))
    seen = []
    for active in (s for s in approximate.SUBSETS if j in s):
        for far in (-8.0, -0.5, 0.0, 0.3, 8.0):
            others = np.delete(light.means(active), j) + far  # all other pixels moved together
            weights = [
                np.exp(-np.sum((others - np.delete(light.means(active), j) - s) ** 2) / (2 * approximate.VARIANCE))
                for s in (-light.strength, light.strength)
            ]
            on = weights[1] / sum(weights)
            own = light.pixel(j, active)
            seen.append(kl_by_quad((1 - on, on), own, (0.5, 0.5), target, approximate.VARIANCE))
    assert max(seen) <= eps + 1e-9
    assert max(seen) == pytest.approx(eps, rel=1e-6)


def kl_by_quad(weights_q, means_q, weights_r, means_r, variance) -> float:
    def density(x, weights, means):
        return sum(w * stats.norm.pdf(x, m, variance**0.5) for w, m in zip(weights, means, strict=True))

    def integrand(x):
        q = density(x, weights_q, means_q)
        return q * np.log(q / density(x, weights_r, means_r)) if q > 0 else 0.0

    return integrate.quad(integrand, -8, 8, limit=200)[0]


def test_lemma2(lemma2):
    assert (lemma2.smallest_slack >= -1e-12).all()  # for every J
    assert (lemma2.kl >= 0).all()
    assert (np.diff(lemma2.kl, axis=1) < 0).all()  # falls with noise
    assert (np.diff(lemma2.bound, axis=1) < 0).all()
    assert lemma2.slack[0, 0] == pytest.approx(0, abs=1e-12)  # shadows alone: every inequality is an equality
    assert lemma2.slack[2, 0] > 0.5
    nothing = approximate.check_lemma2(strengths=(0.0,), noise_levels=(0.0,), shadow=0.0)
    assert abs(nothing.kl[0, 0]) < 1e-12
    assert nothing.bound[0, 0] < 1e-12


def test_gaussian_errors_have_no_bound():
    error = approximate.gaussian_error(0.3, np.array([0.0, 10.0, 1000.0]))
    assert error[1] == pytest.approx(gaussian_kl(np.array([3.0]), np.array([[0.91]]), np.zeros(1), np.eye(1)))
    assert error[2] > 1e4


# ---- Claim 1, Lemma 3 -----------------------------------------------------------------------------------------------


def test_claim1():
    result = noise.check_claim1(noise_levels=np.geomspace(0.05, 20, 9))
    np.testing.assert_allclose(result.slope, result.identity, rtol=1e-9, atol=1e-12)
    assert (result.slope < 0).all()
    assert (np.diff(result.kl, axis=1) < 0).all()
    near = noise.check_claim1(noise_levels=(0.4999, 0.5, 0.5001))
    np.testing.assert_allclose((near.kl[:, 2] - near.kl[:, 0]) / 2e-4, near.slope[:, 1], rtol=1e-6)
    q, r = noise._Q, noise._R
    parts = [stats.norm(m, (v + 0.25) ** 0.5) for m, v in zip(q[1], q[2], strict=True)]
    others = [stats.norm(m, (v + 0.25) ** 0.5) for m, v in zip(r[1], r[2], strict=True)]
    rng = np.random.default_rng(0)
    x = np.where(rng.random(200_000) < q[0][0], *(part.rvs(200_000, random_state=rng) for part in parts))
    ratio = np.log(q[0] @ [p.pdf(x) for p in parts]) - np.log(r[0] @ [p.pdf(x) for p in others])
    assert near.kl[1, 1] == pytest.approx(ratio.mean(), abs=5 * ratio.std() / 200_000**0.5)


def test_lemma3():
    result = noise.check_lemma3(noise_levels=np.geomspace(0.05, 20, 8))
    assert (np.diff(result.supremum) < 0).all()
    assert (np.diff(result.definition) < 0).all()
    assert (np.diff(result.conditional[1:], axis=1) < 0).all()
    assert (result.conditional <= result.supremum + 1e-12).all()
    np.testing.assert_allclose(result.conditional[-1], result.supremum)
    assert np.abs(result.conditional[0]).max() < 1e-12  # neighbours that say nothing


# ---- feature space --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corollary():
    levels = (0.01, 0.3, 3.0)
    return [features.check_corollary1(name, levels, samples=100) for name in ("orthogonal", "not orthogonal")]


def test_corollary1(corollary):
    rotated, stretched = corollary
    for result in corollary:
        assert result.feature.max() < 1e-12
        assert result.pixel.min() > 0.1  # in pixels it is no composition
    assert rotated.pulled_back.max() < 1e-12  # noise and an orthogonal transform commute
    assert stretched.pulled_back.max() > 0.5
    assert stretched.pulled_back[0] < 0.01  # almost no noise, almost nothing to commute with


def test_heuristic_is_necessary_and_not_sufficient():
    result = features.check_heuristic()
    assert result.off_diagonal[:3].max() < 1e-12
    assert result.off_diagonal[3] > 0.1
    assert result.distance[0] < 1e-9
    assert result.distance[1:].min() > 0.1


@pytest.fixture(scope="module")
def claim2():
    return commuting.check_claim2(noise_levels=(0.1, 0.5, 1.0, 2.0, 4.0, 10.0, 300.0))


def test_claim2(claim2):
    assert np.abs(claim2.kl[0]).max() < 1e-12  # a rotation commutes
    assert (claim2.slope[1] > 0).all()  # a stretch does so less and less: the claim's sign is wrong
    assert claim2.kl[1, -1] == pytest.approx(claim2.limit[1], rel=1e-4)
    assert (claim2.slope[2][:3] > 0).all()
    assert (claim2.slope[2][4:] < 0).all()  # a bend: high noise helps
    assert claim2.kl[2, -1] < 0.01
    np.testing.assert_allclose(claim2.corrected, claim2.slope, rtol=1e-6, atol=1e-9)
    assert (claim2.paper[1:] < 0).all()
    assert claim2.claim_holds == [False, False, False]
    assert claim2.falls_beyond == [None, None, 4.0]


def test_noncommuting_divergence_by_monte_carlo():
    """The linear case from `Mixture` operations in either order."""
    root = np.random.default_rng(0).standard_normal((4, 4)) * 0.5
    p, a, t = gaussian(np.zeros(4), root @ root.T + 0.1 * np.eye(4)), features.stretch(4), 1.0
    q, r = p.mapped(a).noised(t), p.noised(t).mapped(a)
    x = q.sample(200_000, np.random.default_rng(1))
    ratio = q.log_density(x) - r.log_density(x)
    want = commuting.check_claim2(noise_levels=(t,)).kl[1, 0]
    assert want == pytest.approx(ratio.mean(), abs=5 * ratio.std() / 200_000**0.5)


def test_bend_by_quadrature(claim2):
    """KL on the line with an explicit inverse of A and adaptive integrals."""
    b, t, mean, deviation = 1.5, 1.0, commuting._MEAN, commuting._DEVIATION

    def q(z):
        inner = lambda y: stats.norm.pdf(y, mean, deviation) * stats.norm.pdf(z, y + b * np.tanh(y), t)  # noqa: E731
        return integrate.quad(inner, mean - 6, mean + 6)[0]

    def r(z):
        x = optimize.brentq(lambda v: v + b * np.tanh(v) - z, -30, 30)
        return stats.norm.pdf(x, mean, (deviation**2 + t**2) ** 0.5) / (1 + b / np.cosh(x) ** 2)

    z = np.linspace(-11, 12, 93)
    kl = sum((density := q(v)) * np.log(density / r(v)) for v in z) * (z[1] - z[0])
    assert claim2.kl[2, 2] == pytest.approx(kl, rel=1e-5)


# ---- figures --------------------------------------------------------------------------------------------------------


def test_every_figure_is_drawn(lemma1, lemma2, corollary, claim2):
    shown = [exact.dependencies(f(), samples=50) for f in (composition.every_object, composition.any_object)]
    levels = (0.1, 1.0, 5.0)
    drawn = [
        figures.figure_lemma1(lemma1, shown),
        figures.figure_converse(exact.check_converse(levels=100)),
        figures.figure_background(exact.check_background(samples=20)),
        figures.figure_lemma2(lemma2),
        figures.figure_noise(noise.check_claim1(levels), noise.check_lemma3(levels)),
        figures.figure_corollary1(corollary),
        figures.figure_heuristic(features.check_heuristic()),
        figures.figure_claim2(claim2),
    ]
    for figure in drawn:
        assert isinstance(figure, Figure)
        target = io.BytesIO()
        figure.savefig(target, dpi=40)
        assert target.tell() > 5_000
