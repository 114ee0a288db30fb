"""How a generator is shown its sources: tagged rows for encoder-decoders, chat prompts for decoder-only models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from jaxtyping import Bool, Int

from empax.core.config import ConfigError, check_numbers
from empax.core.protocols import Tokenizer
from empax.core.types import Instance
from empax.data import features
from empax.data.chat import ChatTemplate, single_turn, without_system
from empax.data.tokenizers import SubwordTokenizer

ExemplarLayout: TypeAlias = Literal["apart", "joined", "own_tokens", "response"]
"""How a generator is shown exemplars.

apart: each as a passage of its own, with turn tokens of its own, beside the context's passage. Ours.
joined: each behind the context in one passage, with the context's turn tokens: REG's literal form.
own_tokens: as "joined", with turn tokens of its own. Ours.
response: as "apart", its response alone. Ours.
"""


@dataclasses.dataclass(frozen=True)
class LayoutSettings:
    """How many tokens of each text a model reads.

    Attributes:
      max_context_tokens: of the context in a source; the newest turns stay.
      max_passage_tokens: of an exemplar in a source.
      max_target_tokens: of a response, end-of-sequence included.
      max_query_tokens: of the context as the retriever reads it; the newest turns stay.
      max_key_tokens: of an exemplar as the retriever reads it.
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
        """Both attribute groups, the separator and a token on each side included."""
        return self.max_context_tokens + self.max_passage_tokens + 2 * features.NUM_ATTRIBUTES + 3


class Text(NamedTuple):
    """A context or an exemplar, tokenised."""

    attributes: list[int]
    ids: list[int]

    @property
    def size(self) -> int:
        return len(self.attributes) + len(self.ids)


Row: TypeAlias = tuple[Text | None, Text | None] | None
"""Context and exemplar of a row, each None where the row is without; a row that is None is all padding."""


class SourceForm(Protocol):
    """Texts to source rows."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def apart(self) -> bool:
        """Whether context and exemplars stand in rows of their own."""
        ...

    @property
    def layout(self) -> LayoutSettings: ...
    def contexts(self, instances: Sequence[Instance]) -> list[Text]: ...

    def passages(self, instances: Sequence[Instance]) -> list[Text]:
        """Each instance with its response, as an exemplar for another."""
        ...

    def lengths(self, contexts: Sequence[Text], passages: np.ndarray) -> Int[np.ndarray, " N"]:
        """Tokens of each context's longest row; `passages[N]` is the size of its longest exemplar, 0 = it has none."""
        ...

    def arrays(self, rows: Sequence[Row], length: int) -> tuple[Int[np.ndarray, "N S"], Bool[np.ndarray, "N S"]]:
        """Ids and mask of rows."""
        ...


@dataclasses.dataclass(frozen=True)
class TaggedForm:
    """`[attributes] context` and `[attributes] exemplar` in rows of their own, or in one with `<sep>` between them.

    Every turn stands behind the token of who speaks.

    Attributes:
      attributes: whether the instances' notes go in front of the texts.
      exemplars: see `ExemplarLayout`.
      framed: whether each row stands in what the tokenizer puts around a text: the end of a T5's source, <s> and </s>
        of BART. For pretrained models, which know no text without it.
    """

    tokenizer: Tokenizer
    layout: LayoutSettings
    attributes: bool
    exemplars: ExemplarLayout = "apart"
    framed: bool = False

    @property
    def apart(self) -> bool:
        return self.exemplars in ("apart", "response")

    @functools.cached_property
    def frame(self) -> tuple[list[int], list[int]]:
        """Ids before and behind each row."""
        return self.tokenizer.framing if self.framed else ([], [])

    @functools.cached_property
    def turns(self) -> list[int]:
        """Ids of all tokens that stand in front of turns."""
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
        # A random exemplar may be longer than the bucket, which was chosen for the retrieved ones. Its response
        # stands last, and must stay.
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


TOLD = "told"
"""The note of what a model has said of a context before it replies, by name; see `ChatForm`."""

INSTRUCTION = (
    "You talk with somebody who tells you what happened to them. Answer as a person who understands them would: "
    "in one or two short, warm sentences."
)


