"""MoEL's lineage, from the Transformer to KEMP and CASE, as compositions of one word-level model (`model`).

What each system has of its own: Multi-TRS, EmoPrepend, MoEL and EmpDG in `readers`, EmpDG's critics in `adversary`;
MIME and CEM in `mimicry`, CEM's loss in `frequency`; KEMP in `graphs`, its concepts in `concepts`; CASE in `alignment`.
A form of `configs/classic.py` puts a system together.
"""

from empax.core.system import System
from empax.systems.classic.settings import ClassicSettings
from empax.systems.classic.stages import GENERATOR, check_system

SYSTEM = System("classic", ClassicSettings, {"generator": GENERATOR}, check=check_system)
