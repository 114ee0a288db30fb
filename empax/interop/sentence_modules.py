"""What a sentence-transformers folder puts behind its encoder, and how it wants its texts: read, or refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np

from empax.core.config import ConfigError
from empax.core.files import DataError, write_json
from empax.core.types import Params
from empax.data.model_files import read_model_json
from empax.data.tokenizers import Reading
from empax.interop.parameters import LazyTensor
from empax.interop.readers import is_adapter, open_tensors
from empax.interop.safetensors_out import write_tensors
from empax.models.dual_encoder import DualEncoder, Pooling, Projection

_ACTIVATIONS = {
    "Tanh": "tanh", "Identity": "identity", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Sigmoid": "sigmoid",
}  # fmt: skip
"""Classes of torch.nn under the names of `models.dual_encoder`."""

_OLD_NAMES: dict[str, str] = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "weightedmean": "weightedmean_tokens",
}
"""Of poolings, where their switches in older folders have others."""

_TEXT_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_NO_LIMIT = 10**9  # tokenizers write 10**30 where there is none
_SENTENCE = (None, "sentence_embedding")


@dataclasses.dataclass(frozen=True)
class SentenceModules:
    """What `modules.json` and the files that it names say.

    Attributes:
      encoder: folder of the encoder and its tokenizer.
      pooling: None = no word of it.
      projections: linear layers behind the pooling.
      files: a folder for each projection.
      normalize: whether vectors are scaled to unit length in the end.
      similarity: "cosine" or "dot"; None = no word of it.
      reading: prompts and the longest text.
      lower_case: whether texts are lower-cased before the tokenizer.
    """

    encoder: Path
    pooling: Pooling | None = None
    projections: tuple[Projection, ...] = ()
    files: tuple[Path, ...] = ()
    normalize: bool = False
    similarity: str | None = None
    reading: Reading = dataclasses.field(default_factory=Reading)
    lower_case: bool = False

    def params(self) -> Params:
        """The weights of the projections, under the names of DualEncoder.

        Raises:
          DataError: they are missing, or have other shapes.
        """
        return {
            f"dense_{i}": _read_dense(*pair) for i, pair in enumerate(zip(self.files, self.projections, strict=True))
        }


def read_modules(folder: Path, *, pooling: bool = True) -> SentenceModules:
    """What is said in `folder`; in one that is no sentence-transformers folder, at most the pooling.

    Args:
      folder: of a model.
      pooling: False leaves out what it says of that, be it what it may.

    Source: the files that sentence-transformers 2 to 6 write.

    Raises:
      ConfigError: a module, or an option of one, that is not here.
      DataError: a file is missing or broken.
    """
    if not (path := folder / "modules.json").is_file():
        alone = folder / "1_Pooling" / "config.json"
        return SentenceModules(folder, pooling=_pooling(alone) if pooling and alone.is_file() else None)
    found: dict[str, Any] = {"encoder": folder}
    projections: list[Projection] = []
    files: list[Path] = []
    order, pools_prompt = [], True
    for kind, place in _modules(path):
        order.append(kind)
        if kind == "Transformer":
            found |= {"encoder": place, **_transformer(place)}
        elif kind == "Pooling":
            found["pooling"] = _pooling(place / "config.json") if pooling else None
            pools_prompt = bool(read_model_json(place / "config.json").get("include_prompt", True))
        elif kind == "Dense":
            files.append(place)
            projections.append(_dense(place / "config.json"))
        elif kind == "Normalize":
            _check_sentence(place / "config.json")
            found["normalize"] = True
    _check_order(order, path)
    if found["encoder"] != folder and is_adapter(folder):
        raise ConfigError(
            f"{folder} holds an adapter, but {path.name} has its encoder in {found['encoder'].name}: put the adapter's "
            "files there, in place of the weights that they sit on, or take them away."
        )
    similarity, reading = _sentences(folder, found.pop("max_tokens"))
    if not pools_prompt and (reading.query_prompt or reading.key_prompt):
        raise ConfigError(
            f"{folder}: include_prompt = False, but here prompts of queries and documents are pooled with the text."
        )
    reading = dataclasses.replace(reading, pools_prompt=pools_prompt)
    return SentenceModules(
        **found, projections=tuple(projections), files=tuple(files), similarity=similarity, reading=reading
    )


def _modules(path: Path) -> list[tuple[str, Path]]:
    """The last word of each module's type, and its folder."""
    listed = _read_list(path)
    found = []
    for entry in listed:
        kind = str(entry.get("type", "")).rsplit(".", maxsplit=1)[-1]
        if kind not in ("Transformer", "Pooling", "Dense", "Normalize"):
            raise ConfigError(
                f"{path} asks for {entry.get('type')!r}, which is not here; it may hold Transformer, Pooling, Dense "
                "and Normalize."
            )
        place = path.parent / str(entry.get("path", ""))
        if not place.resolve().is_relative_to(path.parent.resolve()):
            raise DataError(f"{path}: the module {entry['path']!r} is outside the folder.")
        found.append((kind, place))
    return found


