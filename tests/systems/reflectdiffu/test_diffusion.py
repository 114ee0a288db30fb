"""The forward chain by its steps, the backward ones by what they must give back, and a mixture that it learns."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from empax.models.latent import gaussian_kl
from empax.systems.reflectdiffu.diffusion import Schedule, estimate, printed_steps, q_sample
from empax.systems.reflectdiffu.model import IntentDenoiser

STANDARD = Schedule()


def test_the_published_schedule():
    """A thousand betas from 1e-5 to 5e-2, evenly spaced, and what they leave; counted by hand, in fractions."""
    betas = [0, *(Fraction(1, 10**5) + Fraction(4999, 10**5) * Fraction(t, 999) for t in range(1000))]
    assert (betas[1], betas[-1], len(betas)) == (Fraction(1, 10**5), Fraction(5, 100), 1001)
    np.testing.assert_allclose(STANDARD.betas, [float(beta) for beta in betas], rtol=1e-12)
    left = np.exp(np.cumsum([math.log1p(-float(beta)) for beta in betas]))
    np.testing.assert_allclose(STANDARD.alpha_bars, left, rtol=1e-10)
    expected = {0: 1.0, 100: 0.779, 200: 0.367, 300: 0.104, 500: 0.0018, 1000: 9.0e-12}
    for time, share in expected.items():
        assert STANDARD.alpha_bars[time] == pytest.approx(share, rel=0.03)
    sums = np.cumsum(STANDARD.betas)
    assert sums[200] < 1 < sums[201]
    one, two = Schedule(1, 0.1, 0.3), Schedule(2, 0.1, 0.3)
    np.testing.assert_allclose(one.betas, [0.0, 0.1])
    np.testing.assert_allclose(two.betas, [0.0, 0.1, 0.3])
    np.testing.assert_allclose(two.alpha_bars, [1.0, 0.9, 0.9 * 0.7])


def test_one_draw_is_as_many_steps_of_noise():
    schedule, draws, clean = Schedule(20, 0.01, 0.3), 50_000, 1.7
    rng = np.random.default_rng(0)
    walked = np.full(draws, clean)
    for beta in schedule.betas[1:13]:
        walked = np.sqrt(1 - beta) * walked + np.sqrt(beta) * rng.normal(size=draws)
    noise = jnp.asarray(rng.normal(size=(draws, 1)), jnp.float32)
    time = jnp.full(draws, 12)
    jumped = np.asarray(q_sample(schedule, jnp.full((draws, 1), clean), time, noise))[:, 0]
    deviation = walked.std()
    assert jumped.mean() == pytest.approx(walked.mean(), abs=3 * deviation * (2 / draws) ** 0.5)
    assert jumped.var() == pytest.approx(walked.var(), rel=3 * (4 / draws) ** 0.5)


def example(time):
    rng = np.random.default_rng(1)
    clean, noise = (jnp.asarray(rng.normal(size=(3, 4)), jnp.float32) for _ in range(2))
    times = jnp.full(3, time)
    return clean, noise, times, q_sample(STANDARD, clean, times, noise)


def test_the_true_noise_gives_the_clean_vector():
    for time in (1, 200, 700):
        clean, noise, times, noisy = example(time)
        np.testing.assert_allclose(estimate(STANDARD, noisy, times, noise), clean, rtol=1e-4, atol=1e-3)
    clean, noise, times, noisy = example(200)
    wrong = estimate(STANDARD, noisy, times, noise + 1.0)
    np.testing.assert_allclose(clean - wrong, np.full_like(clean, 1.312), atol=1e-3)  # as its docstring says


@pytest.mark.parametrize(("schedule", "start"), [(Schedule(4, 0.2, 0.24), 3), (STANDARD, 300)])
def test_printed_steps_have_a_number_where_their_root_has_none(schedule, start):
    """With the paper's betas that is from time 201 on."""
    _, noise, _, noisy = example(3)
    found = printed_steps(lambda noisy, time: noise * time[:, None] / 10 + noisy, schedule, noisy, start=start)
    walked, sums = np.asarray(noisy, np.float64), np.cumsum(schedule.betas)
    for time in range(start, 0, -1):
        beta, share = schedule.betas[time], 1.0 - min(sums[time], sums[sums < 1].max())
        walked = (walked - beta / np.sqrt(share) * (np.asarray(noise) * time / 10 + walked)) / np.sqrt(1 - beta)
    assert np.isfinite(walked).all()
    np.testing.assert_allclose(found, walked, rtol=1e-3)


