"""NEC's tasks: every part changes something where it is on, and nothing where it is off."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import nec
from empax.core.tree import named_leaves
from empax.losses.contrastive import rank_margin
from empax.parts.generator.contrast import Candidates
from empax.systems.nec.settings import SOCIAL
from empax.systems.nec.stages import _without_memory
from tests.systems.learning import learn
from tests.systems.nec.small import BEAM, EOS, PAD, batch, contrastive, decoder, initial, made_up, model, plain

TARGETS = [[5, 6, 7, EOS], [8, 9, EOS], [10, 11, 12, 13, EOS], [5, 6, 9, EOS]]
NO_FACTS = [[[]] * 5] * len(TARGETS)


@pytest.fixture(scope="module")
def made():
    task, given = contrastive(), batch(TARGETS)
    return task, given, made_up(task, given)


def with_contrast(task, **changes):
    return dataclasses.replace(task, contrast=dataclasses.replace(task.contrast, **changes))


def candidates(task, given):
    def found(given):
        made = task.candidates(given)
        return made.ids, made.mask, made.scores, made.present

    return Candidates(*jax.jit(found)(given))


def similarities(task, params, read, found):
    return task.ranking(params).similarities(read, found.ids, found.mask, None)


def contrasted(task, params, given):
    return task.contrasted(params, given, task.encode(params, given, None), (None, None))


def contrast_of(task, params, given):
    return jax.jit(lambda p, b: contrasted(task, p, b).value())(params, given)


@functools.lru_cache
def nll_of(task):
    return jax.jit(lambda p, b: task.loss(p, {}, b, jax.random.key(0), train=False)[1]["nll"].value())


def nll(task, params, given):
    return float(nll_of(task)(params, given))


def test_other_facts_about_people_change_the_likelihood(made):
    _, given, params = made
    other = batch(TARGETS, facts=[[[3, 4]] * 5] * len(TARGETS))
    assert nll(plain(), params, given) != pytest.approx(nll(plain(), params, other), abs=1e-5)


def test_the_order_of_facts_and_their_padding_change_nothing(made):
    """Rows with other numbers of facts, which are of other lengths; whatever stands under the padding."""
    _, _, params = made
    none = [[]]
    facts = [[[3, 4, 5], [6, 7], [8], *none * 2], [[9, 10], *none * 4], [[11], [], [12, 13, 14], *none * 2], none * 5]
    given = batch(TARGETS, facts=facts)
    wide = ((0, 0), (0, 2), (0, 3))
    mask = jnp.pad(given.facts_mask, wide)
    padded = given.replace(facts=jnp.where(mask, jnp.pad(given.facts, wide), 9), facts_mask=mask)
    turned = given.replace(facts=given.facts[:, ::-1], facts_mask=given.facts_mask[:, ::-1])
    for other in (padded, turned):
        assert nll(plain(), params, other) == pytest.approx(nll(plain(), params, given), rel=1e-5)


def test_facts_are_read_at_unit_variance_however_small_the_encoders_states_are(made):
    """The states of FLAN-T5-small have a root mean square of 0.1; in a random model of this size 1 is usual."""
    _, given, params = made
    encode = jax.jit(lambda p: plain().encode(p, given, None).beside["memories"][SOCIAL].states)
    small = {**params["social"]["encoder"]}
    small["final_norm"] = jax.tree.map(lambda leaf: 0.1 * leaf, small["final_norm"])
    for encoder in (params["social"]["encoder"], small):
        states = encode({**params, "social": {"encoder": encoder}})
        np.testing.assert_allclose(jnp.mean(states**2, axis=-1), 1.0, rtol=1e-4)


@pytest.mark.slow
def test_facts_that_are_not_there_change_nothing(made):
    """Without any fact the model is the one that never had a memory, to the bit."""
    task, _, params = made
    without = plain(social=False)
    read = jax.jit(lambda p, b: task.read(p, b)["nll"])(params, batch(TARGETS, facts=NO_FACTS))
    bare = {"model": _without_memory(params["model"])}
    assert set(named_leaves(bare)) == set(named_leaves(jax.eval_shape(without.init, jax.random.key(0), batch(TARGETS))))
    expected = jax.jit(lambda p, b: without.read(p, b)["nll"])(bare, batch(TARGETS, social=False))
    np.testing.assert_array_equal(read, expected)


def test_the_attention_to_facts_can_become_as_strong_as_the_others_of_a_pretrained_t5():
    """Whose output weights have a root mean square of .4 to 1.8; the new ones begin at .05."""
    config, silent = nec.get_config(""), nec.get_config("no_social")
    optimizer, (group,) = config.generator.optimizer, config.generator.optimizer.groups
    names = named_leaves(jax.eval_shape(plain().init, jax.random.key(0), batch(TARGETS)))
    found = [name for name in names if re.search(group["pattern"], name)]
    assert found == ["model/decoder/layers/social/attention/out"]
    assert 0.4 < optimizer.learning_rate * group["learning_rate_scale"] * config.generator.steps / 2 < 1.8
    assert len(config.contrastive.optimizer.groups) == 1
    assert not silent.generator.optimizer.groups
    assert not silent.contrastive.optimizer.groups
    assert len(nec.get_config("scratch,no_social").generator.optimizer.groups) == 1  # the positions


@pytest.mark.slow
def test_the_encoders_share_the_embeddings_and_not_the_layers(made):
    task, given, params = made
    assert set(params["social"]) == {"encoder"}
    assert set(params) == {"model", "social", "projection"}
    gradient = jax.jit(jax.grad(lambda p: task.loss(p, {}, given, jax.random.key(0), train=False)[0].value()))(params)
    changed = [name for name, leaf in named_leaves(gradient["social"]).items() if np.abs(leaf).max() > 0]
    assert any("attention" in name for name in changed)


@pytest.mark.slow
def test_a_decoded_token_is_what_teacher_forcing_says(made):
    """The keys of facts are in the cache once, whatever beams are reordered."""
    task, given, params = made
    greedy = dataclasses.replace(task, decoder=decoder(dataclasses.replace(BEAM, rerank="", num_beams=1)))
    found = jax.jit(lambda p, b: greedy.generate(p, {}, b, jax.random.key(0)))(params, given).tokens[:, 0]
    logits = jax.jit(lambda p, b, t: task.logits(p, b.replace(target=t), task.encode(p, b, None), None))(
        params, given, found
    )
    ended = jnp.cumsum(found == EOS, axis=1) - (found == EOS) > 0
    np.testing.assert_array_equal(jnp.where(ended, PAD, logits.argmax(axis=-1)), found)


def test_the_first_candidate_is_the_rows_own_target_in_any_batch(made):
    """NEC's code looks for it at a place where another sample stands."""
    task, _, _ = made
    order = [2, 0, 3, 1]
    for targets in (TARGETS, [TARGETS[i] for i in order]):
        found = candidates(task, batch(targets))
        for row, target in enumerate(targets):
            assert found.ids[row, 0, : len(target)].tolist() == target
            best = np.where(found.present[row], found.scores[row], -1.0)
            assert best.argmax() == 0
            assert best[0] == 1.0
            assert (best[1:] < 0.99).all()


