from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import resource
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from empax.core.manifest import write_sealed
from empax.core.sharding import MeshSettings, make_mesh, shard_params
from empax.core.tree import hash_tree
from empax.core.types import TrainState
from empax.training.checkpoint import Checkpointer, CheckpointError, load_params, newest_best

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def make_state(scale=1.0, rows=4):
    return _make_state(jnp.float32(scale), rows)


@functools.partial(jax.jit, static_argnums=1)
def _make_state(scale, rows):
    params = {"a": {"kernel": scale * jnp.linspace(0.1, 1.0, 8 * rows).reshape(rows, 8)}, "bias": jnp.full(3, scale)}
    state = TrainState(jnp.int32(7), params, OPTIMIZER.init(params), jax.random.key(3))
    _, opt_state = OPTIMIZER.update(params, state.opt_state, params)
    return dataclasses.replace(state, opt_state=opt_state)


def fingerprint(state):
    return hash_tree(dataclasses.replace(state, rng=jax.random.key_data(state.rng)))


def opened(directory):
    return contextlib.closing(Checkpointer(directory))


def saved(directory, *steps, best=()):
    """Saves the best parameters of these steps and one checkpoint per step, each of its own values, in their order."""
    with opened(directory) as checkpointer:
        for step in sorted({*steps, *best}):
            if step in best:
                checkpointer.save_best(step, make_state(step).params, 1.0)
            if step in steps:
                checkpointer.save(step, make_state(step), {"best_value": step / 3})


def restore(directory, template=None):
    with opened(directory) as checkpointer:
        return checkpointer.restore_latest(make_state() if template is None else template)


def steps_in(folder):
    return sorted(path.name for path in folder.iterdir())


