import flax.struct
import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Bool, Float, Int

from empax.core.shapes import shapes_of
from empax.core.types import Batch


@flax.struct.dataclass
class Wider(Batch):
    response: Int[Array, "B K T"] | None
    scores: Float[Array, "B 3"]


@flax.struct.dataclass
class Nested:
    batch: Batch
    valid: Bool[Array, " B"]


def test_shapes_and_types_are_those_of_the_annotations():
    found = shapes_of(Batch, B=4, S=16, T=8)
    assert isinstance(found, Batch)
    assert found.source == jax.ShapeDtypeStruct((4, 16), jnp.int32)
    assert found.target_mask == jax.ShapeDtypeStruct((4, 8), jnp.bool_)
    assert found.valid == jax.ShapeDtypeStruct((4,), jnp.bool_)
    wide = shapes_of(Wider, B=4, S=16, T=8, K=2)
    assert wide.response == jax.ShapeDtypeStruct((4, 2, 8), jnp.int32)
    assert wide.scores == jax.ShapeDtypeStruct((4, 3), jnp.float32)
    assert shapes_of(Nested, B=4, S=16, T=8).batch == found


def test_a_field_that_may_be_none_is_none_without_its_sizes():
    assert shapes_of(Wider, B=4, S=16, T=8).response is None


def test_a_missing_size_and_a_missing_annotation_are_named():
    with pytest.raises(ValueError, match=r"Batch\.target is \[B T\], but T has no size; give T="):
        shapes_of(Batch, B=4, S=16)
    shapes_of(Batch, B=4, S=16, T=1)  # as the message advises

    @flax.struct.dataclass
    class Untyped:
        source: object

    with pytest.raises(ValueError, match=r"Untyped\.source has no shape annotation"):
        shapes_of(Untyped, B=4)
