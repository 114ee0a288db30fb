"""The modules after the encoder in a sentence-transformers folder, and its text settings: read, or refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np

from empax.core.config import LARGEST_INT, ConfigError
from empax.core.files import DataError, write_json
from empax.core.protocols import Reading
from empax.core.text_files import check_regular
from empax.core.types import Params
from empax.data.model_files import is_listed, named_path, read_model_json, refuse_unknown, short
from empax.interop.readers import is_adapter, open_tensors
from empax.interop.safetensors_out import write_tensors
from empax.models.dual_encoder import DualEncoder, Pooling, Projection

_ACTIVATIONS = {
    "Tanh": "tanh", "Identity": "identity", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Sigmoid": "sigmoid",
}  # fmt: skip
"""Classes of torch.nn and their names in `models.dual_encoder`."""

_OLD_NAMES: dict[str, str] = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "weightedmean": "weightedmean_tokens",
}
"""Names of poolings whose switches in older folders differ."""

_TEXT_CONFIGS = tuple(f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "xlm-roberta"))
_NO_LIMIT = 10**9  # tokenizers write 10**30 for no limit
_SENTENCE = (None, "sentence_embedding")
_KINDS = ("Transformer", "Pooling", "Dense", "Normalize")
_HOME = "sentence_transformers."

# The known fields of each file. An unknown field is refused, since it could change the vectors.
_MODULE_FIELDS = ("idx", "name", "path", "type", "kwargs")
_FOLDER_FIELDS = ("__version__", "model_type", "requirements", "prompts", "default_prompt_name", "similarity_fn_name")
_FOLDER_FIELDS += ("truncate_dim",)
_TEXT_FIELDS = ("max_seq_length", "do_lower_case", "transformer_task", "module_output_name", "modality_config")
_TEXT_FIELDS += ("unpad_inputs",)
_MODALITY = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
_ENDS = ("module_input_name", "module_output_name")
_SIZE_FIELDS = ("embedding_dimension", "word_embedding_dimension")
_DENSE_FIELDS = ("in_features", "out_features", "bias", "activation_function", "use_residual", *_ENDS)


@dataclasses.dataclass(frozen=True)
class SentenceModules:
    """The contents of `modules.json` and of the files that it names.

    Attributes:
      encoder: folder of the encoder and its tokenizer.
      pooling: None = unspecified.
      projections: linear layers after the pooling.
      files: a folder for each projection.
      normalize: whether vectors are scaled to unit length at the end.
      truncate: number of first entries to keep of the final vector; 0 = all.
      similarity: "cosine" or "dot"; None = unspecified.
      reading: prompts and the length limit.
      lower_case: whether texts are lower-cased before tokenization.
    """

    encoder: Path
    pooling: Pooling | None = None
    projections: tuple[Projection, ...] = ()
    files: tuple[Path, ...] = ()
    normalize: bool = False
    truncate: int = 0
    similarity: str | None = None
    reading: Reading = dataclasses.field(default_factory=Reading)
    lower_case: bool = False

    def params(self, width: int) -> Params:
        """Reads the weights of the projections, under the names of DualEncoder; `width`: entries of an encoder's state.

        Raises:
          DataError: they are missing or have wrong shapes.
        """
        inputs = [width, *(projection.features for projection in self.projections)]
        given = zip(self.files, self.projections, inputs, strict=False)
        return {f"dense_{i}": _read_dense(*one) for i, one in enumerate(given)}


def read_modules(folder: Path, *, pooling: bool = True) -> SentenceModules:
    """Reads the modules of `folder`; if it is not a sentence-transformers folder, at most the pooling.

    `pooling` = False ignores the folder's pooling, even an unsupported one.

    Source: the files that sentence-transformers 2 to 6 write.

    Raises:
      ConfigError: a module or one of its options is not supported.
      DataError: a file is missing or broken.
    """
    if not is_listed(path := folder / "modules.json"):
        alone = folder / "1_Pooling" / "config.json"
        return SentenceModules(folder, pooling=_pooling(alone) if pooling and is_listed(alone) else None)
    modules = _modules(path)
    order = [kind for kind, _ in modules]
    files = tuple(place for kind, place in modules if kind == "Dense")
    allowed = ["Transformer", "Pooling", *["Dense"] * len(files)]
    normalize = order == [*allowed, "Normalize"]
    if order != allowed and not normalize:
        raise ConfigError(
            f"{path} has the order {', '.join(order)}; it must be Transformer, Pooling, then Dense if any, then "
            "Normalize or nothing."
        )
    encoder, pool = modules[0][1], modules[1][1] / "config.json"
    if encoder != folder and is_adapter(folder):
        raise ConfigError(
            f"{folder} holds an adapter, but {path.name} has its encoder in {encoder.name}: put the adapter's "
            "files there, in place of the weights that they sit on, or remove them."
        )
    reading, lower_case = _transformer(encoder)
    pooled = _pooling(pool) if pooling else None
    pools_prompt = _switch(pool, read_model_json(pool), "include_prompt", absent=True)
    projections = tuple(_dense(place / "config.json") for place in files)
    if normalize:
        _check_sentence(modules[-1][1] / "config.json")
    reading = dataclasses.replace(reading, pools_prompt=pools_prompt)
    reading, truncate, similarity = _sentences(folder / "config_sentence_transformers.json", reading)
    return SentenceModules(encoder, pooled, projections, files, normalize, truncate, similarity, reading, lower_case)


def _modules(path: Path) -> list[tuple[str, Path]]:
    """Returns the last word of each module's type, and its folder."""
    listed = read_model_json(path, kind=list)
    if not all(isinstance(entry, dict) for entry in listed):
        raise DataError(f"{path} must hold a list of objects; fetch the model again.")
    found = []
    for entry in listed:
        place = named_path(path, entry.get("path", ""))
        name = entry.get("type")
        kind = name.rsplit(".", maxsplit=1)[-1] if isinstance(name, str) and name.startswith(_HOME) else ""
        if kind not in _KINDS:
            raise ConfigError(
                f"{path} asks for {short(name)}, which is not supported; it may hold {', '.join(_KINDS)} of "
                "sentence-transformers."
            )
        refuse_unknown(entry, _MODULE_FIELDS, path)
        if entry.get("kwargs"):
            raise ConfigError(
                f"{path}: kwargs = {short(entry['kwargs'])} of a {kind} is not supported; it must be empty."
            )
        found.append((kind, place))
    return found