def flipped(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def damage(path, how):
    files = [file for file in path.rglob("*") if file.is_file()]
    if how == "unfinished":
        (path / "COMPLETE").unlink()
    elif how == "missing file":
        next(file for file in files if file.name == "manifest.ocdbt").unlink()
    elif how == "flipped bit":
        file = max((file for file in files if file.parent.name == "d"), key=lambda file: file.stat().st_size)
        flipped(file, file.stat().st_size // 2)
    elif how == "empty mark":
        (path / "COMPLETE").write_text("")


def test_round_trip_is_bitwise_and_typed_key_survives(tmp_path):
    saved(tmp_path, 7)
    step, state, extra = restore(tmp_path, jax.eval_shape(make_state))
    assert (step, extra) == (7, {"best_value": 7 / 3})
    assert fingerprint(state) == fingerprint(make_state(7))
    assert jax.tree.structure(state) == jax.tree.structure(make_state())
    assert jax.random.uniform(state.rng) == jax.random.uniform(jax.random.key(3))


def test_the_memory_of_a_task_is_restored(tmp_path):
    state = dataclasses.replace(make_state(), memory={"kl": jnp.float32(0.25)})
    with opened(tmp_path) as checkpointer:
        checkpointer.save(7, state, {})
    _, restored, _ = restore(tmp_path, dataclasses.replace(state, memory={"kl": jnp.float32(1.0)}))
    assert float(restored.memory["kl"]) == 0.25


def test_saving_does_not_mind_donation(tmp_path):
    """The state is overwritten in place while its save is still under way."""
    update = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 2, state), donate_argnums=0)
    state = make_state(5, rows=40_000)
    expected = hash_tree(state.params)
    with opened(tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
        moving = (state.params, state.opt_state)
        for _ in range(5):
            moving = update(moving)
    assert hash_tree(load_params(tmp_path, "last")) == expected


@pytest.mark.parametrize("how", ["unfinished", "missing file", "flipped bit", "empty mark"])
def test_damaged_newest_falls_back_with_a_warning(tmp_path, how, caplog):
    saved(tmp_path, 3, 6)
    damage(tmp_path / "checkpoints" / "6", how)
    with caplog.at_level("WARNING"):
        step, state, _ = restore(tmp_path)
    assert step == 3
    assert fingerprint(state) == fingerprint(make_state(3))
    assert "checkpoints/6" in caplog.text
    assert ("never finished" if how == "unfinished" else "falling back") in caplog.text
    saved(tmp_path, 6)  # and the damaged one is replaced
    assert restore(tmp_path)[0] == 6


def test_all_damaged_starts_anew_and_says_so(tmp_path, caplog):
    saved(tmp_path, 3)
    damage(tmp_path / "checkpoints" / "3", "flipped bit")
    with caplog.at_level("WARNING"):
        assert restore(tmp_path) is None
    assert "training starts anew" in caplog.text
    assert restore(tmp_path / "nothing") is None


def test_a_run_that_starts_anew_beside_damaged_checkpoints_keeps_its_own(tmp_path):
    saved(tmp_path, 6, 9, best=(6,))
    for step in ("6", "9"):
        damage(tmp_path / "checkpoints" / step, "flipped bit")
    assert restore(tmp_path) is None
    saved(tmp_path, 3, best=(2,))
    assert steps_in(tmp_path / "checkpoints") == ["3"]
    assert restore(tmp_path)[0] == 3
    saved(tmp_path, 4)  # and a fallback
    damage(tmp_path / "checkpoints" / "4", "flipped bit")
    assert restore(tmp_path)[0] == 3


def test_a_record_with_a_changed_bit_counts_no_more(tmp_path, caplog):
    """Whichever bit it is: what is the best, the history, the shapes, the checksums, the names of all these."""
    for step in (3, 6):
        saved(tmp_path, step)
    mark = tmp_path / "checkpoints" / "6" / "COMPLETE"
    record = mark.read_bytes()
    for position in [*range(0, len(record), 197), record.index(b'"checksum"') + 3, record.index(b"2.0")]:
        mark.write_bytes(record)
        flipped(mark, position)
        caplog.clear()
        step, _, extra = restore(tmp_path)
        unchanged = (step, extra) == (6, {"best_value": 2.0}) and chr(record[position]).isspace()
        assert unchanged or (step == 3 and "falling back" in caplog.text), position
    mark.write_bytes(record)
    assert restore(tmp_path)[0] == 6


def test_a_record_may_hold_what_json_has_no_word_for(tmp_path):
    with opened(tmp_path) as checkpointer:
        checkpointer.save(3, make_state(3), {"best_value": float("nan"), "rows": ("a",)})
    assert restore(tmp_path)[2] == {"best_value": None, "rows": ["a"]}


@pytest.mark.parametrize("how", ["unfinished", "flipped bit", "gone"])
def test_damaged_best_parameters_are_refused_before_training_goes_on(tmp_path, how):
    """They are what the stage would give in the end."""
    saved(tmp_path / "generator", 2, 4, 6, best=(2,))
    best = tmp_path / "generator" / "best" / "2"
    shutil.rmtree(best) if how == "gone" else damage(best, how)
    message = r"best/2, the best parameters up to step 4, is damaged .*no older checkpoint.*--redo=generator"
    with pytest.raises(CheckpointError, match=message):
        restore(tmp_path / "generator")


def test_damaged_best_parameters_are_met_again_where_an_older_checkpoint_knows_others(tmp_path, caplog):
    saved(tmp_path, 2, 4, best=(2, 4))
    damage(tmp_path / "best" / "4", "flipped bit")
    assert restore(tmp_path)[0] == 2
    assert "best/4, the best parameters up to step 4, is damaged" in caplog.text
    assert hash_tree(load_params(tmp_path)) == hash_tree(make_state(2).params)


def test_keeps_the_newest_and_the_best_they_know(tmp_path):
    saved(tmp_path, 1, 2, 3, best=(1, 3))
    assert steps_in(tmp_path / "best") == ["1", "3"]  # the checkpoint of step 2 knows no better than the best of step 1
    saved(tmp_path, 4)
    assert steps_in(tmp_path / "checkpoints") == ["3", "4"]
    assert steps_in(tmp_path / "best") == ["3"]


@pytest.mark.parametrize(("best", "known"), [((2, 4), 2), ((2, 3), 3)])
def test_best_saved_after_the_restored_step_is_forgotten_and_at_it_stays(tmp_path, best, known):
    saved(tmp_path, 3, best=best)
    assert restore(tmp_path)[0] == 3
    assert hash_tree(load_params(tmp_path)) == hash_tree(make_state(known).params)


def test_best_saved_before_any_checkpoint_is_forgotten(tmp_path):
    saved(tmp_path, best=(0,))
    assert restore(tmp_path) is None
    assert steps_in(tmp_path / "best") == []


def test_load_params_needs_no_model(tmp_path):
    saved(tmp_path, 3, best=(2,))
    for which, scale in (("best", 2), ("last", 3)):
        params = load_params(tmp_path, which)
        assert all(type(leaf) is np.ndarray and leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))
        assert hash_tree(params) == hash_tree(make_state(scale).params)
    assert newest_best(tmp_path) == 2
    assert newest_best(tmp_path / "generator") is None
    with pytest.raises(CheckpointError, match="run the stage 'generator' first"):
        load_params(tmp_path / "generator")
    damage(tmp_path / "best" / "2", "flipped bit")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_params(tmp_path)


def test_kept_parameters_stay_whatever_is_saved_later(tmp_path):
    with opened(tmp_path) as checkpointer:
        for step in range(1, 6):
            if step in (1, 3):
                checkpointer.keep(step, make_state(10 * step).params)
            checkpointer.save_best(step, make_state(step).params, 1.0)
            checkpointer.save(step, make_state(step), {})
    assert steps_in(tmp_path / "kept") == ["1", "3"]
    assert hash_tree(load_params(tmp_path, 3)) == hash_tree(make_state(30).params)
    with pytest.raises(CheckpointError, match="kept holds no parameters of step 2; it holds those of 1, 3"):
        load_params(tmp_path, 2)
    damage(tmp_path / "kept" / "1", "flipped bit")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_params(tmp_path, 1)


def test_parameters_kept_after_the_restored_step_are_forgotten(tmp_path):
    with opened(tmp_path) as checkpointer:
        for step in (2, 4):
            checkpointer.keep(step, make_state(step).params)
        checkpointer.save(3, make_state(3), {})
    restore(tmp_path)
    assert steps_in(tmp_path / "kept") == ["2"]