@dataclasses.dataclass(frozen=True)
class ChatForm:
    """A chat prompt: the instruction, exemplars as shots, and the dialogue with the model as the one who listens.

    Context and shot lie in columns of their own, the shot's first: so several exemplars can be read before one
    context (`models.prompted.FusionInPrompt`). Attributes are put into words. Without either, a prompt has the ids of
    transformers' `apply_chat_template` wherever a control token follows the system's text.

    Attributes:
      exemplars: "apart" = a shot is the last turn of an exemplar's context and the response, "response" = the response
        alone; None = rows have no columns for a shot.
      told: what contexts may have told in their note "told"; of it, exemplars tell their own emotion.
    """

    tokenizer: Tokenizer
    layout: LayoutSettings
    attributes: bool
    template: ChatTemplate
    exemplars: ExemplarLayout | None = None
    instruction: str = INSTRUCTION
    told: tuple[str, ...] = ()

    @property
    def apart(self) -> bool:
        return False  # the columns of a row are

    @property
    def _frames(self) -> ChatTemplate:
        return self.template.mapped(self.tokenizer.mark)

    @property
    def _opening_text(self) -> str:
        """The end of an opening that is text: a turn that follows may share a token with it."""
        opening, mark = self.template.opening, self.tokenizer.mark
        if not self.template.system_last:
            return ""  # the system's text follows, which is the same in all prompts
        return next(opening[i:] for i in range(len(opening) + 1) if mark(opening[:i]) + opening[i:] == mark(opening))

    @property
    def prefix(self) -> tuple[int, ...]:
        """What stands in front of every source; put there by the model."""
        opened = self._frames.opened(self.instruction)
        return tuple(self.tokenizer.encode(opened.removesuffix(self._opening_text)))

    @property
    def _ending(self) -> list[int]:
        return self.tokenizer.encode(self._frames.answer)

    @property
    def start_id(self) -> int:
        """The prompt's last token, the same in all: what a decoder starts from."""
        if not self._ending:
            raise ConfigError("the chat template puts nothing behind the last turn, where the model could write on.")
        return self._ending[-1]

    @property
    def split(self) -> int:
        """How many columns of a row belong to the exemplar."""
        return self.layout.max_passage_tokens if self.exemplars else 0

    def contexts(self, instances: Sequence[Instance]) -> list[Text]:
        words = [self._in_words(i, "context_attributes", i.notes.get(TOLD, {})) for i in instances]
        if self.template.system_last:  # they stand behind the instruction, among the turns
            return [Text([], self._dialogue(i.context, word)) for i, word in zip(instances, words, strict=True)]
        before = self.tokenizer.encode_batch(words)
        return [Text(own, self._dialogue(i.context)) for i, own in zip(instances, before, strict=True)]

    def _dialogue(self, context: Sequence[str], words: str = "") -> list[int]:
        """The newest turns that fit whole, beginning with the speaker's, in their frames; of the last one, its end."""
        frames, instruction, encode = self._frames, self.instruction + words, self.tokenizer.encode
        room, fits, opening = self.layout.max_context_tokens, [], self._opening_text
        for first in range(len(context) - 1, -1, -2):
            # In one pass: a turn's first letters may share a token with what stands before them.
            ids = encode(opening + frames.continued(context[first:], instruction))[:-1]
            if len(ids) > room:
                break
            fits = ids
        if fits:
            return fits
        heads = encode(opening + (instruction if frames.system_last else "") + frames.first_user)
        ending = self._ending[:-1]
        room -= len(heads) + len(ending)
        if room < 2:
            raise ConfigError(
                f"max_context_tokens = {self.layout.max_context_tokens} leaves {room} tokens beside the "
                f"{len(heads) + len(ending)} of the chat template; set it higher."
            )
        return [*heads, *encode(context[-1])[-room:], *ending]

    def passages(self, instances: Sequence[Instance]) -> list[Text]:
        if self.exemplars == "response":
            texts = ["\n\nA good answer: "] * len(instances)
        else:
            texts = [f"\n\nSomebody said: {i.context[-1]}\nA good answer: " for i in instances]
        told = [{"emotion": i.emotion} if i.emotion and "emotion" in self.told else {} for i in instances]
        words = [self._in_words(i, "response_attributes", own) for i, own in zip(instances, told, strict=True)]
        questions = self.tokenizer.encode_batch(texts)
        answers = self.tokenizer.encode_batch([i.response + word for i, word in zip(instances, words, strict=True)])
        most = self.layout.max_passage_tokens
        rows = []
        for question, answer in zip(questions, answers, strict=True):
            kept = answer[:most]
            rows.append(Text([], [*features.keep_newest(question, most - len(kept)), *kept]))
        return rows

    def _in_words(self, instance: Instance, note: str, told: Mapping[str, str]) -> str:
        levels = {**(instance.notes.get(note, {}) if self.attributes else {}), **told}
        said = ", ".join(f"{name.replace('_', ' ')} {level}" for name, level in levels.items())
        return f"\n({said})" if said else ""

    def lengths(self, contexts: Sequence[Text], passages: np.ndarray) -> Int[np.ndarray, " N"]:
        del passages  # an exemplar's columns are as many, whatever its length
        return np.array([text.size for text in contexts]) + self.split

    def arrays(self, rows: Sequence[Row], length: int) -> tuple[Int[np.ndarray, "N S"], Bool[np.ndarray, "N S"]]:
        room = length - self.split
        if room < 1:
            raise ConfigError(f"a bucket of {length} leaves no room beside {self.split} tokens of an exemplar.")
        pad_id = self.tokenizer.pad_id
        passages = [row[1].ids if row and row[1] else [] for row in rows]
        contexts = [[*row[0].attributes, *row[0].ids][-room:] if row and row[0] else [] for row in rows]
        left, right = features.pad(passages, self.split, pad_id), features.pad(contexts, room, pad_id)
        return np.concatenate([left[0], right[0]], axis=1), np.concatenate([left[1], right[1]], axis=1)


