"""LEMPEx: exemplars of empathetic responses, found by a dense retriever."""

from empax.core.system import System
from empax.systems.lempex.retriever import RETRIEVER, TowerSettings, check_towers, pretrained_towers

SYSTEM = System("lempex", TowerSettings, {"retriever": RETRIEVER}, encoder=pretrained_towers, check=check_towers)
