"""Counting in compiled programs, on cases whose answer is known."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from empax.planning.hlo import Program
from empax.planning.hlo_text import type_bytes

DEVICES = 8


def text_of(function, *shapes, **options):
    arrays = [one if hasattr(one, "dtype") else jax.ShapeDtypeStruct(one, jnp.float32) for one in shapes]
    return jax.jit(function, **options).lower(*arrays).compile().as_text()


def work_of(function, *shapes, **options):
    return Program(text_of(function, *shapes, **options)).work()


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:DEVICES]), ("data",))


def test_a_product_has_its_operations_and_bytes():
    work = work_of(lambda a, b: a @ b, (8, 16), (16, 32))
    assert work.flops == 2 * 8 * 16 * 32
    assert work.hbm_bytes == 4 * (8 * 16 + 16 * 32 + 8 * 32)
    assert work.collectives == ()


def test_batches_of_products_and_several_contracted_axes():
    work = work_of(lambda a, b: jnp.einsum("bhtn,bhsn->bhts", a, b), (2, 3, 5, 7), (2, 3, 11, 7))
    assert work.flops == 2 * 2 * 3 * 5 * 11 * 7
    assert work_of(lambda a, b: jnp.einsum("bthn,hnd->btd", a, b), (2, 5, 3, 7), (3, 7, 13)).flops == 2 * 10 * 21 * 13


def test_bytes_are_those_that_the_names_of_types_say():
    names = "s4 u4 s8 u8 f8e4m3fn f8e5m2 s16 u16 bf16 f16 s32 u32 f32 s64 u64 f64 c64"
    for name in re.findall(r"\w+", names):
        assert type_bytes(f"{name}[6,2]{{1,0:S(1)}}") == 12 * int(re.findall(r"\d+", name)[0]) / 8
    assert type_bytes("(pred[3], token[], opaque[])") == 3


KERNELS = """HloModule attention, entry_computation_layout={()->f32[]}

ENTRY %main (q: bf16[2,4,256,64], k: bf16[2,4,512,64]) -> bf16[2,4,256,64] {
  %q = bf16[2,4,256,64]{3,2,1,0} parameter(0)
  %k = bf16[2,4,512,64]{3,2,1,0} parameter(1)
  %a = bf16[2,4,256,64]{3,2,1,0} custom-call(%q, %k, %k), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/jvp()/jit(flash_attention)/pallas_call" stack_frame_id=6}
  %b = bf16[2,4,512,64]{3,2,1,0} custom-call(%q, %k, %k), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/jit(flash_attention)/flash_mha_bwd_dkv_block_q_major=128/pallas_call"}
  %c = bf16[2,4,512,64]{3,2,1,0} custom-call(%q, %k), custom_call_target="other", metadata={op_name="jit(f)/other"}
  ROOT %d = bf16[2,4,256,64]{3,2,1,0} custom-call(%q, %k, %k), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/jit(flash_attention)/flash_mha_bwd_dq_block_q_major=128/pallas_call"}
}
"""  # noqa: E501


def test_a_kernel_of_attention_counts_as_its_products():
    """Two forward; in the two backward ones logits and weights' gradients again, beside what each is for."""
    work = Program(KERNELS).work()
    assert work.flops == (2 + 4 + 3) * 2 * (2 * 4 * 256 * 512 * 64)
    query, key = 2 * 2 * 4 * 256 * 64, 2 * 2 * 4 * 512 * 64
    assert work.hbm_bytes == 3 * (query + 2 * key) + query + key + 2 * query + 2 * key


CONVOLUTIONS = [
    {"window_strides": (1, 1), "padding": "VALID"},
    {"window_strides": (2, 1), "padding": ((1, 2), (0, 3)), "rhs_dilation": (2, 1)},
    # How a TPU writes batches of products: one element of the source under each place of the window.
    {"window_strides": (5, 1), "padding": ((0, 0), (-1, 4)), "lhs_dilation": (6, 3)},
]


@pytest.mark.parametrize("options", CONVOLUTIONS)
def test_products_with_holes_and_padding_are_none(options):
    def function(source, kernel):
        return jax.lax.conv_general_dilated(source, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)

    shapes = (2, 6, 7, 3), (6, 2, 3, 4) if "lhs_dilation" in options else (3, 2, 3, 4)
    lowered = jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    text = lowered.compile(compiler_options={"xla_backend_optimization_level": 0}).as_text()
    assert " convolution(" in text
    counted = jnp.sum(function(*(jnp.ones(shape) for shape in shapes)))  # each product adds one
    assert Program(text).work().flops == 2 * counted