def _read_list(path: Path) -> list[dict[str, Any]]:
    listed = read_model_json(path, kind=list)
    if not all(isinstance(entry, dict) for entry in listed):
        raise DataError(f"{path} must hold a list of objects; fetch the model again.")
    return listed


def _check_order(order: list[str], path: Path) -> None:
    denses = order.count("Dense")
    allowed = ["Transformer", "Pooling", *["Dense"] * denses]
    if order not in (allowed, [*allowed, "Normalize"]):
        raise ConfigError(
            f"{path} has the order {', '.join(order)}; here it is Transformer, Pooling, then Dense if any, then "
            "Normalize or nothing."
        )


def _transformer(folder: Path) -> dict[str, Any]:
    path = next((folder / name for name in _TEXT_CONFIGS if (folder / name).is_file()), None)
    said = {} if path is None else read_model_json(path)
    task, output = said.get("transformer_task"), said.get("module_output_name")
    if task not in (None, "feature-extraction") or output not in (None, "token_embeddings"):
        raise ConfigError(
            f"{path}: transformer_task = {task!r} to {output!r} is not here, only the states of an encoder."
        )
    longest = said.get("max_seq_length")
    names = folder / "tokenizer_config.json"
    if longest is None and names.is_file():
        longest = read_model_json(names).get("model_max_length")
    if longest is not None and (isinstance(longest, bool) or not isinstance(longest, int | float) or longest < 3):
        raise ConfigError(f"{folder}: max_seq_length = {longest!r} must be a number of tokens, at least 3.")
    longest = None if longest is None or longest >= _NO_LIMIT else int(longest)
    return {"max_tokens": longest, "lower_case": bool(said.get("do_lower_case", False))}


def _pooling(path: Path) -> Pooling:
    said = read_model_json(path)
    # One switch for each kind, or (newer) one name or several.
    on = [
        name.removeprefix("pooling_mode_") for name, value in said.items() if value and name.startswith("pooling_mode_")
    ]
    for new, old in _OLD_NAMES.items():
        on = [new if name == old else name for name in on]
    if not on:
        mode = said.get("pooling_mode", "mean")
        on = [str(part) for part in mode] if isinstance(mode, list) else [str(mode)]
    for mode in get_args(Pooling):
        if on == [mode]:
            return mode
    raise ConfigError(
        f"{path} asks for {', '.join(on)}; one of {', '.join(get_args(Pooling))} is here: set pooling to override it."
    )


def _check_sentence(path: Path) -> None:
    said = read_model_json(path) if path.is_file() else {}
    for name in ("module_input_name", "module_output_name"):
        if said.get(name) not in _SENTENCE:
            raise ConfigError(f"{path}: {name} = {said[name]!r} must be 'sentence_embedding'.")


def _dense(path: Path) -> Projection:
    _check_sentence(path)
    said = read_model_json(path)
    if said.get("use_residual"):
        raise ConfigError(f"{path}: use_residual = True is not here.")
    name = str(said.get("activation_function", "torch.nn.modules.activation.Tanh"))
    module, _, kind = name.rpartition(".")
    if not module.startswith("torch.nn") or kind not in _ACTIVATIONS:
        raise ConfigError(
            f"{path}: activation_function = {name!r} is not here; it is one of torch.nn's {', '.join(_ACTIVATIONS)}."
        )
    size = said.get("out_features")
    if type(size) is not int or size < 1:
        raise DataError(f"{path}: out_features = {size!r} must be a number of features; fetch the model again.")
    return Projection(size, _ACTIVATIONS[kind], use_bias=bool(said.get("bias", True)))