def test_a_finished_stage_has_the_parameters_that_its_result_names(tmp_path):
    saved(tmp_path, 3, 5, best=(2, 4))
    write_sealed(tmp_path / "result.json", {"step": 3, "best_step": 2})
    for which, scale in (("best", 2), ("last", 3)):
        assert hash_tree(load_params(tmp_path, which)) == hash_tree(make_state(scale).params)
    shutil.rmtree(tmp_path / "best" / "2")
    with pytest.raises(CheckpointError, match=r"best/2, which result\.json names, is gone"):
        load_params(tmp_path)
    (tmp_path / "result.json").rename(tmp_path / "DONE")
    with pytest.raises(CheckpointError, match=r"result\.json is gone"):
        load_params(tmp_path)


def test_another_model_is_refused_by_name(tmp_path):
    saved(tmp_path, 3)
    message = r"params/a/kernel is float32\[4, 8\] in it, float32\[5, 8\] now"
    with pytest.raises(CheckpointError, match=message):
        restore(tmp_path, make_state(rows=5))
    other = make_state()
    other.params["bias"] = jnp.zeros(4)
    with pytest.raises(CheckpointError, match=r"params/bias is float32\[3\] in it, float32\[4\] now"):
        restore(tmp_path, other)


# Orbax abandons its other writes when one fails; they complain when they are collected.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("method", ["save", "save_best"])
def test_full_disk_names_what_failed_and_leaves_the_earlier_checkpoint(tmp_path, method, caplog):
    """A limit on file sizes stands in for a full disk: the kernel refuses the write in the same place."""
    saved(tmp_path, 3)
    big = make_state(5, rows=40_000)
    noise = np.random.default_rng(0).normal(size=big.params["a"]["kernel"].shape)  # does not compress
    big.params["a"]["kernel"] = jnp.asarray(noise, jnp.float32)
    checkpointer = Checkpointer(tmp_path)

    def save_and_wait():
        if method == "save":
            checkpointer.save(6, big, {})
        else:
            checkpointer.save_best(6, big.params, 1.0)
        checkpointer.wait()

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"/6 failed .*; intact: the checkpoints of steps 3\. Make room"):
            save_and_wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "failed" in caplog.text
    checkpointer.close()
    step, state, _ = restore(tmp_path)
    assert (step, fingerprint(state)) == (3, fingerprint(make_state(3)))
    with opened(tmp_path) as checkpointer:
        checkpointer.save(9, big, {})  # room again
    assert hash_tree(load_params(tmp_path, "last")) == hash_tree(big.params)


def test_check_tells_of_a_failed_background_save_and_waits_for_none(tmp_path, monkeypatch):
    checkpointer, disk_is_full = Checkpointer(tmp_path), threading.Event()
    checkpointer.check()  # nothing to tell
    assert not checkpointer.wait()
    checkpointer.save(1, make_state(), {})
    assert checkpointer.wait()

    def finish(*_):
        checkpointer._orbax.wait_until_finished()
        disk_is_full.wait()
        raise OSError("no space left")

    monkeypatch.setattr(checkpointer, "_finish", finish)
    checkpointer.save(3, make_state(), {})
    checkpointer.check()  # still under way
    disk_is_full.set()
    concurrent.futures.wait([checkpointer._pending[1]])
    with pytest.raises(CheckpointError, match=r"saving .*/3 failed .*no space left"):
        checkpointer.check()
    checkpointer.close()


def test_half_written_folders_of_a_killed_process_are_removed(tmp_path):
    saved(tmp_path, 3)
    shutil.copytree(tmp_path / "checkpoints" / "3", tmp_path / "checkpoints" / "6.orbax-checkpoint-tmp")
    (tmp_path / "checkpoints" / "6.orbax-checkpoint-tmp" / "COMPLETE").unlink()
    assert restore(tmp_path)[0] == 3
    assert steps_in(tmp_path / "checkpoints") == ["3"]


def test_what_cannot_be_removed_counts_no_more_and_stops_nobody(tmp_path):
    """Somebody moved a checkpoint to another disk and left a link."""
    saved(tmp_path, 3, 6)
    link = tmp_path / "checkpoints" / "3"
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    saved(tmp_path, 9)
    assert restore(tmp_path)[0] == 9
    assert steps_in(tmp_path / "checkpoints") == ["3", "6", "9"]
    with pytest.raises(CheckpointError, match=r"checkpoints/3 failed .*; intact: the checkpoints of steps 6, 9\."):
        saved(tmp_path, 3)  # Orbax refuses at once


@pytest.mark.multidevice
def test_restores_straight_into_another_mesh(tmp_path):
    saved(tmp_path, 3)
    mesh = make_mesh(MeshSettings(data=2, fsdp=4))
    shapes = jax.eval_shape(make_state)
    template = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        shard_params(shapes, mesh),
    )
    _, state, _ = restore(tmp_path, template)
    assert state.params["a"]["kernel"].sharding.spec == jax.sharding.PartitionSpec(None, "fsdp")
    assert fingerprint(state) == fingerprint(make_state(3))