def stack(weights, states, *, unroll):
    def layer(states, weight):
        return jnp.tanh(states @ weight), None

    return jax.lax.scan(layer, states, weights, unroll=unroll)[0].sum()


@pytest.mark.parametrize("derive", [False, True])
def test_a_scanned_stack_does_what_the_unrolled_one_does(derive):
    layers, size, rows = 6, 24, 10
    found = []
    for unroll in (1, layers):

        def function(weights, states, unroll=unroll):
            return stack(weights, states, unroll=unroll)

        found.append(
            work_of(jax.grad(function, argnums=(0, 1)) if derive else function, (layers, size, size), (rows, size))
        )
    scanned, unrolled = found
    assert scanned.flops == unrolled.flops == (3 if derive else 1) * 2 * layers * rows * size * size


def test_loops_in_loops():
    def function(weights, states):
        def outer(states, _):
            return jax.lax.fori_loop(0, 3, lambda _, s: s @ weights, states), None

        return jax.lax.scan(outer, states, None, length=5)[0]

    assert work_of(function, (12, 12), (4, 12)).flops == 15 * 2 * 4 * 12 * 12


@pytest.mark.parametrize("place", [0, 1, 2])
def test_of_branches_the_costliest_counts(place):
    def function(index, weights, states):
        branches = [lambda s: s + 1.0, lambda s: s @ weights]
        branches.insert(place, lambda s: s @ weights @ weights)
        return jax.lax.switch(index, branches, states)

    work = work_of(function, jax.ShapeDtypeStruct((), jnp.int32), (12, 12), (4, 12))
    assert work.flops == 2 * 2 * 4 * 12 * 12


@pytest.mark.multidevice
def test_what_is_gathered(mesh):
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    work = work_of(lambda a: a * 2, (64, 4), in_shardings=split, out_shardings=whole)
    (one,) = work.collectives
    assert (one.kind, one.count, one.bytes, one.group) == ("all-gather", 1, 64 * 4 * 4, DEVICES)
    assert one.sent == one.bytes * (DEVICES - 1) / DEVICES


@pytest.mark.multidevice
def test_what_is_reduced_in_every_turn_of_a_loop(mesh):
    split, whole = NamedSharding(mesh, PartitionSpec(None, "data")), NamedSharding(mesh, PartitionSpec())

    def function(weights, states):
        def layer(states, weight):
            return jax.lax.with_sharding_constraint(states @ weight, whole), None

        return jax.lax.scan(layer, states, weights)[0]

    work = work_of(function, (5, 16, 16), (4, 16), in_shardings=(split, whole), out_shardings=whole)
    reduced = [one for one in work.collectives if one.kind == "all-reduce"]
    assert [(one.count, one.bytes, one.largest) for one in reduced] == [(5, 5 * 4 * 16 * 4, 4 * 16 * 4)]
    assert reduced[0].group == DEVICES
    assert reduced[0].sent == reduced[0].bytes * 2 * (DEVICES - 1) / DEVICES
    assert work.flops == 5 * 2 * 4 * 16 * 16 / DEVICES


TPU = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (x: bf16[8,4]) -> bf16[4,4] {
  %x = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %all = bf16[8,4]{1,0:T(8,128)(2,1)} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %part = bf16[4,4]{1,0:T(8,128)(2,1)} dynamic-slice(%all, %zero, %zero), dynamic_slice_sizes={4,4}
}

