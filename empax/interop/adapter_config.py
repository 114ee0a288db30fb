"""Reader of PEFT's `adapter_config.json`: the fields that change the result of an adapter."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import regex

from empax.core.config import ConfigError
from empax.core.files import DataError
from empax.data.model_files import read_model_json, short
from empax.interop.readers import ADAPTER_CONFIG, MERGE_ADVICE
from empax.models.lora import MAX_RANK

log = logging.getLogger("empax")

_READ = frozenset(
    (
        "peft_type", "base_model_name_or_path", "revision", "r", "lora_alpha", "rank_pattern", "alpha_pattern",
        "use_rslora", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
        "modules_to_save", "init_lora_weights", "bias",
    )
)  # fmt: skip
_IDLE = frozenset(
    (
        "task_type", "auto_mapping", "inference_mode", "peft_version", "fan_in_fan_out", "megatron_config",
        "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
        "runtime_config", "ensure_weight_tying",
    )
)  # fmt: skip
"""Fields that do not change the result of a finished adapter."""

_OFF = frozenset(
    (
        "use_dora", "use_qalora", "use_bdlora", "lora_bias", "target_parameters", "trainable_token_indices",
        "layer_replication", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config",
        "velora_config",
    )
)  # fmt: skip
"""Fields of unsupported kinds of adapters: each must be false, empty or absent."""

_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that do not change the base model's weights."""

_BRANCHES = frozenset("*+?{|")
"""A regular expression without any of these characters never backtracks."""
_LONGEST_NAME = 1024
_LONGEST_PATTERN = 20_000
_COUNTED = re.compile(r"\{([0-9]{1,9})")
_MOST_STEPS = 1 << 19
"""Bound for the size of all regular expressions of a file: the package `regex` expands "(a{9}){9}" to 81 letters."""
SECONDS = 2.0
"""Total time for matching all regular expressions of a file against the names of a model's modules."""


class Patterns:
    """Regular expressions from a file, within limits of time and memory.

    Some would never finish on a name of 30 letters; others of 30 letters would fill the memory when they are compiled.
    """

    def __init__(self, file: Path):
        self._file, self._left, self._steps = file, SECONDS, 0

    def check(self, name: str, pattern: str) -> None:
        """Raises DataError if the `pattern` of the field `name` is not a regular expression, or too large."""
        if len(pattern) > _LONGEST_PATTERN:
            raise DataError(
                f"{self._file}: {name} = {short(pattern)} has {len(pattern)} characters; at most {_LONGEST_PATTERN} "
                "are read."
            )
        self._steps += len(pattern) * math.prod(max(1, int(count)) for count in _COUNTED.findall(pattern))
        if self._steps > _MOST_STEPS:
            raise DataError(f"{self._file}: {name} = {short(pattern)} is too large to be compiled.")
        try:
            re.compile(pattern)
            regex.compile(pattern)
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            raise DataError(f"{self._file}: {name} = {short(pattern)} is not a regular expression: {error}.") from error

    def match(self, pattern: str, text: str) -> Any:
        """Returns the match of `pattern` at the start of `text`, or None.

        Raises:
          ConfigError: the file's patterns take too long.
        """
        start = time.thread_time()
        try:
            if self._left <= 0:
                raise TimeoutError
            return regex.match(pattern, text, timeout=self._left)
        except TimeoutError as error:
            raise ConfigError(
                f"{self._file}: the regular expression {short(pattern)} takes forever on the name {text!r}; write it "
                "without nested repeats, or list the modules by name."
            ) from error
        finally:
            self._left -= time.thread_time() - start

    def end(self, pattern: str, text: str) -> bool:
        """Whether `pattern` matches all of `text`, or all of it after one of its dots; raises as `match`."""
        ends = rf"(?:.*\.)?(?:{pattern})\Z"
        if _BRANCHES & set(pattern):
            return self.match(ends, text) is not None
        return _compiled(ends).match(text) is not None  # faster, and there may be one for each module


