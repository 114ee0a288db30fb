"""The forward chain by its steps, the backward ones by what they must give back, and a mixture that it learns."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from empax.models.latent import gaussian_kl
from empax.systems.reflectdiffu.diffusion import Schedule, ddim, ddpm, ddpm_step, q_sample
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


def test_a_step_back_with_the_true_noise_is_the_posteriors_mean():
    """Ho et al., Eq. 7, in terms of x_0 and x_t."""
    for time in (1, 2, 150, 700):
        clean, noise, times, noisy = example(time)
        beta, bar, before = STANDARD.betas[time], STANDARD.alpha_bars[time], STANDARD.alpha_bars[time - 1]
        mean = np.sqrt(before) * beta / (1 - bar) * clean + np.sqrt(1 - beta) * (1 - before) / (1 - bar) * noisy
        np.testing.assert_allclose(ddpm_step(STANDARD, noisy, times, noise), mean, rtol=1e-4, atol=1e-4)


def test_all_steps_with_the_true_noise_give_the_clean_vector():
    clean, _, _, noisy = example(1000)

    def predict(noisy, time):
        share = jnp.asarray(STANDARD.alpha_bars, jnp.float32)[time][:, None]
        return (noisy - jnp.sqrt(share) * clean) / jnp.sqrt(1.0 - share)

    for steps in (10, 1000):
        np.testing.assert_allclose(ddim(predict, STANDARD, noisy, start=1000, steps=steps), clean, atol=1e-4)
    np.testing.assert_allclose(ddpm(predict, STANDARD, noisy, start=1000), clean, atol=1e-4)
    clean, noise, _, noisy = example(200)
    np.testing.assert_allclose(ddim(lambda *_: noise, STANDARD, noisy, start=200, steps=1), clean, atol=1e-5)
    wrong = ddim(lambda *_: noise + 1.0, STANDARD, noisy, start=200, steps=1)
    np.testing.assert_allclose(clean - wrong, np.full_like(clean, 1.312), atol=1e-3)  # as its docstring says


@pytest.mark.parametrize("form", ["ho", "printed"])
def test_all_steps_are_one_after_the_other_at_its_mean(form):
    """With betas so large that no step can be left out."""
    schedule = Schedule(4, 0.2, 0.24)
    _, noise, _, noisy = example(3)

    def predict(noisy, time):
        return noise * time[:, None] + noisy

    walked, steps = noisy, []
    for time in (3, 2, 1):
        times = jnp.full(3, time)
        walked = ddpm_step(schedule, walked, times, predict(walked, times), form=form)
        steps.append(np.asarray(walked))
    found = ddpm(predict, schedule, noisy, start=3, form=form)
    np.testing.assert_allclose(found, walked, rtol=1e-5, atol=1e-5)
    assert np.abs(steps[1] - steps[2]).max() > 0.02


def test_steps_without_noise_are_at_times_evenly_spaced():
    """Times are 12, 9, 6, 3, 0; each step is Song et al., Eq. 12."""
    schedule = Schedule(12, 0.05, 0.2)
    _, noise, _, noisy = example(3)

    def predict(noisy, time):
        return noise * time[:, None] / 10 + noisy

    found = ddim(predict, schedule, noisy, start=12, steps=4)
    walked, bars = np.asarray(noisy, np.float64), np.cumprod(1.0 - np.linspace(0.05, 0.2, 12))
    left = {0: 1.0, **{time: bars[time - 1] for time in range(1, 13)}}
    for time, earlier in ((12, 9), (9, 6), (6, 3), (3, 0)):
        eps = np.asarray(noise) * time / 10 + walked
        clean = (walked - np.sqrt(1 - left[time]) * eps) / np.sqrt(left[time])
        walked = np.sqrt(left[earlier]) * clean + np.sqrt(1 - left[earlier]) * eps
    np.testing.assert_allclose(found, walked, rtol=1e-4, atol=1e-5)


def test_the_printed_step_has_a_number_where_its_root_has_none():
    left = 1.0 - np.cumsum(STANDARD.betas)
    for time, share in ((100, left[100]), (200, left[200]), (201, left[200]), (1000, left[200])):
        _, noise, times, noisy = example(time)
        found = np.asarray(ddpm_step(STANDARD, noisy, times, noise, form="printed"))
        beta = STANDARD.betas[time]
        np.testing.assert_allclose(found, (noisy - beta / np.sqrt(share) * noise) / np.sqrt(1 - beta), rtol=1e-3)


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
    start = jax.random.normal(jax.random.key(2), (300, 2))
    intent = jax.nn.one_hot(jnp.repeat(jnp.arange(3), 100), 3)
    samples = ddim(lambda x, t: model.apply({"params": params}, x, t, intent)[0], schedule, start, start=100, steps=50)
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
