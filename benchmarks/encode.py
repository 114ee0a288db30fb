"""Embedding the training pairs with MiniLM: empax.retrieval's encoder against sentence-transformers.

In each round, each side embeds the whole corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from benchmarks import texts
from benchmarks.paired import DisagreementError, Row, arguments, cores, report, timed
from benchmarks.sides import use
from empax.core.memory import keep_freed_memory
from empax.data.features import encode_for_bert
from empax.data.tokenizer_folders import load_tokenizer
from empax.interop.huggingface import resolve
from empax.interop.pretrained_encoders import EncoderSettings, LoadedEncoder, load_encoder
from empax.models.dual_encoder import Towers
from empax.retrieval.encode import BUCKETS, economy, embed, embedders, plan_batches

HELD_EQUAL = (
    "one process, as many threads as there are cores; each side may use them all",
    "what either side frees stays with the process for later (empax.core.memory), as in runs of empax.main",
    "the same weights, arithmetic in --dtype, mean pooling, unit length; cosines of both must be at least 0.9999 "
    "(0.999 in bfloat16)",
    "from texts to vectors in memory, tokens included; texts of more than 256 tokens are cut there",
    "the same texts, context and response in one; both sides sort them by length",
    "theirs: SentenceTransformer.encode with --their-batch rows a batch, padded to the longest",
    "ours: buckets of lengths, multiples of 4 where they fill batches; every shape is compiled before",
)

_MAX_TOKENS = 256
_COSINE = {"float32": 0.9999, "bfloat16": 0.999}
"""Minimum cosine for agreement of both sides."""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = arguments(__doc__ or "", HELD_EQUAL, rounds=3, devices=True)
    texts.add_flag(parser)
    parser.add_argument("--texts", type=int, default=40290, help="number of texts, at most those of the corpus (40290)")
    parser.add_argument("--dtype", choices=sorted(_COSINE), default="float32", help="type of the arithmetic (float32)")
    parser.add_argument("--their-batch", type=int, default=32, help="rows in a batch of theirs (32, their default)")
    parser.add_argument(
        "--tokens-per-batch", type=int, help="tokens in a batch of ours, padding included (depends on the device)"
    )
    parser.add_argument("--unroll", type=int, default=6, help="layers in one turn of our scan (6)")
    options = parser.parse_args(argv)
    if options.smoke:
        options.texts, options.rounds, options.unroll = 4, 1, 1
    use(options.device)
    torch.set_num_threads(cores())
    found = [" ".join((*i.context, i.response)) for i in texts.instances(options.data, "train")]
    order = np.random.default_rng(0).permutation(len(found))[: options.texts]
    corpus = [found[i] for i in order]
    settings = EncoderSettings(pretrained="minilm", normalize=True, dropout=0.0, unroll=options.unroll,
                               dtype=options.dtype)  # fmt: skip
    loaded = load_encoder(settings, load_tokenizer("minilm"))
    theirs = SentenceTransformer(str(resolve("minilm")), device={"cpu": "cpu", "gpu": "cuda"}[options.device])
    theirs.max_seq_length = _MAX_TOKENS
    theirs.to(getattr(torch, options.dtype))

    def our_vectors(some: Sequence[str]) -> np.ndarray:
        return our_embeddings(loaded, tokens(loaded, some), options.tokens_per_batch)

    def their_vectors(some: Sequence[str]) -> Any:
        made = theirs.encode(
            list(some), batch_size=options.their_batch, show_progress_bar=False, convert_to_tensor=True
        )
        return made.float().cpu().numpy()

    check(our_vectors(corpus[:64]), their_vectors(corpus[:64]), _COSINE[options.dtype])
    compile_all(loaded, corpus, options.tokens_per_batch)
    took = timed(lambda: our_vectors(corpus), lambda: their_vectors(corpus), options.rounds, warm=True)
    row = Row.of_rates(took, len(corpus), "texts/s")
    sizes = f"{len(corpus)} texts of {texts.name_of(options.data)}"
    return report("encode", {"minilm": row}, (*HELD_EQUAL, sizes), smoke=options.smoke, device=options.device)


def tokens(loaded: LoadedEncoder, some: Sequence[str]) -> list[list[int]]:
    return encode_for_bert(loaded.tokenizer, some, _MAX_TOKENS, keep="left")


def our_embeddings(loaded: LoadedEncoder, rows: Sequence[Sequence[int]], tokens_per_batch: int | None) -> np.ndarray:
    _, apply = embedders(Towers(loaded.model))
    params, pad_id = {"encoder": loaded.params}, loaded.tokenizer.pad_id
    return embed(apply, params, rows, pad_id=pad_id, tokens_per_batch=tokens_per_batch)


def compile_all(loaded: LoadedEncoder, corpus: Sequence[str], tokens_per_batch: int | None) -> None:
    """Runs every shape of the corpus's batches once."""
    _, apply = embedders(Towers(loaded.model))
    run = jax.jit(apply)
    lengths = np.array([len(ids) for ids in tokens(loaded, corpus)])
    plan = plan_batches(lengths, np.array(BUCKETS), economy(tokens_per_batch))
    for shape in sorted({(rows, length) for _, length, rows in plan}):
        jax.block_until_ready(run({"encoder": loaded.params}, np.ones(shape, np.int32), np.ones(shape, bool)))


def check(ours: np.ndarray, theirs: np.ndarray, least: float) -> None:
    """Raises DisagreementError if the cosine of a text's two vectors is below `least`."""
    lowest = float(np.sum(ours * theirs, axis=1).min())
    if not lowest >= least:
        raise DisagreementError(f"the lowest cosine is {lowest}, must be at least {least}.")


if __name__ == "__main__":
    keep_freed_memory()
    main()
