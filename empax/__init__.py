"""empax: empathetic dialogue in JAX, from retrieval to report.

The names below are imported on first use, so that `import empax` is quick:

  load, TextModel         a pretrained or fine-tuned model: generate, nll, embed, finetune, save
  Session                 a finished run that answers, turn by turn
  run                     a recipe
  score, compare          predictions against references, and systems against each other
  Instance, Prediction    a dialogue's context with its response; a row of predictions
  DecodeSettings, LoraSettings
  ConfigError, DataError  errors for wrong settings and broken files
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from empax.api import compare, run, score
    from empax.core.config import ConfigError
    from empax.core.files import DataError
    from empax.core.types import Instance, Prediction
    from empax.decoding.settings import DecodeSettings
    from empax.models.lora import LoraSettings
    from empax.serving.loading import load
    from empax.serving.session import Session
    from empax.serving.text_model import TextModel

_MODULES = {
    "load": "serving.loading",
    "TextModel": "serving.text_model",
    "Session": "serving.session",
    "run": "api",
    "score": "api",
    "compare": "api",
    "Instance": "core.types",
    "Prediction": "core.types",
    "DecodeSettings": "decoding.settings",
    "LoraSettings": "models.lora",
    "ConfigError": "core.config",
    "DataError": "core.files",
}

__all__ = [
    "ConfigError", "DataError", "DecodeSettings", "Instance", "LoraSettings", "Prediction", "Session", "TextModel",
    "compare", "load", "run", "score",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'empax' has no {name!r}; it has {', '.join(__all__)}.")
    value = getattr(importlib.import_module(f"empax.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
