"""MoEL's lineage, from the Transformer to EmpDG and CEM, as compositions of one word-level model."""

from empax.core.system import System
from empax.systems.classic.settings import ClassicSettings
from empax.systems.classic.stages import GENERATOR, check_system

SYSTEM = System("classic", ClassicSettings, {"generator": GENERATOR}, check=check_system)