def _read_dense(folder: Path, projection: Projection) -> Params:
    tensors = open_tensors(folder)
    names = {"kernel": "linear.weight", "bias": "linear.bias"}
    wanted = {ours: names[ours] for ours in (("kernel", "bias") if projection.use_bias else ("kernel",))}
    if set(tensors) != set(wanted.values()):
        raise DataError(f"{folder} holds {', '.join(sorted(tensors))}; it must hold {', '.join(wanted.values())}.")
    read = {ours: np.asarray(tensors[theirs], np.float32) for ours, theirs in wanted.items()}
    if read["kernel"].ndim != 2 or read["kernel"].shape[0] != projection.features:
        raise DataError(
            f"{folder}: linear.weight has shape {list(read['kernel'].shape)}, but out_features = {projection.features}."
        )
    return {name: jnp.asarray(array.T) for name, array in read.items()}


def _sentences(folder: Path, max_tokens: int | None) -> tuple[str | None, Reading]:
    """How vectors are compared, and how texts are read."""
    path = folder / "config_sentence_transformers.json"
    said = read_model_json(path) if path.is_file() else {}
    similarity = said.get("similarity_fn_name")
    if similarity not in (None, "cosine", "dot"):
        raise ConfigError(
            f"{path}: similarity_fn_name = {similarity!r} is not here, only 'cosine' and 'dot': an index holds what is "
            "nearest by the dot product."
        )
    prompts, default = said.get("prompts") or {}, said.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"{path}: prompts = {prompts!r} must map names to texts.")
    if default is not None and default not in prompts:
        raise ConfigError(f"{path}: default_prompt_name = {default!r} is none of {', '.join(prompts) or 'no prompts'}.")
    # Source: `encode_query` and `encode_document` of sentence-transformers, as documented: the first that there is. The
    # default is for texts that are neither.
    documents = next((prompts[name] for name in ("document", "passage", "corpus") if name in prompts), "")
    whole = "" if default is None else prompts[default]
    return similarity, Reading(prompts.get("query", ""), documents, whole, max_tokens=max_tokens)


def write_modules(
    folder: Path, model: DualEncoder, params: Params, reading: Reading, *, size: int, max_tokens: int
) -> None:
    """What sentence-transformers puts together, under the names that all its versions read.

    Args:
      folder: where encoder and tokenizer are.
      model: of `params`.
      params: those of the projections are written.
      reading: prompts.
      size: entries of a state.
      max_tokens: of a text.
    """
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    switches = {f"pooling_mode_{_OLD_NAMES.get(mode, mode)}": model.pooling == mode for mode in get_args(Pooling)}
    prompted = {} if reading.pools_prompt else {"include_prompt": False}
    _write_module(folder / "1_Pooling", {"word_embedding_dimension": size, **switches, **prompted})
    for i, projection in enumerate(model.projections):
        place, layer = f"{2 + i}_Dense", params[f"dense_{i}"]
        modules.append((place, "Dense"))
        kind = next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == projection.activation)
        home = "linear" if kind == "Identity" else "activation"
        fields = {"in_features": layer["kernel"].shape[0], "out_features": projection.features}
        fields |= {"bias": projection.use_bias, "activation_function": f"torch.nn.modules.{home}.{kind}"}
        _write_module(folder / place, fields)
        arrays = {"linear.weight": np.ascontiguousarray(np.asarray(layer["kernel"], np.float32).T)}
        if projection.use_bias:
            arrays["linear.bias"] = np.asarray(layer["bias"], np.float32)
        lazy = {name: LazyTensor(x.shape, x.dtype, lambda x=x: x) for name, x in arrays.items()}
        write_tensors(folder / place, lazy)
    if model.normalize:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
        _write_module(folder / modules[-1][0], {})
    write_json(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(modules)
        ],
    )
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_tokens, "do_lower_case": False})
    prompts = {"query": reading.query_prompt, "document": reading.key_prompt}
    fields = {"prompts": {name: text for name, text in prompts.items() if text}}
    if reading.prompt:
        fields |= {"prompts": {**fields["prompts"], "text": reading.prompt}, "default_prompt_name": "text"}
    similarity = "cosine" if model.normalize else "dot"
    write_json(folder / "config_sentence_transformers.json", {**fields, "similarity_fn_name": similarity})


def _write_module(folder: Path, fields: dict[str, Any]) -> None:
    folder.mkdir()
    write_json(folder / "config.json", fields)