MEANS = np.array([[1.0, 0.0], [-0.5, 0.9], [-0.5, -0.9]], np.float32)
SPREAD = 0.05


def trained(*, shuffled=False, noise_weight=1.0, steps=1000):
    """Samples by intent, of a denoiser trained on a mixture whose mean the intent names."""
    schedule, model, rows = Schedule(100, 1e-4, 0.1), IntentDenoiser(latent=4, hidden=64), 128

    def loss(params, rng):
        a, b, c, d, e, f = jax.random.split(rng, 6)
        group = jax.random.randint(a, (rows,), 0, 3)
        clean = jnp.asarray(MEANS)[group] + SPREAD * jax.random.normal(b, (rows, 2))
        time, noise = jax.random.randint(c, (rows,), 1, 101), jax.random.normal(d, (rows, 2))
        group = jax.random.permutation(f, group) if shuffled else group
        noisy = q_sample(schedule, clean, time, noise)
        found, *latent = model.apply({"params": params}, noisy, time, jax.nn.one_hot(group, 3), e, clean)
        error = jnp.mean(jnp.square(found - noise))
        return noise_weight * error + gaussian_kl(*latent).mean(), error  # 2 / 2 dimensions: the bound's weight

    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    one = jnp.zeros((1, 2)), jnp.ones(1, jnp.int32), jnp.zeros((1, 3))
    params = jax.jit(model.init)(jax.random.key(0), *one, clean=one[0])["params"]

    @jax.jit
    def step(carry, rng):
        params, state = carry
        grads, error = jax.grad(loss, has_aux=True)(params, rng)
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(params, updates), state), error

    (params, _), errors = jax.lax.scan(
        step, (params, optimizer.init(params)), jax.random.split(jax.random.key(1), steps)
    )
    samples = jax.random.normal(jax.random.key(2), (300, 2))
    intent = jax.nn.one_hot(jnp.repeat(jnp.arange(3), 100), 3)
    for time in range(100, 0, -2):  # Song et al. 2021, Eq. 12, without new noise
        now, earlier = (jnp.full(300, at) for at in (time, time - 2))
        predicted = model.apply({"params": params}, samples, now, intent)[0]
        samples = q_sample(schedule, estimate(schedule, samples, now, predicted), earlier, predicted)
    return np.asarray(samples).reshape(3, 100, 2), float(errors[-100:].mean())


@pytest.mark.slow
def test_it_learns_a_mixture_by_intent():
    samples, _ = trained()
    np.testing.assert_allclose(samples.mean(axis=1), MEANS, atol=0.1)
    mixed, _ = trained(shuffled=True)
    assert np.abs(mixed.mean(axis=1) - MEANS).max() > 0.5


@pytest.mark.slow
def test_without_the_error_of_the_noise_nothing_is_learnt():
    """ReflectDiffu's Eq. 10 to the letter: the posterior becomes the prior, the noise is never predicted."""
    samples, error = trained(noise_weight=0.0)
    assert error > 0.9
    assert np.abs(samples.mean(axis=1) - MEANS).max() > 0.5


def test_the_latents_prior_reads_no_clean_vector_and_its_posterior_does():
    given = jnp.ones((3, 4)), jnp.asarray([1, 5, 9]), jnp.ones((3, 2))
    clean, other = jnp.zeros((3, 4)), jnp.ones((3, 4))
    for recognition, reads in (("clean", True), ("noisy", False)):
        model = IntentDenoiser(latent=2, hidden=8, recognition=recognition)
        params = {"params": jax.jit(model.init)(jax.random.key(0), *given, clean=clean)["params"]}
        apply = jax.jit(model.apply)
        noise, posterior, prior = apply(params, *given, clean=clean)
        changed = apply(params, *given, clean=other)
        np.testing.assert_array_equal(changed[2][0], prior[0])
        assert np.allclose(changed[1][0], posterior[0]) != reads
        asked, found, same = apply(params, *given)  # as answers are made
        np.testing.assert_array_equal(same[0], prior[0])
        if reads:
            np.testing.assert_array_equal(found[0], prior[0])
            assert not np.allclose(asked, noise)
        else:  # its KL can fall to 0 at no cost
            np.testing.assert_array_equal(prior[0], 0)
            np.testing.assert_array_equal(asked, noise)
