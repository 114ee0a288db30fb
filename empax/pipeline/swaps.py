"""Stage "swaps": a trained system's likelihoods and replies with exchanged exemplars, as swaps.jsonl.gz.

Model, decoder and test rows stay the same; only the exemplars change.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from empax.core.config import ConfigError, check_numbers
from empax.core.files import hash_json, write_json, write_jsonl
from empax.core.protocols import ExemplarAnswering, ExemplarSource, InstanceEncoder
from empax.core.sharding import local_mesh
from empax.core.system import RunContext
from empax.core.tree import hash_tree
from empax.core.types import Instance, Prediction
from empax.data.batches import draw_dialogues
from empax.data.exemplars import dialogue_groups, emotion_ids, encode_keys, encode_queries, replies_alone
from empax.data.store import check_prepared, may_load
from empax.evaluation.retrieval import POOL, bm25_vectors, gold_ranks, recall_statistics, text_numbers, with_intervals
from empax.evaluation.text import token_f1_rows
from empax.interop.pretrained import check_weights
from empax.interop.pretrained_encoders import EncoderSettings, check_prompts, load_encoder
from empax.models.dual_encoder import Towers
from empax.pipeline import evaluate
from empax.pipeline.answers import KeptAnswers, identify
from empax.retrieval.encode import CorpusEncoder
from empax.retrieval.swaps import DRAWN, draw_exemplars, nearest_exemplars

GIVEN = ("own", *DRAWN, "nearest", "none")
"""Conditions for the system's exemplars, in the order of the table."""

_PARTS = "parts"

_MAX_TOKENS = 64
"""Maximum number of tokens of a text for the oracle's encoder."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the stage.

    Attributes:
      evaluation: evaluate stage that defines the model, decoder and rows.
      rows: number of instances to compute likelihoods for, from randomly drawn dialogues that do not depend on the seed
        (0 = all).
      replies: number of these instances to answer, drawn likewise (0 = none): six times, which takes most of the time.
      nearest: pretrained encoder with which the oracle picks the exemplars nearest to the gold reply; empty = the
        system's own retriever, which then reads replies alone.
      recall: whether to search for the gold reply among 2,500 others, with the system's retriever, the encoder of
        `nearest` and BM25.
    """

    evaluation: str = "evaluate"
    rows: int = 0
    replies: int = 1000
    nearest: str = "minilm"
    recall: bool = True

    def __post_init__(self) -> None:
        check_numbers(self, "rows", "replies", least=0)


def check(settings: Settings, run: RunContext) -> None:
    """Checks that an earlier stage evaluates a system with exemplars.

    Raises:
      ConfigError: there is no such stage, it answers another corpus, or its system reads no exemplars.
    """
    check_prepared(run)
    evaluated: evaluate.Settings = run.earlier("evaluation", settings.evaluation, kind="evaluate").settings
    where = f"config.{run.stage}.evaluation = {settings.evaluation!r}"
    if evaluated.corpus:
        raise ConfigError(f"{where} answers {evaluated.corpus}; name a stage that answers the run's own data.")
    answering = run.named(evaluated.stage)
    if answering.spec is None or not answering.spec.reads_exemplars(answering.settings):
        raise ConfigError(
            f"{where} answers with config.{evaluated.stage}, which reads no exemplars; leave {run.stage!r} out of "
            "config.run."
        )
    if settings.nearest and may_load(run, settings.nearest):
        check_weights(settings.nearest)
        encoder = load_encoder(EncoderSettings(pretrained=settings.nearest), None, with_params=False)
        check_prompts(encoder.tokenizer.reading, settings.nearest)


def run(settings: Settings, run: RunContext) -> None:
    evaluated = run.settings(settings.evaluation, evaluate.Settings)
    at = run.at(settings.evaluation)
    answerer = cast(ExemplarAnswering, evaluate.load_answerer(evaluated, at, evaluated.buckets))
    source = answerer.exemplars
    assert source is not None  # see `check`
    instances, counts = evaluate.find_instances(evaluated, at)
    drawn = draw_dialogues(instances, settings.rows)
    answered = draw_dialogues(drawn, settings.replies) if settings.replies else []
    encoder = pretrained_encoder(settings.nearest) if settings.nearest else source.encoder
    given, absent = choose(drawn, source, encoder, run)
    identity = hash_json([identify(run, settings, drawn), dataclasses.asdict(evaluated)])
    chosen = {i.id for i in answered}

    def asked(
        what: str, ask: Callable[..., list[Prediction]], instances: Sequence[Instance], shown: np.ndarray
    ) -> list[Prediction]:
        """Asks the system, with the same seed each time, and keeps the answers until the stage is done."""
        name, folder = f"{run.stage}, {what}", run.directory / _PARTS / what.replace(", ", "-")
        kept = KeptAnswers(folder, hash_json([identity, what]), name)
        options = {"batch_size": evaluated.batch_size, "seed": run.seed}
        found = ask(instances, exemplars=shown, progress=name, kept=kept, **options)
        kept.flush()
        return found

    rows, about = [], {}
    for name, found in given.items():
        weighed, replies = asked(name, answerer.weigh, drawn, found), {}
        if answered:
            shown = found[[i.id in chosen for i in drawn]]
            replies = {row.id: row.response for row in asked(f"{name}, replies", answerer.respond, answered, shown)}
        rows += _rows(name, weighed, replies, _likeness(drawn, found, source.pairs))
        about[name] = {"with_too_few": int((found < 0).any(axis=1).sum()) if name != "none" else 0}
    write_jsonl(run.directory / "swaps.jsonl.gz", rows)
    told = {
        "evaluation": settings.evaluation,
        "stage": evaluated.stage,
        "split": evaluated.split,
        "exemplars": int(given["own"].shape[1]),
        "nearest": settings.nearest or "the system's own retriever",
        "data": {**counts, "rows": len(drawn), "replies": len(answered)},
        "given": about,
        "absent": absent,
    }
    if settings.recall:
        readers = {"own": source.encoder, **({settings.nearest: encoder} if settings.nearest else {})}
        told["recall"] = recall(drawn, source.pairs, readers, seed=run.seed)
    write_json(run.directory / "swaps.json", told)
    shutil.rmtree(run.directory / _PARTS, ignore_errors=True)


