r"""Writes a trained model as a folder for other libraries.

  python -m empax.export --workdir=DIR --output=FOLDER
  python -m empax.export --workdir=DIR --output=FOLDER --stage=joint --what=retriever

Transformers' AutoModelForSeq2SeqLM loads a T5-shaped generator; sentence-transformers and transformers' AutoModel
load a retriever. For a run with `config.reg.lora`, `--lora=adapters` writes the adapters alone, in PEFT's format.
`--push=USER/NAME` uploads the folder to the Hugging Face hub.
"""

from __future__ import annotations

import functools

from absl import flags

from empax.core.command import in_one_line, run_command
from empax.core.paths import expand, given_folder

_WORKDIR = flags.DEFINE_string("workdir", None, "The work directory of a run.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "The folder to write, new or empty; --out is the same.", required=True)
flags.DEFINE_alias("out", "output")
_STAGE = flags.DEFINE_string("stage", "", "Stage to export: generator, retriever, joint, ...; default the last.")
_WHAT = flags.DEFINE_enum(
    "what", "", ["", "generator", "retriever", "key_retriever"], "Which of the stage's models; default the main one."
)
_LORA = flags.DEFINE_enum(
    "lora", "merged", ["merged", "adapters"], "Adapters merged into the weights, or alone for PEFT."
)
_PUSH = flags.DEFINE_string(
    "push", "", "USER/NAME on the Hugging Face hub to upload the folder to; new ones are private."
)
_SHARD = flags.DEFINE_integer("max_shard_bytes", 5_000_000_000, "Maximum bytes of tensors per file.", lower_bound=1)


@in_one_line
def main(argv: list[str]) -> int:
    """Returns 0, or 2 for an error that the user can correct."""
    # Imported here so that --help answers at once.
    from empax.core.config import to_settings
    from empax.pipeline.run import quiet_logging
    from empax.serving import hub
    from empax.serving.export import ExportSettings, export_run

    quiet_logging()
    flags_given = {"stage": _STAGE.value, "what": _WHAT.value, "lora": _LORA.value, "max_shard_bytes": _SHARD.value}
    settings = to_settings(ExportSettings, flags_given, where="--")
    output = given_folder(_OUTPUT.value, "--output")
    if _PUSH.value:
        hub.check_name(_PUSH.value)
    print(export_run(expand(_WORKDIR.value), output, settings))
    if _PUSH.value:
        print(f"pushed it to {hub.push(output, _PUSH.value)}")
    return 0


command_line = functools.partial(run_command, main, __name__)


if __name__ == "__main__":
    command_line()