@dataclasses.dataclass(frozen=True)
class PlainForm:
    """A source as the pretrained model's own tokenizer makes it of a text: no tags, no instruction.

    A decoder-only model with a chat template gets the text as the first turn of a chat, and a context as a chat of the
    user and the assistant. Without a template the turns of a context, and an exemplar in front of them, are lines of
    one text; where the tokenizer knows no end of a line (T5's), " | " stands between them. Of a context that is too
    long the oldest turns are left out, two at a time.

    Attributes:
      template: the chat template of a decoder-only model that has one, else None.
    """

    tokenizer: SubwordTokenizer
    layout: LayoutSettings
    template: str | None = None

    @property
    def apart(self) -> bool:
        return False

    def encode(
        self, texts: Sequence[str], *, max_tokens: int | None = None, keep: Literal["end", "start"] = "end"
    ) -> list[list[int]]:
        """Ids of each text, with what the model expects around it; at least one id.

        Args:
          texts: plain text.
          max_tokens: most ids of a row; the text is cut, not its frame. None = nothing is cut.
          keep: which end of a longer text stays.

        Raises:
          ConfigError: `max_tokens` leaves no room beside the frame.
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
                f"{max_tokens} tokens for a source leave no room beside the {head + tail} that stand around its text; "
                "allow more."
            )
        if keep == "end":
            return [row if len(row) <= max_tokens else row[:head] + row[head - max_tokens :] for row in rows]
        return [row if len(row) <= max_tokens else row[: max_tokens - tail] + row[len(row) - tail :] for row in rows]

    @property
    def _where(self) -> str:
        return f"the chat template of {self.tokenizer.source}"

    @functools.cached_property
    def _between(self) -> str:
        """What stands between turns that are one text."""
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
        for place, context in enumerate(contexts):
            first = 0
            while len(rows[place]) > most and first + 2 < len(context):
                first += 2
                rows[place] = self.encode([self._joined(context[first:])])[0]
            if len(rows[place]) > most:
                rows[place] = self.encode([self._joined(context[first:])], max_tokens=most)[0]
        return [Text([], row) for row in rows]

    def passages(self, instances: Sequence[Instance]) -> list[Text]:
        texts = [self._between.join((*i.context, i.response, "")) for i in instances]
        return [Text([], row[-self.layout.max_passage_tokens :]) for row in self.tokenizer.encode_batch(texts)]

    def lengths(self, contexts: Sequence[Text], passages: np.ndarray) -> Int[np.ndarray, " N"]:
        return np.array([text.size for text in contexts]) + passages

    def arrays(self, rows: Sequence[Row], length: int) -> tuple[Int[np.ndarray, "N S"], Bool[np.ndarray, "N S"]]:
        ids = [[*(row[1].ids if row[1] else []), *row[0].ids][-length:] if row and row[0] else [] for row in rows]
        return features.pad(ids, length, self.tokenizer.pad_id)