def _transformer(folder: Path) -> tuple[Reading, bool]:
    """Returns the length limit with the end that is kept, and whether texts are lower-cased."""
    path = next((folder / name for name in _TEXT_CONFIGS if is_listed(folder / name)), None)
    said = {} if path is None else read_model_json(path)
    if path is not None:
        task, output = said.get("transformer_task"), said.get("module_output_name")
        if task not in (None, "feature-extraction") or output not in (None, "token_embeddings"):
            raise ConfigError(
                f"{path}: transformer_task = {short(task)} to {short(output)} is not supported, only the states of an "
                "encoder."
            )
        if said.get("modality_config") not in (None, _MODALITY):
            raise ConfigError(
                f"{path}: modality_config = {short(said['modality_config'])} is not supported, only {_MODALITY}."
            )
        refuse_unknown(said, _TEXT_FIELDS, path)
    field, file = "max_seq_length", path or folder
    names = folder / "tokenizer_config.json"
    longest, declared = said.get(field), read_model_json(names) if is_listed(names) else {}
    if longest is None:
        field, file = "model_max_length", names
        longest = declared.get(field)
    if longest is not None:
        if isinstance(longest, bool) or not isinstance(longest, int | float) or not longest >= 3:
            raise ConfigError(f"{file}: {field} = {short(longest)} must be a number, at least 3.")
        longest = None if longest >= _NO_LIMIT else int(longest)
    about = folder / "config.json"
    if said.get("max_seq_length") is None and is_listed(about):  # as sentence-transformers does
        positions = read_model_json(about).get("max_position_embeddings")
        longest = min((n for n in (longest, positions) if isinstance(n, int)), default=None)
    side = declared.get("truncation_side")
    if side not in (None, "left", "right"):
        raise ConfigError(f"{names}: truncation_side = {short(side)} must be 'left' or 'right'.")
    lower_case = _switch(path or folder, said, "do_lower_case", absent=False)
    return Reading(max_tokens=longest, keep="end" if side == "left" else "start"), lower_case


