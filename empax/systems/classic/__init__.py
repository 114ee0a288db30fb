"""MoEL's lineage, from the Transformer to KEMP and CASE, as compositions of one word-level model (`model`).

The parts of each system: Multi-TRS, EmoPrepend, MoEL and EmpDG in `readers`, EmpDG's critics in `adversary`; MIME and
CEM in `mimicry`, CEM's loss "frequency" in `task`; KEMP in `graphs`, its concepts in `concepts`; CASE in `alignment`.
A form of `configs/classic.py` selects the parts of a system.
"""

from empax.core.system import System
from empax.systems.classic.settings import ClassicSettings
from empax.systems.classic.stages import GENERATOR, check_system

SYSTEM = System("classic", ClassicSettings, {"generator": GENERATOR}, check=check_system)