def test_candidates_are_scored_by_bigrams_with_one_framing_and_equal_texts_are_none(made):
    task, _, _ = made
    frequent = [[[5, 6, 7, EOS], [5, 6, EOS]]] * 2
    found = candidates(task, batch([[5, 6, 7, EOS], [5, 6, 7, EOS]], frequent=frequent))
    columns = (x[0] for x in (found.ids, found.mask, found.scores, found.present))
    said = {tuple(np.asarray(ids)[np.asarray(mask)].tolist()): float(score)
            for ids, mask, score, here in zip(*columns, strict=True) if here}  # fmt: skip
    # start 5, 5 6 and 6 end: two of three, and one token less than the target: exp(1 - 5 / 4).
    assert said == {(5, 6, 7, EOS): 1.0, (5, 6, EOS): pytest.approx(2 / 3 * np.exp(1 - 5 / 4), rel=1e-5)}


def test_no_more_candidates_than_the_cap_and_the_best_are_kept(made):
    task, _, _ = made
    capped = with_contrast(task, max_candidates=2)
    given = batch(TARGETS, frequent=[[[5, 6, EOS], [20, EOS]]] * 4)
    found, everything = candidates(capped, given), candidates(task, given)
    assert found.ids.shape[1] == 3
    best = -np.sort(-np.where(everything.present, everything.scores, -1.0), axis=1)
    np.testing.assert_allclose(np.where(found.present, found.scores, -1.0), best[:, :3])


