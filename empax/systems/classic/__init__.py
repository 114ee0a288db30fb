"""MoEL's lineage: Transformer, Multi-TRS, EmoPrepend, MoEL, MIME and EmpDG, as compositions of one word-level model."""

from empax.core.system import System
from empax.systems.classic.settings import ClassicSettings
from empax.systems.classic.stages import GENERATOR, check_system

SYSTEM = System("classic", ClassicSettings, {"generator": GENERATOR}, check=check_system)
