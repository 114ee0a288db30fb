"""The source form of decoder-only models: chat prompts, with exemplars as shots."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Int

from empax.core.config import ConfigError
from empax.core.protocols import Tokenizer
from empax.core.types import Instance
from empax.data import features
from empax.data.chat import PLAIN, ChatTemplate
from empax.data.sources import ExemplarLayout, LayoutSettings, Row, Text

TOLD = "told"
"""The note with a model's statements about a context before it replies, by name; see `ChatForm`."""

INSTRUCTION = (
    "You talk with somebody who tells you what happened to them. Answer as a person who understands them would: "
    "in one or two short, warm sentences."
)


@dataclasses.dataclass(frozen=True)
class ChatForm:
    """A chat prompt: the instruction, exemplars as shots, and the dialogue with the model as the listener.

    Context and shot have separate columns, the shot's first, so that several exemplars can be read before one context
    (`models.prompted.FusionInPrompt`). Attributes are put into words: before the context and behind a shot's response,
    or with "turns" as the first line of a turn. Without attributes, and without shots or with "turns", a prompt has the
    ids of transformers' `apply_chat_template` if a control token follows the system message.

    Attributes:
      exemplars: "apart" = a shot is the last turn of an exemplar's context and the response, as text, "response" = the
        response alone, "turns" = the former as two turns of the chat; None = rows have no columns for a shot.
      told: names that may occur in the note "told" of contexts; of these, exemplars show their own emotion.

    Raises ConfigError if a template for "turns" begins the first turn unlike later ones, or has the instruction last.
    """

    tokenizer: Tokenizer
    layout: LayoutSettings
    attributes: bool
    template: ChatTemplate
    exemplars: ExemplarLayout | None = None
    instruction: str = INSTRUCTION
    told: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        template = self.template
        if self.exemplars == "turns" and (template.system_last or template.first_user != template.assistant_to_user):
            raise ConfigError(
                "exemplars = 'turns': the chat template puts the instruction into the last turn, or begins the first "
                "turn differently; set it to 'apart' or 'response'."
            )

    @property
    def apart(self) -> bool:
        return False  # only their columns are separate

    @property
    def beside(self) -> int:
        """As in `TaggedForm`: the columns of an exemplar; words are part of the context."""
        return self.split

    @property
    def _frames(self) -> ChatTemplate:
        return self.template.mapped(self.tokenizer.mark)

    @property
    def _opening_text(self) -> str:
        """The end of the opening that is plain text: the turn that follows may share a token with it."""
        opening, mark = self.template.opening, self.tokenizer.mark
        if not self.template.system_last:
            return ""  # the system message follows, which is the same in all prompts
        return next(opening[i:] for i in range(len(opening) + 1) if mark(opening[:i]) + opening[i:] == mark(opening))

    @property
    def prefix(self) -> tuple[int, ...]:
        """Ids before every source; the model adds them.

        A template begins the text itself; without one, the tokenizer does (<s> of a Llama), as in `PlainForm`.
        """
        first = self.tokenizer.framing[0] if self.template == PLAIN else []
        opened = self._frames.opened(self.instruction)
        return (*first, *self.tokenizer.encode(opened.removesuffix(self._opening_text)))

    @property
    def _ending(self) -> list[int]:
        return self.tokenizer.encode(self._frames.answer)

    @property
    def start_id(self) -> int:
        """The prompt's last token, the same for all, from which decoding starts."""
        if not self._ending:
            raise ConfigError("the chat template puts nothing after the last turn, where the answer would begin.")
        return self._ending[-1]

    @property
    def split(self) -> int:
        """Number of columns of a row for the exemplar."""
        return self.layout.max_passage_tokens if self.exemplars else 0

    def contexts(self, instances: Sequence[Instance]) -> list[Text]:
        words = [self._in_words(i, "context_attributes", i.notes.get(TOLD, {})) for i in instances]
        if self.exemplars == "turns":
            return [Text([], self._dialogue(i.context, note=word)) for i, word in zip(instances, words, strict=True)]
        if self.template.system_last:  # they follow the instruction, between the turns
            return [Text([], self._dialogue(i.context, word)) for i, word in zip(instances, words, strict=True)]
        before = self.tokenizer.encode_batch(words)
        return [Text(own, self._dialogue(i.context, before=len(own))) for i, own in zip(instances, before, strict=True)]

    def _dialogue(self, context: Sequence[str], words: str = "", note: str = "", before: int = 0) -> list[int]:
        """Encodes the newest turns that fit whole, from one of the speaker's on; else the end of the last turn.

        `words` follow the instruction where the template has it in the last turn, and `note` is the first line of the
        first turn that is kept. `before` counts the tokens of words in front of the dialogue.
        """
        frames, instruction, encode = self._noted(note), self.instruction + words, self.tokenizer.encode
        room, fits, opening = self.layout.max_context_tokens - before, [], self._opening_text
        for first in range(len(context) - 1, -1, -2):
            # In one pass: a turn's first letters may share a token with the text before them.
            ids = encode(opening + frames.continued(context[first:], instruction))[:-1]
            if len(ids) > room:
                break
            fits = ids
        if fits:
            return fits
        heads = encode(opening + (instruction if frames.system_last else "") + frames.first_user)
        ending = self._ending[:-1]
        room = self._room("max_context_tokens", before + len(heads) + len(ending))
        return [*heads, *encode(context[-1])[-room:], *ending]

    def _room(self, name: str, frames: int) -> int:
        """Returns the tokens that this limit of the layout leaves beside those of the frames."""
        most = getattr(self.layout, name)
        room = most - frames
        if room < 2:
            raise ConfigError(
                f"{name} = {most} leaves {room} tokens beside the {frames} of the chat template; set it higher."
            )
        return room

    def _noted(self, note: str) -> ChatTemplate:
        """Returns the frames with a note in front of the first turn."""
        frames = self._frames
        return dataclasses.replace(frames, first_user=f"{frames.first_user}{note.lstrip()}\n") if note else frames

    def passages(self, instances: Sequence[Instance]) -> list[Text]:
        told = [{"emotion": i.emotion} if i.emotion and "emotion" in self.told else {} for i in instances]
        words = [self._in_words(i, "response_attributes", own) for i, own in zip(instances, told, strict=True)]
        if self.exemplars == "turns":
            return self._shown_as_turns(instances, words)
        if self.exemplars == "response":
            texts = ["\n\nA good answer: "] * len(instances)
        else:
            texts = [f"\n\nSomebody said: {i.context[-1]}\nA good answer: " for i in instances]
        questions = self.tokenizer.encode_batch(texts)
        answers = self.tokenizer.encode_batch([i.response + word for i, word in zip(instances, words, strict=True)])
        most = self.layout.max_passage_tokens
        rows = []
        for question, answer in zip(questions, answers, strict=True):
            kept = answer[:most]
            rows.append(Text([], [*features.keep_newest(question, most - len(kept)), *kept]))
        return rows

    def _shown_as_turns(self, instances: Sequence[Instance], notes: Sequence[str]) -> list[Text]:
        """Encodes each as a turn with its answer; keeps the frames, and of the turn what the answer leaves."""
        encode = self.tokenizer.encode_batch
        heads = encode([self._noted(note).first_user for note in notes])
        between = self.tokenizer.encode(self._frames.user_to_assistant)
        turns, answers = encode([i.context[-1] for i in instances]), encode([i.response for i in instances])
        rows = []
        for head, turn, answer in zip(heads, turns, answers, strict=True):
            room = self._room("max_passage_tokens", len(head) + len(between))
            kept = answer[:room]
            rows.append(Text([], [*head, *features.keep_newest(turn, room - len(kept)), *between, *kept]))
        return rows

    def _in_words(self, instance: Instance, note: str, told: Mapping[str, str]) -> str:
        levels = {**(instance.notes.get(note, {}) if self.attributes else {}), **told}
        said = ", ".join(f"{name.replace('_', ' ')} {level}" for name, level in levels.items())
        return f"\n({said})" if said else ""

    def lengths(self, contexts: Sequence[Text], passages: np.ndarray) -> Int[np.ndarray, " N"]:
        del passages  # the number of exemplar columns is fixed
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
