"""What a plan says of a recipe whose weights are not at hand."""

import math
import re

import pytest

from configs import emprl_llm, emprl_transformer, layouts, reg_t5
from configs.reg_llm import get_config
from empax.core.config import ConfigError
from empax.pipeline.plan import make_plan, plain
from empax.planning.plan import describe
from empax.planning.sketches import sketch_stage, update_flops
from empax.training.settings import check_batch_sizes
from tests.plans import changed

SMALL = {"d_model": 32, "num_heads": 2, "d_ff": 64, "num_layers": 2}
LINE = re.compile(
    r"^(\w+) +train .* ([\d.]+) M parameters, (\d+) MB for parameters, gradients and optimiser, (?:(\d+) MB frozen, )?",
    re.MULTILINE,
)
# Llama-3.1-8B: adapters of rank 16 on every matrix of 32 layers, and the emotion head.
SUM_OF_SIDES = (4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 14336) * 3
TRAINED = 32 * 16 * SUM_OF_SIDES + 32 * 4096 + 32
WEIGHTS = 8_030_261_248
EMBEDDINGS, NORMS = 2 * 128256 * 4096, 65 * 4096
MATRICES = WEIGHTS - EMBEDDINGS - NORMS
HALF = 2 * (WEIGHTS - NORMS) + 4 * NORMS  # what lies frozen is kept in bfloat16 but for the norms
OUTPUTS = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)


def planned(*, run=("generator",), preset="llama-3.1-8b", fsdp=1, **lora):
    """Trained, its bytes and the frozen ones in MB, by stage."""
    changes = {"run": list(run), "mesh.fsdp": fsdp, "reg.generator.preset": preset, "reg.retriever": SMALL}
    changes |= {f"reg.lora.{name}": value for name, value in lora.items()}
    found = LINE.findall(describe(make_plan(changed(plain(get_config("llama-3.1-8b")), changes))))
    assert len(found) == len(run)
    return {name: (float(params), float(size), float(frozen)) for name, params, size, frozen in found}


def test_adapters_alone_are_trained_and_what_they_sit_on_counts_once():
    params, size, frozen = planned()["generator"]
    assert params == pytest.approx(TRAINED / 1e6, abs=0.01)
    assert size == pytest.approx((2 + 2) * 4 * TRAINED / 1e6, abs=1)  # value, gradient, two moments
    assert frozen == pytest.approx(HALF / 1e6, abs=1)


@pytest.mark.parametrize(
    ("options", "held"),
    [({"fsdp": 64}, HALF / 64), ({"int8": True}, 2 * EMBEDDINGS + 4 * NORMS + MATRICES + 4 * OUTPUTS)],
)
def test_bytes_are_those_of_one_device_and_eight_bits_count_as_eight(options, held):
    params, _, frozen = planned(**options)["generator"]
    assert params == pytest.approx(TRAINED / 1e6, abs=0.01)
    assert frozen == pytest.approx(held / 1e6, abs=1)


@pytest.mark.slow
def test_later_stages_hold_their_judge_as_well():
    stages = planned(run=("retriever", "joint"))
    judge = (HALF + 4 * (32 * 4096 + 32)) / 1e6
    assert stages["retriever"][2] == pytest.approx(judge, abs=1)
    assert stages["joint"][2] == pytest.approx(judge + HALF / 1e6, abs=1)
    assert stages["joint"][0] == pytest.approx(TRAINED / 1e6 + stages["retriever"][0], abs=0.02)


def test_an_unknown_preset_names_those_that_there_are():
    with pytest.raises(ConfigError, match=r"'llama-9' is not a Llama preset; it is one of llama-3\.1-8b, "):
        planned(preset="llama-9")


def of_rewards(config):
    """The recipe's stage of rewards alone, and what `prepare` says of its tokenizer."""
    return changed(plain(config), {"run": ["prepare", "ppo"], f"{config.system}.retriever": SMALL})


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True], ids=["bfloat16", "int8"])
def test_a_policy_on_adapters_has_what_they_sit_on_for_its_reference(int8):
    config = emprl_llm.get_config("llama-3.1-8b")
    config.emprl.lora.int8 = int8
    weights = 2 * EMBEDDINGS + 4 * NORMS + MATRICES + 4 * OUTPUTS if int8 else HALF
    params, size, frozen = map(float, LINE.findall(describe(make_plan(of_rewards(config))))[0][1:])
    head = 32 * 4096 + 32
    trained = TRAINED - head + (4096 + 9) * 128 + 128 + 128 + 1  # the value head reads three mechanisms' levels
    assert params == pytest.approx(trained / 1e6, abs=0.01)
    assert size == pytest.approx((2 + 2) * 4 * trained / 1e6, abs=1)
    assert frozen == pytest.approx((weights + 4 * head) / 1e6, abs=1)


@pytest.mark.slow
def test_an_update_of_a_policy_costs_what_it_reads_and_answers():
    def cost(form):
        config = of_rewards(emprl_transformer.get_config(f"{form},tiny"))
        plan = make_plan(config)
        return update_flops(sketch_stage(plan, list(plan.stages.values())[-1]))

    alone = cost("")
    assert cost("trajectory") == 2 * alone  # turns of each dialogue
    assert cost("retrieval") > 1.5 * alone  # two exemplars for each context


@pytest.mark.parametrize("model", layouts.LAYOUTS)
def test_every_layout_fits_its_slice(model):
    recipe, other = (get_config, reg_t5.get_config) if "llama" in model else (reg_t5.get_config, get_config)
    for topology in layouts.LAYOUTS[model]:
        config = plain(recipe(f"{model},machine={topology}"))
        chips = layouts.CHIPS[topology]
        assert math.prod(int(size) for size in topology.partition(":")[2].split("x")) == chips
        assert chips % config["mesh"]["fsdp"] == 0
        for stage in make_plan(config).stages.values():
            if stage.kind == "train":
                check_batch_sizes(stage.loop, chips, where=stage.name)
                assert stage.loop.steps >= layouts.FEWEST_STEPS
    with pytest.raises(ValueError, match=r"'machine=v5e:3x3' is unknown; .*machine=v5e:2x4, "):
        recipe(f"{model},machine=v5e:3x3")
    with pytest.raises(ValueError, match="is unknown"):
        other(f"{model},machine=v5e:2x4")
    for word, said in (("small,tiny", "leave out machine=v5e:2x4"), (reg_t5.WHEEL, "has a layout for no slice")):
        with pytest.raises(ValueError, match=said):
            reg_t5.get_config(f"{word},machine=v5e:2x4")