def choose(
    instances: Sequence[Instance], source: ExemplarSource, encoder: InstanceEncoder, run: RunContext
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Chooses exemplars for each instance, by GIVEN: rows of `source.pairs`, [N, K]; and the reasons for absent ones.

    The oracle chooses by `encoder`'s vectors of replies. Random draws use the run's seed.
    """
    own, pairs = np.asarray(source.find(instances)[0]), source.pairs
    k, absent = own.shape[1], {}
    given = {"own": own}
    given |= {kind: draw_exemplars(kind, instances, pairs, k, seed=run.seed) for kind in DRAWN}
    if (emotion_ids(instances) < 0).all():
        absent["same_emotion"] = "no row has an emotion"
        del given["same_emotion"]
    gold, replies = (_reply_vectors(encoder, side, run.stage) for side in (instances, pairs))
    given["nearest"] = nearest_exemplars(gold, replies, instances, pairs, k)
    given["none"] = np.full_like(own, -1)
    return given, absent


def _reply_vectors(encoder: InstanceEncoder, instances: Sequence[Instance], stage: str) -> np.ndarray:
    """Embeds the responses alone, whatever else the encoder reads of an exemplar."""
    return encoder.embed_keys(replies_alone(instances), progress=f"{stage}: replies", mesh=local_mesh())


def pretrained_encoder(name: str) -> CorpusEncoder:
    """Loads a pretrained encoder that reads contexts and single responses, with vectors of unit length."""
    settings = EncoderSettings(pretrained=name, normalize=True)
    loaded = load_encoder(settings, None)
    tokenizer = loaded.tokenizer
    return CorpusEncoder(
        model=Towers(loaded.model),
        params={"encoder": loaded.params},
        pad_id=tokenizer.pad_id,
        query_text=functools.partial(encode_queries, tokenizer, max_tokens=_MAX_TOKENS),
        key_text=functools.partial(encode_keys, tokenizer, max_tokens=_MAX_TOKENS, key="response"),
        hash=hash_json([hash_tree(loaded.params), dataclasses.asdict(settings), _MAX_TOKENS]),
    )


def _likeness(instances: Sequence[Instance], shown: np.ndarray, pairs: Sequence[Instance]) -> list[float | None]:
    """Computes the mean token F1 of each instance's exemplars with its gold response; None without exemplars."""
    there = np.argwhere(shown >= 0)
    said = [pairs[int(shown[i, k])].response for i, k in there]
    scores = token_f1_rows(said, [instances[i].response for i, _ in there])
    sums = np.bincount(there[:, 0], weights=scores, minlength=len(instances))
    counts = np.bincount(there[:, 0], minlength=len(instances))
    return [float(total / count) if count else None for total, count in zip(sums, counts, strict=True)]


def _rows(
    name: str, weighed: Sequence[Prediction], replies: Mapping[str, str], likeness: Sequence[float | None]
) -> Iterator[dict[str, Any]]:
    """Yields rows of the file, without corpus texts."""
    for row, like in zip(weighed, likeness, strict=True):
        yield {
            "given": name,
            "id": row.id,
            "exemplars": [exemplar["id"] for exemplar in row.exemplars],
            **row.notes,
            **({} if like is None else {"exemplar_f1": round(like, 5)}),
            **({"response": replies[row.id]} if row.id in replies else {}),
        }


def recall(
    instances: Sequence[Instance], pairs: Sequence[Instance], readers: Mapping[str, InstanceEncoder], *, seed: int
) -> dict[str, Any]:
    """Measures how often contexts retrieve their gold replies among 2,500 others, with each of `readers` and BM25.

    All read replies alone, without contexts and emotions. Replies of the same dialogue and situation are excluded, as
    are others with the words of the gold reply.

    Returns:
      `among`, the number of ranked replies, and `by`: reader → `evaluation.retrieval.recall_statistics` with intervals.
    """
    pool = [pairs[row] for row in np.sort(np.random.default_rng(seed).permutation(len(pairs))[:POOL])]
    groups, texts = dialogue_groups(instances), [i.response for i in (*pool, *instances)]
    numbers = text_numbers(texts)
    ignored = [(numbers[len(pool) :], numbers[: len(pool)]), (groups, dialogue_groups(pool))]
    contexts = [" ".join(i.context) for i in instances]
    vectors: dict[str, Any] = {"bm25": bm25_vectors(contexts, texts[len(pool) :], texts[: len(pool)])}
    for name, encoder in readers.items():
        queries = encoder.embed_queries(instances, progress=f"contexts, {name}", mesh=local_mesh())
        gold, keys = (_reply_vectors(encoder, side, name) for side in (instances, pool))
        # Emotions, stored at the end of a vector, are unknown here.
        vectors[name] = (queries, gold, keys)
    found = {
        name: with_intervals(recall_statistics(gold_ranks(*vectors[name], ignored=ignored), str(len(pool) + 1)), groups)
        for name in (*readers, "bm25")
    }
    return {"among": len(pool) + 1, "by": found}