def _switch(path: Path, said: dict[str, Any], name: str, *, absent: bool) -> bool:
    value = absent if said.get(name) is None else said[name]
    if not isinstance(value, bool):
        raise ConfigError(f"{path}: {name} = {short(value)} must be true or false.")
    return value


def _pooling(path: Path) -> Pooling:
    said = read_model_json(path)
    kinds = get_args(Pooling)
    switches = {f"pooling_mode_{_OLD_NAMES.get(kind, kind)}": kind for kind in kinds}
    refuse_unknown(said, ("pooling_mode", "include_prompt", *_SIZE_FIELDS, *switches), path)
    # One name, several names, or (older) a switch for each kind.
    mode = said.get("pooling_mode")
    if mode is None:
        mode = [kind for name, kind in switches.items() if _switch(path, said, name, absent=False)] or "mean"
    on = mode if isinstance(mode, list) else [mode]
    for kind in kinds:
        if on == [kind]:
            return kind
    raise ConfigError(
        f"{path} asks for {', '.join(map(str, on))}; only one of {', '.join(kinds)} is supported: set pooling to "
        "override it."
    )


def _check_sentence(path: Path, known: tuple[str, ...] = _ENDS) -> dict[str, Any]:
    """Returns the fields of a module whose input and output are the vector of a text."""
    said = read_model_json(path) if is_listed(path) else {}
    refuse_unknown(said, known, path)
    for name in _ENDS:
        if said.get(name) not in _SENTENCE:
            raise ConfigError(f"{path}: {name} = {short(said[name])} must be 'sentence_embedding'.")
    return said


def _dense(path: Path) -> Projection:
    check_regular(path)
    said = _check_sentence(path, _DENSE_FIELDS)
    if _switch(path, said, "use_residual", absent=False):
        raise ConfigError(f"{path}: use_residual = True is not supported.")
    name = str(said.get("activation_function", "torch.nn.modules.activation.Tanh"))
    module, _, kind = name.rpartition(".")
    if not module.startswith("torch.nn") or kind not in _ACTIVATIONS:
        raise ConfigError(
            f"{path}: activation_function = {short(name)} is not supported; it must be one of torch.nn's "
            f"{', '.join(_ACTIVATIONS)}."
        )
    size = said.get("out_features")
    if type(size) is not int or not 1 <= size <= LARGEST_INT:
        raise DataError(f"{path}: out_features = {short(size)} must be a number of features; fetch the model again.")
    return Projection(size, _ACTIVATIONS[kind], use_bias=_switch(path, said, "bias", absent=True))


def _read_dense(folder: Path, projection: Projection, inputs: int) -> Params:
    tensors = open_tensors(folder)
    names = {"kernel": "linear.weight", "bias": "linear.bias"}
    wanted = {ours: names[ours] for ours in (("kernel", "bias") if projection.use_bias else ("kernel",))}
    if set(tensors) != set(wanted.values()):
        raise DataError(f"{folder} holds {', '.join(sorted(tensors))}; it must hold {', '.join(wanted.values())}.")
    read = {ours: np.asarray(tensors[theirs], np.float32) for ours, theirs in wanted.items()}
    shapes = {"kernel": (projection.features, inputs), "bias": (projection.features,)}
    for ours, array in read.items():
        if array.shape != shapes[ours]:
            raise DataError(f"{folder}: {names[ours]} has shape {list(array.shape)}, must be {list(shapes[ours])}.")
    return {name: jnp.asarray(array.T) for name, array in read.items()}


