"""Source forms of generators: tagged rows for encoder-decoders, and the plain format of a pretrained model."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from jaxtyping import Bool, Int

from empax.core.config import ConfigError, check_numbers
from empax.core.protocols import Tokenizer
from empax.core.types import Instance
from empax.data import features
from empax.data.chat import single_turn, without_system
from empax.data.tokenizers import SubwordTokenizer

ExemplarLayout: TypeAlias = Literal["apart", "joined", "own_tokens", "response", "turns"]
"""How exemplars are put into a generator's source.

apart: each in a separate passage with separate turn tokens, in addition to the context's passage. Ours.
joined: each after the context in one passage, with the context's turn tokens: REG's literal form.
own_tokens: as "joined", with separate turn tokens. Ours.
response: as "apart", with the response alone. Ours.
turns: each as an earlier turn of the chat with its answer, for a decoder-only model. Ours.
"""


@dataclasses.dataclass(frozen=True)
class LayoutSettings:
    """Maximum number of tokens of each text.

    Attributes:
      max_context_tokens: tokens of the context in a source, with the frames and words of a prompt; the newest turns are
        kept.
      max_passage_tokens: tokens of an exemplar in a source.
      max_target_tokens: tokens of a response, end-of-sequence included.
      max_query_tokens: tokens of the context for the retriever; the newest turns are kept.
      max_key_tokens: tokens of an exemplar for the retriever.
    """

    max_context_tokens: int = 200
    max_passage_tokens: int = 200
    max_target_tokens: int = 50
    max_query_tokens: int = 200
    max_key_tokens: int = 200

    def __post_init__(self) -> None:
        check_numbers(self, "max_context_tokens", "max_passage_tokens", "max_target_tokens", least=2)
        check_numbers(self, "max_query_tokens", "max_key_tokens", least=3)

    @property
    def max_source_tokens(self) -> int:
        """Most tokens of a source, with both attribute groups, the separator and one token on each side."""
        return self.max_context_tokens + self.max_passage_tokens + 2 * features.NUM_ATTRIBUTES + 3


class Text(NamedTuple):
    """A context or an exemplar, tokenised."""

    attributes: list[int]
    ids: list[int]

    @property
    def size(self) -> int:
        return len(self.attributes) + len(self.ids)


Row: TypeAlias = tuple[Text | None, Text | None] | None
"""Context and exemplar of a row, None if absent; a row that is None is all padding."""


class SourceForm(Protocol):
    """Converts texts to source rows."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def apart(self) -> bool:
        """Whether context and exemplars are in separate rows."""
        ...

    @property
    def layout(self) -> LayoutSettings: ...
    def contexts(self, instances: Sequence[Instance]) -> list[Text]: ...

    def passages(self, instances: Sequence[Instance]) -> list[Text]:
        """Tokenises each instance with its response, as an exemplar for another."""
        ...

    def lengths(self, contexts: Sequence[Text], passages: np.ndarray) -> Int[np.ndarray, " N"]:
        """Returns the tokens of each context's longest row; `passages[N]` is the size of its longest exemplar or 0."""
        ...

    def arrays(self, rows: Sequence[Row], length: int) -> tuple[Int[np.ndarray, "N S"], Bool[np.ndarray, "N S"]]:
        """Returns ids and mask of rows."""
        ...