%body (t: (s32[], bf16[8,4], bf16[6,8,4])) -> (s32[], bf16[8,4], bf16[6,8,4]) {
  %t = (s32[]{:T(128)}, bf16[8,4]{1,0:S(1)}, /*index=2*/bf16[6,8,4]{2,1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  %h = bf16[8,4]{1,0:S(1)} get-tuple-element(%t), index=1
  %saved = bf16[6,8,4]{2,1,0} get-tuple-element(%t), index=2
  %w = bf16[4,4]{1,0} fusion(%h), kind=kCustom, calls=%all-reduce-scatter.1
  %g1 = bf16[8,4]{1,0} all-gather(%w), channel_id=2, replica_groups=mesh['a'=2,'b'=2] {'b'}, dimensions={0}
  %g2 = bf16[8,4]{1,0} all-gather(%w), channel_id=2, replica_groups=mesh['a'=2,'b'=2] {'b'}, dimensions={0}
  %c = bf16[8,4]{1,0:S(1)} convolution(%g1, %w), dim_labels=bf_io->bf
  %one = bf16[1,8,4]{2,1,0:S(1)} bitcast(%c)
  %zero = s32[]{:T(128)} constant(0)
  %next = bf16[6,8,4]{2,1,0} dynamic-update-slice(%saved, %one, %i, %zero, %zero)
  %two = s32[]{:T(128)} constant(2)
  %j = s32[]{:T(128)} add(%i, %two)
  ROOT %r = (s32[]{:T(128)}, bf16[8,4]{1,0:S(1)}, bf16[6,8,4]{2,1,0}) tuple(%j, %c, %next)
}

%condition (t: (s32[], bf16[8,4], bf16[6,8,4])) -> pred[] {
  %t = (s32[]{:T(128)}, bf16[8,4]{1,0:S(1)}, bf16[6,8,4]{2,1,0}) parameter(0)
  %limit = s32[]{:T(128)} constant(11)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

ENTRY %main (p: bf16[8,4], q: bf16[6,8,4]) -> bf16[6,8,4] {
  %p = bf16[8,4]{1,0:S(1)} parameter(0)
  %q = bf16[6,8,4]{2,1,0} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %start = (s32[]{:T(128)}, bf16[8,4]{1,0:S(1)}, bf16[6,8,4]{2,1,0}) tuple(%zero, %p, %q)
  %loop = (s32[]{:T(128)}, bf16[8,4]{1,0:S(1)}, bf16[6,8,4]{2,1,0}) while(%start), condition=%condition, body=%body
  ROOT %out = bf16[6,8,4]{2,1,0} get-tuple-element(%loop), index=2
}
"""


def test_a_tpus_way_of_writing():
    """Turns from the condition and the counter's steps (0, 2, ... 10), reduce-scatter as a fusion, one collective in
    several places, fast memory as S(1)."""
    work = Program(TPU).work()
    assert work.flops == 6 * 2 * 8 * 4 * 4
    assert [(one.kind, one.count, one.bytes, one.group) for one in work.collectives] == [
        ("all-gather", 6, 6 * 64, 2),
        ("reduce-scatter", 6, 6 * 64, 2),
    ]
    # Per turn: %w is written (32) and read three times, each gather writes 64, of which the product reads one; what is
    # updated in place is written, not the array around it (64, read and written); and the counter is three numbers.
    assert work.hbm_bytes == 6 * (32 + 2 * (32 + 64) + (64 + 32) + 0 + 3 * 4)


FUSIONS = """HloModule m, is_scheduled=true

%one_layer (all: bf16[6,8,4], i: s32[]) -> bf16[8,4] {
  %all = bf16[6,8,4]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %layer = bf16[1,8,4]{2,1,0} dynamic-slice(%all, %i, %zero, %zero), dynamic_slice_sizes={1,8,4}
  ROOT %flat = bf16[8,4]{1,0} bitcast(%layer)
}

%beside (buffer: bf16[32,32], stack: bf16[6,8,4], i: s32[]) -> (bf16[8,4], bf16[32,32]) {
  %buffer = bf16[32,32]{1,0} parameter(0)
  %stack = bf16[6,8,4]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %layer = bf16[8,4]{1,0} fusion(%stack, %i), kind=kLoop, calls=%one_layer
  ROOT %both = (bf16[8,4]{1,0}, bf16[32,32]{1,0}) tuple(%layer, %buffer)
}

%part (x: bf16[8,4]) -> bf16[2,4] {
  %x = bf16[8,4]{1,0} parameter(0)
  ROOT %rows = bf16[2,4]{1,0} slice(%x), slice={[0:2], [0:4]}
}

ENTRY %main (buffer: bf16[32,32], stack: bf16[6,8,4], i: s32[]) -> bf16[2,4] {
  %buffer = bf16[32,32]{1,0} parameter(0)
  %stack = bf16[6,8,4]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %both = (bf16[8,4]{1,0}, bf16[32,32]{1,0}) fusion(%buffer, %stack, %i), kind=kOutput, calls=%beside
  %layer = bf16[8,4]{1,0} get-tuple-element(%both), index=0
  %begun = ((bf16[8,4]{1,0}), bf16[2,4]{1,0}, u32[]) async-start(%layer), calls=%part
  ROOT %rows = bf16[2,4]{1,0} async-done(%begun)
}
"""


def test_what_passes_through_a_fusion_or_is_sliced_in_it_is_not_moved():
    # One layer is read and written, and the index read; later two of its rows are read and written.
    assert Program(FUSIONS).work().hbm_bytes == 2 * (8 * 4 * 2) + 4 + 2 * (2 * 4 * 2)


BESIDE = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%twice_reduced (x: f32[1024]) -> f32[256] {
  %x = f32[1024]{0} parameter(0)
  %y = f32[1024]{0} add(%x, %x)
  ROOT %r = f32[256]{0} reduce-scatter(%y), channel_id=9, replica_groups={{0,1,2,3}}, to_apply=%add
}

%doubled (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  ROOT %y = f32[1024]{0} add(%x, %x)
}

ENTRY %main (p: f32[1024], q: f32[1024]) -> f32[256] {
  %p = f32[1024]{0:T(1024)} parameter(0)
  %q = f32[1024]{0} parameter(1)
  LINES
}
"""
FOUR = "channel_id=2, replica_groups={{0,1,2,3}}"
EACH = 4 * 1024


@pytest.mark.parametrize(
    ("lines", "traffic", "kind", "size"),
    [
        (
            "%s = (f32[1024]{0:T(1024)}, f32[1024]{0:T(1024)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start"
            "(%p), channel_id=1, source_target_pairs={{0,1},{1,0}}\n %d = f32[1024] collective-permute-done(%s)",
            2 * EACH, "collective-permute", EACH,
        ),
        (
            f"%s = f32[1024]{{0}} all-reduce-start(%p), {FOUR}, to_apply=%add\n %d = f32[1024] all-reduce-done(%s)",
            2 * EACH, "all-reduce", EACH,
        ),
        (
            f"%s = (f32[1024]{{0}}, f32[1024]{{0}}) all-reduce-start(%p, %q), {FOUR}, to_apply=%add\n"
            " %d = (f32[1024], f32[1024]) all-reduce-done(%s)",
            4 * EACH, "all-reduce", 2 * EACH,
        ),
        (
            f"%s = (f32[1024], f32[4096]) all-gather-start(%p), {FOUR}\n %d = f32[4096] all-gather-done(%s)",
            5 * EACH, "all-gather", 4 * EACH,
        ),
        (
            f"%s = ((f32[1024], f32[1024]), (f32[4096], f32[4096])) all-gather-start(%p, %q), {FOUR}\n"
            " %d = (f32[4096], f32[4096]) all-gather-done(%s)",
            10 * EACH, "all-gather", 8 * EACH,
        ),
        (
            f"%s = ((f32[1024]), f32[256], s32[]) reduce-scatter-start(%p), {FOUR}, to_apply=%add\n"
            " %u = ((f32[1024]), f32[256], s32[]) reduce-scatter-update(%s)\n %d = f32[256] reduce-scatter-done(%u)",
            1.25 * EACH, "reduce-scatter", EACH,
        ),
        (
            "%s = ((f32[1024]), f32[256], s32[]) async-start(%p), calls=%twice_reduced\n %d = f32[256] async-done(%s)",
            (3 + 1.25) * EACH, "reduce-scatter", EACH,  # the sum reads its operand twice
        ),
        (  # in fast memory
            "%s = f32[1024]{0:S(1)} copy(%p)\n"
            f" %r = f32[1024]{{0:S(1)}} all-reduce(%s), {FOUR}, to_apply=%add",
            EACH, "all-reduce", EACH,
        ),
        (
            "%s = (f32[1024]{0:S(1)}, f32[1024], u32[]) copy-start(%p)\n %d = f32[1024]{0:S(1)} copy-done(%s)",
            EACH, "", 0,
        ),
        (
            "%s = ((f32[1024]), f32[256]{0}, s32[]) slice-start(%p), slice={[0:256]}\n %d = f32[256] slice-done(%s)",
            0.5 * EACH, "", 0,
        ),
        (
            "%s = ((f32[1024]), f32[1024], s32[]) fusion-start(%p), kind=kLoop, calls=%doubled\n"
            " %d = f32[1024] fusion-done(%s)",
            2 * EACH, "", 0,
        ),
    ],
)  # fmt: skip
def test_what_starts_and_ends_apart_counts_once(lines, traffic, kind, size):
    work = Program(BESIDE.replace("LINES", lines)).work()
    assert work.hbm_bytes == traffic
    sent = size * {"collective-permute": 1.0, "all-reduce": 1.5}.get(kind, 0.75)  # by one of four
    expected = [(kind, 1, size, size, sent)] if kind else []
    assert [(one.kind, one.count, one.bytes, one.largest, one.sent) for one in work.collectives] == expected


def test_what_cannot_be_read_says_so():
    with pytest.raises(ValueError, match="has no ENTRY"):
        Program("nothing")
    with pytest.raises(ValueError, match="cannot tell how often the loop loop runs"):
        Program(TPU.replace("constant(11)", "parameter(1)")).work()