def _sentences(path: Path, reading: Reading) -> tuple[Reading, int, str | None]:
    """Adds the prompts to `reading`; returns it with the truncation and the similarity of vectors."""
    said = read_model_json(path) if is_listed(path) else {}
    refuse_unknown(said, _FOLDER_FIELDS, path)
    if said.get("model_type") not in (None, "SentenceTransformer"):
        raise ConfigError(
            f"{path}: model_type = {short(said['model_type'])} is not supported, only 'SentenceTransformer'."
        )
    truncate = said.get("truncate_dim")
    if truncate is not None and (type(truncate) is not int or not 1 <= truncate <= LARGEST_INT):
        raise ConfigError(f"{path}: truncate_dim = {short(truncate)} must be a number of entries, at least 1, or null.")
    similarity = said.get("similarity_fn_name")
    if similarity not in (None, "cosine", "dot"):
        raise ConfigError(
            f"{path}: similarity_fn_name = {short(similarity)} is not supported, only 'cosine' and 'dot': an index "
            "searches by dot product."
        )
    prompts, default = said.get("prompts") or {}, said.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ConfigError(f"{path}: prompts = {short(prompts)} must map names to texts.")
    prompts = {name: text or "" for name, text in prompts.items()}
    if default is not None and default not in list(prompts):  # it may be of any type
        named = ", ".join(prompts) or "no prompts"
        raise ConfigError(f"{path}: default_prompt_name = {short(default)} is not one of {named}.")
    # Source: documentation of `encode_query` and `encode_document` of sentence-transformers: the first existing prompt.
    # The default is for other texts.
    documents = next((prompts[name] for name in ("document", "passage", "corpus") if name in prompts), "")
    whole = "" if default is None else prompts[default]
    prompted = dataclasses.replace(reading, query_prompt=prompts.get("query", ""), key_prompt=documents, prompt=whole)
    return prompted, truncate or 0, similarity


def write_modules(
    folder: Path, model: DualEncoder, params: Params, reading: Reading, *, size: int, max_tokens: int
) -> None:
    """Writes the modules of a sentence-transformers folder, under names that all its versions read.

    Of `params`, the projections are written. `size` is the number of entries of a state.
    """
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    switches = {f"pooling_mode_{_OLD_NAMES.get(mode, mode)}": model.pooling == mode for mode in get_args(Pooling)}
    prompted = {} if reading.pools_prompt else {"include_prompt": False}
    _write_module(folder / "1_Pooling", {"word_embedding_dimension": size, **switches, **prompted})
    layers = [(projection, params[f"dense_{i}"]) for i, projection in enumerate(model.projections)]
    if model.truncate and model.normalize:  # we normalise last, but they before truncating: so a layer truncates
        whole = model.clone(truncate=0).width
        layers.append((Projection(model.width, "identity", use_bias=False), {"kernel": np.eye(whole, model.width)}))
    for i, (projection, layer) in enumerate(layers):
        place = f"{2 + i}_Dense"
        modules.append((place, "Dense"))
        kind = next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == projection.activation)
        home = "linear" if kind == "Identity" else "activation"
        dense: dict[str, Any] = {"in_features": layer["kernel"].shape[0], "out_features": projection.features}
        dense |= {"bias": projection.use_bias, "activation_function": f"torch.nn.modules.{home}.{kind}"}
        _write_module(folder / place, dense)
        arrays = {"linear.weight": np.ascontiguousarray(np.asarray(layer["kernel"], np.float32).T)}
        if projection.use_bias:
            arrays["linear.bias"] = np.asarray(layer["bias"], np.float32)
        write_tensors(folder / place, arrays)
    if model.normalize or model.normalize_whole:
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
    fields: dict[str, Any] = {"prompts": {name: text for name, text in prompts.items() if text}}
    if reading.prompt:
        fields |= {"prompts": {**fields["prompts"], "text": reading.prompt}, "default_prompt_name": "text"}
    fields["similarity_fn_name"] = "cosine" if model.normalize or model.normalize_whole else "dot"
    if model.truncate and not model.normalize:
        fields["truncate_dim"] = model.width
    write_json(folder / "config_sentence_transformers.json", fields)


def _write_module(folder: Path, fields: dict[str, Any]) -> None:
    folder.mkdir()
    write_json(folder / "config.json", fields)