@pytest.mark.parametrize("kind", ["own", "frequent", "different", "in_batch"])
def test_every_kind_of_candidate_is_among_them(made, kind):
    task, _, _ = made
    texts = {"own": [[[5, 9, EOS]]] * 4, "frequent": [[[8, 9, 7, EOS]]] * 4, "different": [[[10, 6, 12, EOS]]] * 4}
    given = batch(TARGETS, **texts)
    less, without = with_contrast(task, in_batch=kind != "in_batch"), given
    if kind != "in_batch":
        without = given.replace(**{kind: None, f"{kind}_mask": None})
    assert int(candidates(less, without).present.sum()) < int(candidates(task, given).present.sum())


@pytest.mark.slow
def test_padded_candidates_and_filler_rows_change_nothing(made):
    task, given, params = made
    given = batch(TARGETS, frequent=[[[8, 9, EOS], [5, EOS]]] * 4)
    contrast = functools.partial(contrast_of, task)
    expected = contrast(params, given)
    more = {name: jnp.pad(getattr(given, name), [(0, 0), (0, 2), (0, 3)]) for name in ("frequent", "frequent_mask")}
    np.testing.assert_allclose(contrast(params, given.replace(**more)), expected, rtol=1e-5)
    filler = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:1]]), given)
    filler = filler.replace(valid=jnp.asarray([True] * 4 + [False]))
    np.testing.assert_allclose(contrast(params, filler), expected, rtol=1e-5)


@pytest.mark.slow
def test_contrast_alone_gives_the_output_projection_no_gradient():
    task = contrastive()
    task = dataclasses.replace(task, model=model(tie_embeddings=False))
    given = batch(TARGETS)
    params = initial(task, given)
    gradient = jax.jit(jax.grad(lambda p: contrasted(task, p, given).value()))(params)
    assert float(jnp.abs(gradient["model"]["output_embedding"]).max()) == 0.0
    assert float(jnp.abs(gradient["projection"]["kernel"]).max()) > 0.0
    assert float(jnp.abs(gradient["model"]["token_embedding"]).max()) > 0.0


@pytest.mark.slow
def test_the_models_own_candidates_are_its_beams_with_their_end(made):
    task, given, params = made
    found = jax.jit(lambda p, b: task.explore(p, {}, b, jax.random.key(0)))(params, given)
    beams = jax.jit(
        lambda p: task.search(task.explorer, p, given, task.encode(p, given, None), jax.random.key(0)).tokens
    )
    np.testing.assert_array_equal(found.own, beams(params))
    for row in range(4):
        for beam in range(2):
            ids, mask = np.asarray(found.own[row, beam]), np.asarray(found.own_mask[row, beam])
            ended = np.flatnonzero(ids == EOS)
            assert mask.sum() == (ended[0] + 1 if len(ended) else len(ids))
    assert contrastive(own=False).explore(params, {}, given, jax.random.key(0)) is given


@pytest.mark.slow
def test_a_larger_margin_asks_for_more(made):
    task, given, params = made
    wide = with_contrast(task, margin=0.2)
    found = [float(contrast_of(one, params, given)) for one in (task, wide)]
    assert found[1] > found[0] + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_answers_are_the_beams_by_likelihood_or_by_cosine(made, weight):
    task, given, params = made
    decoding = dataclasses.replace(BEAM, rerank_similarity=weight)
    ranking = dataclasses.replace(task, decoder=decoder(decoding))
    found = jax.jit(lambda p: ranking.generate(p, {}, given, jax.random.key(0)))(params)
    plain_beams = decoder(dataclasses.replace(BEAM, rerank=""))
    beams = jax.jit(
        lambda p: task.search(plain_beams, p, given, task.encode(p, given, None), jax.random.key(0)).tokens
    )(params)
    if not weight:
        np.testing.assert_array_equal(found.tokens, beams)
        return
    made_up = (beams != EOS) & (beams != PAD)
    whole = jnp.arange(beams.shape[2])[None, None] <= made_up.sum(axis=2, keepdims=True)
    scored = Candidates(beams, whole, jnp.zeros(beams.shape[:2]), whole.any(axis=2))
    cosines = jax.jit(lambda p: similarities(task, p, task.encode(p, given, None), scored))(params)
    best = jnp.take_along_axis(beams, cosines.argmax(axis=1)[:, None, None], axis=1)[:, 0]
    np.testing.assert_array_equal(found.tokens[:, 0], best)