_compiled = functools.lru_cache(maxsize=1 << 14)(re.compile)


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """The contents of an `adapter_config.json`.

    Attributes:
      base, revision: name or folder of the base model, and its version; "" = the newest.
      rank, alpha: r and alpha of the modules that match no pattern.
      rank_pattern, alpha_pattern: r and alpha by regular expressions that match the ends of modules' names.
      rank_stabilized: whether the factor is alpha / sqrt(r) (Kalajdzievski 2023, Eq. 9) instead of alpha / r.
      targets: one regular expression, "all-linear", or the ends of modules' names.
      excluded: the modules to leave out, in the form of `targets`.
      layers: indices of the layers that have adapters; None = all.
      layers_patterns: regular expressions that match the name before a layer's index; empty = any name.
      saved: ends of the names of modules that the adapter replaces entirely.
    """

    file: Path
    base: str
    revision: str
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool
    dropout: float
    targets: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...] | None
    layers_patterns: tuple[str, ...]
    saved: tuple[str, ...]
    patterns: Patterns = dataclasses.field(repr=False, compare=False)

    def targeted(self, module: str) -> bool:
        """Whether PEFT adds an adapter to the linear `module`."""
        if self._named(self.excluded, module) or any(f".{name}." in f".{module}." for name in self.saved):
            return False
        if self.targets == "all-linear" or (isinstance(self.targets, tuple) and module in self.targets):
            return True  # a full name counts in every layer
        return self._named(self.targets, module) and self._in_layers(module)

    def saves(self, module: str) -> bool:
        """Whether PEFT replaces `module` or a parent of it; names match by their ends: "norm" also matches "q_norm"."""
        parts = module.split(".")
        return any(".".join(parts[:size]).endswith(self.saved) for size in range(1, len(parts) + 1))

    def rank_of(self, module: str) -> int:
        return int(self._by_pattern(self.rank_pattern, module, self.rank))

    def factor_of(self, module: str) -> float:
        """Returns the factor of the product of A and B."""
        rank = self.rank_of(module)
        return self._by_pattern(self.alpha_pattern, module, self.alpha) / (rank**0.5 if self.rank_stabilized else rank)

    def _named(self, names: str | tuple[str, ...], module: str) -> bool:
        if isinstance(names, str):
            return bool(names) and self.patterns.match(rf"(?:{names})\Z", module) is not None
        return any(module == name or module.endswith(f".{name}") for name in names)

    def _in_layers(self, module: str) -> bool:
        if self.layers is None:
            return True
        before = [rf"(?:^|.*?\.){pattern}" for pattern in self.layers_patterns] or [r".*?\.[^.]*"]
        found = (self.patterns.match(rf"{start}\.(?P<idx>\d+)\.", module) for start in before)
        return any(int(one["idx"]) in self.layers for one in filter(None, found))

    def _by_pattern(self, values: Mapping[str, float], module: str, default: float) -> float:
        return next((value for key, value in values.items() if self.patterns.end(key, module)), default)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Reads and checks `adapter_config.json`.

    Raises:
      DataError: the file is broken, or a field is missing or of the wrong kind.
      ConfigError: the kind of adapter is not supported.
    """
    file = folder / ADAPTER_CONFIG
    fields = {name: value for name, value in read_model_json(file).items() if value is not None}
    _check_kind(file, fields)
    base = fields.get("base_model_name_or_path")
    if not isinstance(base, str) or not 0 < len(base) <= _LONGEST_NAME:
        raise DataError(
            f"{file} does not say which model the adapter sits on; set base_model_name_or_path to its folder or name."
        )
    stabilized, dropout = fields.get("use_rslora", False), fields.get("lora_dropout", 0.0)
    if not isinstance(stabilized, bool):
        raise DataError(f"{file}: use_rslora = {short(stabilized)} must be true or false.")
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise DataError(f"{file}: lora_dropout = {short(dropout)} must be a number from 0 to below 1.")
    targets = fields.get("target_modules")
    if not targets:
        raise DataError(f"{file}: target_modules = {short(targets)} must be a list of names or a regular expression.")
    layers = _layers(file, fields.get("layers_to_transform"))
    if layers is not None and isinstance(targets, str):
        raise DataError(f"{file}: layers_to_transform needs a list of names in target_modules, as in PEFT.")
    layers_pattern = _names(file, "layers_pattern", fields.get("layers_pattern") or [])
    config = AdapterConfig(
        file=file,
        base=base,
        revision=str(fields.get("revision", "")),
        rank=_number(file, "r", fields.get("r", 8), whole=True),
        alpha=_number(file, "lora_alpha", fields.get("lora_alpha", 8)),
        rank_pattern=_numbers(file, "rank_pattern", fields.get("rank_pattern", {}), whole=True),
        alpha_pattern=_numbers(file, "alpha_pattern", fields.get("alpha_pattern", {})),
        rank_stabilized=stabilized,
        dropout=float(dropout),
        targets=_names(file, "target_modules", targets),
        excluded=_names(file, "exclude_modules", fields.get("exclude_modules", [])),
        layers=layers,
        layers_patterns=(layers_pattern,) if isinstance(layers_pattern, str) else layers_pattern,
        saved=_saved(file, fields.get("modules_to_save", [])),
        patterns=Patterns(file),
    )
    _check_patterns(config)
    return config


def _check_kind(file: Path, fields: Mapping[str, Any]) -> None:
    """Raises ConfigError for an adapter that is not plain or rank-stabilised LoRA."""
    problems = []
    if fields.get("peft_type", "LORA") != "LORA":
        problems.append(f"peft_type = {short(fields['peft_type'])}")
    if fields.get("bias", "none") != "none":
        problems.append(f"bias = {short(fields['bias'])}")
    start = fields.get("init_lora_weights", True)
    if not isinstance(start, bool | str) or start not in _STARTS:
        problems.append(f"init_lora_weights = {short(start)}, which changes the weights that it sits on,")
    problems += [f"{name} = {short(fields[name])}" for name in sorted(_OFF & set(fields)) if fields[name]]
    unknown = {name: fields[name] for name in sorted(set(fields) - _READ - _IDLE - _OFF)}
    # New features of PEFT are off by default.
    off = [name for name, value in unknown.items() if value is False or value in ("", [], {})]
    problems += [f"{name} = {short(value)}" for name, value in unknown.items() if name not in off]
    if problems:
        raise ConfigError(
            f"{file}: {'; '.join(problems)} is not read here, only LoRA and rank-stabilised LoRA without biases "
            f"(peft_type = 'LORA', use_dora = false, bias = 'none'). {MERGE_ADVICE}"
        )
    if off:
        log.warning("%s: unknown fields, assumed to be off: %s.", file, ", ".join(off))


def _check_patterns(config: AdapterConfig) -> None:
    """Raises DataError for an invalid regular expression."""
    found = {
        "target_modules": [config.targets] if isinstance(config.targets, str) else [],
        "exclude_modules": [config.excluded] if isinstance(config.excluded, str) else [],
        "layers_pattern": config.layers_patterns,
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
    }
    for name, patterns in found.items():
        for pattern in patterns:
            config.patterns.check(name, pattern)


def _names(file: Path, name: str, value: Any) -> str | tuple[str, ...]:
    """Returns one pattern or several names."""
    if isinstance(value, str):
        return value.lower() if value.lower() == "all-linear" else value
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise DataError(f"{file}: {name} = {short(value)} must be a list of names or a regular expression.")
    return tuple(value)


def _saved(file: Path, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise DataError(f"{file}: modules_to_save = {short(value)} must be a list of names.")
    return tuple(value)


def _layers(file: Path, value: Any) -> tuple[int, ...] | None:
    numbers = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in numbers):
        raise DataError(f"{file}: layers_to_transform = {short(value)} must be layer numbers.")
    return tuple(numbers) or None


def _number(file: Path, name: str, value: Any, *, whole: bool = False) -> Any:
    right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    least, most = (1, MAX_RANK) if whole else (1e-6, 1e6)
    if not right or not least <= value <= most:
        kind = "whole number" if whole else "number"
        raise DataError(f"{file}: {name} = {short(value)} must be a {kind} from {least} to {most}.")
    return value


def _numbers(file: Path, name: str, value: Any, *, whole: bool = False) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{file}: {name} = {short(value)} must be an object of numbers by module name.")
    return {key: _number(file, f"{name}.{key}", number, whole=whole) for key, number in value.items()}