@dataclasses.dataclass(frozen=True)
class TaggedForm:
    """`[attributes] context` and `[attributes] exemplar` in separate rows, or in one row with `<sep>` in between.

    Every turn follows the token of its speaker. `attributes`: whether those in the instances' notes precede the texts.
    `framed`: whether each row has the tokenizer's special tokens around it, which pretrained models expect: T5's end of
    sequence, BART's <s> and </s>.
    """

    tokenizer: Tokenizer
    layout: LayoutSettings
    attributes: bool
    exemplars: ExemplarLayout = "apart"
    framed: bool = False

    @property
    def apart(self) -> bool:
        return self.exemplars in ("apart", "response")

    @property
    def beside(self) -> int:
        """Most tokens that a context's row has beside those of its layout."""
        return features.NUM_ATTRIBUTES * self.attributes + sum(map(len, self.frame))

    @functools.cached_property
    def frame(self) -> tuple[list[int], list[int]]:
        """Ids before and after each row."""
        return self.tokenizer.framing if self.framed else ([], [])

    @functools.cached_property
    def turns(self) -> list[int]:
        """Ids of all turn tokens."""
        tokens = dict.fromkeys((*features.TURN_TOKENS, *self.exemplar_turn_tokens))
        return [self.tokenizer.token_id(token) for token in tokens]

    @property
    def exemplar_turn_tokens(self) -> tuple[str, str]:
        return features.TURN_TOKENS if self.exemplars == "joined" else features.EXEMPLAR_TURN_TOKENS

    def contexts(self, instances: Sequence[Instance]) -> list[Text]:
        texts = [i.context for i in instances]
        ids = features.render_contexts(self.tokenizer, texts, max_tokens=self.layout.max_context_tokens)
        return self._with_attributes(instances, "context_attributes", ids)

    def passages(self, instances: Sequence[Instance]) -> list[Text]:
        ids = features.render_exemplars(
            self.tokenizer,
            instances,
            max_tokens=self.layout.max_passage_tokens,
            turn_tokens=self.exemplar_turn_tokens,
            response_alone=self.exemplars == "response",
        )
        return self._with_attributes(instances, "response_attributes", ids)

    def _with_attributes(self, instances: Sequence[Instance], note: str, ids: list[list[int]]) -> list[Text]:
        if not self.attributes:
            return [Text([], row) for row in ids]
        tokens = {
            (attribute, level): self.tokenizer.token_id(features.attribute_token(attribute, level))
            for attribute, level in features.ATTRIBUTE_LEVELS
        }
        own = ([tokens[pair] for pair in instance.notes.get(note, {}).items()] for instance in instances)
        return [Text(attributes, row) for attributes, row in zip(own, ids, strict=True)]

    def lengths(self, contexts: Sequence[Text], passages: np.ndarray) -> Int[np.ndarray, " N"]:
        sizes, around = np.array([text.size for text in contexts]), sum(map(len, self.frame))
        if self.apart:
            return np.maximum(sizes, passages) + around
        return sizes + np.where(passages > 0, passages + 1, 0) + around

    def arrays(self, rows: Sequence[Row], length: int) -> tuple[Int[np.ndarray, "N S"], Bool[np.ndarray, "N S"]]:
        before, behind = self.frame
        room = length - len(before) - len(behind)
        framed = [[*before, *self._row(*row, room), *behind] if row else [] for row in rows]
        return features.pad(framed, length, self.tokenizer.pad_id)

    def _row(self, context: Text | None, passage: Text | None, max_tokens: int) -> list[int]:
        if context is None:
            context, passage = passage, None
        assert context is not None
        attributes, ids = passage or ([], [])
        # A random exemplar may be longer than the bucket, which was chosen for the retrieved ones. Its response comes
        # last, and must be kept.
        room = max_tokens - context.size - 1 - len(attributes)
        return features.render_source(
            context.attributes,
            context.ids,
            attributes,
            features.keep_newest(ids, max(room, 0), self.turns),
            sep_id=self.tokenizer.token_id(features.SEPARATOR),
            max_tokens=max_tokens,
            turn_ids=self.turns,
        )