@pytest.mark.slow
def test_the_control_answers_with_any_of_the_beams(made):
    task, given, params = made
    control, likeliest = (
        dataclasses.replace(task, decoder=decoder(dataclasses.replace(BEAM, rerank=rule))) for rule in ("random", "")
    )
    beams = np.asarray(jax.jit(lambda p: likeliest.generate(p, {}, given, jax.random.key(0)).tokens)(params))
    draw = jax.jit(lambda p, rng: control.generate(p, {}, given, rng).tokens[:, 0])
    said = np.stack([np.asarray(draw(params, jax.random.key(seed))) for seed in range(12)])
    equal = (said[:, :, None] == beams).all(axis=-1)  # [draw, row, beam]
    np.testing.assert_array_equal(equal.sum(axis=-1), 1)
    assert equal.any(axis=0).all()


def test_the_encoding_of_a_context_leaves_its_last_state_out(made):
    task, given, params = made

    @jax.jit
    def run(params):
        read = task.encode(params, given, None)
        return read.states, task.ranking(params).encoding(read)

    states, found = run(params)
    projected = np.maximum(states @ params["projection"]["kernel"] + params["projection"]["bias"][None, None], 0.0)
    for row, count in enumerate(np.asarray(given.source_mask).sum(axis=1)):
        np.testing.assert_allclose(found[row], projected[row, : count - 1].mean(axis=0), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("reversed_scores", [False, True])
def test_contrast_teaches_the_order_of_candidates(reversed_scores):
    """Six kinds of contexts with a reply each; on others of the kind cosines have the order that was taught.

    Kendall's tau is over the pairs whose scores differ: all other replies of a batch score 0, and have no order.
    """
    rng = np.random.default_rng(0)
    replies = [[3 + 3 * k, 4 + 3 * k, 5 + 3 * k, 3 + 3 * k, EOS] for k in range(6)]
    task = contrastive(own=False, margin=0.05)

    def example(rng):
        kinds = rng.permutation(6)
        worse = [[[*replies[k][:3], EOS], [*replies[k][:2], EOS], [replies[k][0], EOS]] for k in kinds]
        given = batch([replies[k] for k in kinds], frequent=worse, social=True)
        source = np.stack([rng.permutation(np.repeat(3 + 3 * k + np.arange(3), [3, 2, 2])) for k in kinds])
        mask = jnp.ones(source.shape, bool)
        return given.replace(source=jnp.asarray(source, jnp.int32), source_mask=mask)

    def objective(params, given):
        read = task.encode(params, given, None)
        found = candidates(task, given)
        scores = 1.0 - found.scores if reversed_scores else found.scores
        cosines = similarities(task, params, read, found)
        return rank_margin(cosines, scores, found.present, margin=0.05), {}

    params = initial(task, example(rng))
    params, _ = learn(objective, params, (example(rng) for _ in range(400)), 3e-3)
    held_out = example(np.random.default_rng(99))
    found = candidates(task, held_out)
    cosines = similarities(task, params, task.encode(params, held_out, None), found)
    here = np.asarray(found.present)
    both = np.asarray(cosines), np.asarray(found.scores)
    taus = [tau(*(values[r][here[r]] for values in both)) for r in range(6)]
    assert np.mean(taus) < -0.9 if reversed_scores else np.mean(taus) > 0.9


def tau(cosines, scores):
    """Share of the pairs with different scores that cosines order alike, less the share that they order otherwise."""
    one, other = np.triu_indices(len(scores), 1)
    signs = np.sign(cosines[one] - cosines[other]) * np.sign(scores[one] - scores[other])
    return signs.sum() / (scores[one] != scores[other]).sum()