@dataclasses.dataclass(frozen=True)
class PlainForm:
    """A source in the format of the pretrained model's own tokenizer: no tags, no instruction.

    A decoder-only model with a chat template gets a text as the first turn of a chat, and a context as a chat between
    user and assistant. Without a template, the turns of a context, and an exemplar before them, are lines of one text;
    if the tokenizer has no line break (T5's), " | " separates them. A context that is too long loses its oldest turns,
    two at a time. If decoding forces a `first_token` at the start of an answer (BART's <s>), targets start with it too.
    """

    tokenizer: SubwordTokenizer
    layout: LayoutSettings
    template: str | None = None
    first_token: int | None = None

    @property
    def apart(self) -> bool:
        return False

    @property
    def beside(self) -> int:
        """As in `TaggedForm`; 0, since the frame is part of the context."""
        return 0

    def encode(
        self, texts: Sequence[str], *, max_tokens: int | None = None, keep: Literal["end", "start"] = "end"
    ) -> list[list[int]]:
        """Encodes each text with the frame that the model expects; at least one id, at most `max_tokens` if given.

        Of a longer text, but not of its frame, it truncates all but the end `keep`. Raises ConfigError if `max_tokens`
        leaves no room besides the frame.
        """
        tokenizer = self.tokenizer
        if self.template is None:
            before, behind = tokenizer.framing
            rows = [[*before, *ids, *behind] for ids in tokenizer.encode_batch(texts)]
        else:
            frames = single_turn(self.template, where=self._where, **tokenizer.template_tokens)
            first, last = map(tokenizer.mark, frames)
            before, behind = tokenizer.encode_batch([first, last])
            # In one pass: a text may share a token with its frame.
            rows = tokenizer.encode_batch([f"{first}{text}{last}" for text in texts])
        rows = [row or [tokenizer.start_id] for row in rows]
        if max_tokens is None or max(map(len, rows), default=0) <= max_tokens:
            return rows
        head, tail = len(before), len(behind)
        if head + tail >= max_tokens:
            raise ConfigError(
                f"{max_tokens} tokens for a source leave no room beside the {head + tail} around its text; allow more."
            )
        if keep == "end":
            return [row if len(row) <= max_tokens else row[:head] + row[head - max_tokens :] for row in rows]
        return [row if len(row) <= max_tokens else row[: max_tokens - tail] + row[len(row) - tail :] for row in rows]

    @property
    def _where(self) -> str:
        return f"the chat template of {self.tokenizer.source}"

    @functools.cached_property
    def _between(self) -> str:
        """The separator of turns in one text."""
        encode = self.tokenizer.encode
        return "\n" if encode("a\nb") != encode("a b") else " | "

    def _joined(self, context: Sequence[str]) -> str:
        if self.template is None or len(context) == 1:
            return self._between.join(context)
        frames = without_system(self.template, where=self._where, **self.tokenizer.template_tokens)
        frames = frames.mapped(self.tokenizer.mark)
        return frames.continued(context, "").removesuffix(frames.answer)

    def contexts(self, instances: Sequence[Instance]) -> list[Text]:
        most = self.layout.max_context_tokens
        # A chat begins with the user's turn.
        contexts = [i.context[self.template is not None and len(i.context) % 2 == 0 :] for i in instances]
        rows = self.encode(list(map(self._joined, contexts)))
        kept = (row if len(row) <= most else self._newest(c, most) for row, c in zip(rows, contexts, strict=True))
        return [Text([], row) for row in kept]

    def _newest(self, context: tuple[str, ...], most: int) -> list[int]:
        """Encodes the newest turns that fit into `most` tokens, or the end of the last ones."""
        starts = range(0, len(context), 2)

        def fits(first: int) -> bool:
            return len(self.encode([self._joined(context[first:])])[0]) <= most

        # A search by halves, since a conversation may have thousands of turns.
        first = starts[bisect.bisect_left(starts[:-1], True, key=fits)]
        return self.encode([self._joined(context[first:])], max_tokens=most)[0]

    def passages(self, instances: Sequence[Instance]) -> list[Text]:
        texts = [self._between.join((*i.context, i.response, "")) for i in instances]
        return [Text([], row[-self.layout.max_passage_tokens :]) for row in self.tokenizer.encode_batch(texts)]

    def lengths(self, contexts: Sequence[Text], passages: np.ndarray) -> Int[np.ndarray, " N"]:
        return np.array([text.size for text in contexts]) + passages

    def arrays(self, rows: Sequence[Row], length: int) -> tuple[Int[np.ndarray, "N S"], Bool[np.ndarray, "N S"]]:
        ids = [[*(row[1].ids if row[1] else []), *row[0].ids][-length:] if row and row[0] else [] for row in rows]
        return features.pad(ids, length, self.tokenizer.pad_id)
