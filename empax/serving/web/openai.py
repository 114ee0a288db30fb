"""OpenAI's formats of requests, responses and errors."""

from __future__ import annotations

import base64
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np

from empax.data.english import with_plain_quotes
from empax.decoding.settings import LEAST_TEMPERATURE
from empax.serving.web.systems import Asked, Said

MOST_CHOICES, MOST_TEXTS, MOST_CHARACTERS = 8, 256, 8000

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logprobs": (False,), "logit_bias": ({},),
    "response_format": ({"type": "text"},), "tools": ([],), "store": (False,), "modalities": (["text"],),
}  # fmt: skip
"""OpenAI's options that small models do not support, with values that have no effect."""
_TOLD = ("user", "metadata", "safety_identifier")
"""Fields that describe the caller and do not affect the answer."""
_CHAT = ("messages", "model", "temperature", "top_p", "max_tokens", "max_completion_tokens", "n", "seed", "stop",
         "stream", "stream_options")  # fmt: skip


class ApiError(Exception):
    """An error in OpenAI's format, with its HTTP status; `param` is the invalid field."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 retry_after: int | None = None):  # fmt: skip
        super().__init__(message)
        self.status = status
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = "server_error" if status >= 500 else kinds.get(status, "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """A checked request for replies.

    `usage`: whether a last chunk has the token usage. `limit`: the request's field with the maximum length.
    """

    model: str
    asked: tuple[Asked, ...]
    stream: bool
    usage: bool
    limit: str = "max_tokens"


def chat_request(body: Any) -> ChatRequest:
    """Parses the body of /v1/chat/completions.

    Raises:
      ApiError: 400, names the field.
    """
    known(body, _CHAT)
    temperature, top_p = number(body, "temperature", 0, 2), number(body, "top_p", 0, 1)
    if temperature is not None and 0 < temperature < LEAST_TEMPERATURE:
        raise wrong("temperature", f"{temperature} must be 0 or at least {LEAST_TEMPERATURE}.")
    if top_p == 0:
        raise wrong("top_p", "0 must be above 0; temperature = 0 takes the likeliest tokens.")
    if temperature == 0 and top_p not in (None, 1):
        raise wrong("top_p", f"{top_p} has no effect with temperature = 0, which draws nothing.")
    most, other = (number(body, name, 1, 2**20, int) for name in ("max_tokens", "max_completion_tokens"))
    if most is not None and other is not None:
        raise wrong("max_completion_tokens", "give it once: max_tokens is the same.")
    choices, seed = number(body, "n", 1, MOST_CHOICES, int) or 1, number(body, "seed", -(2**63), 2**63, int)
    stop = body.get("stop")
    stop = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > 4 or not all(isinstance(text, str) and text for text in stop):
        raise wrong("stop", "must be a text or up to 4 texts, none empty.")
    stream, more = flag(body, "stream"), body.get("stream_options") or {}
    if not isinstance(more, dict) or set(more) - {"include_usage"} or (more and not stream):
        raise wrong("stream_options", "takes only include_usage, and only with stream = true.")
    seed = None if seed is None else seed % 2**31
    asked = Asked(_turns(body.get("messages")), seed, 0, temperature, top_p, most or other, tuple(stop))
    each = tuple(dataclasses.replace(asked, number=i) for i in range(choices))
    limit = "max_tokens" if other is None else "max_completion_tokens"
    model = text_of(body.get("model"), "model")
    return ChatRequest(model, each, stream, flag(more, "include_usage"), limit)


def _turns(messages: Any) -> tuple[str, ...]:
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "must be a list of at least one message.")
    turns = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        expected = "user" if (len(messages) - 1 - i) % 2 == 0 else "assistant"
        if role == "system":
            raise wrong(f"{where}.role", "is 'system', which these models were not trained to read; leave it out.")
        if role != expected:
            rule = "user and assistant alternate, and the last message is a user's."
            raise wrong(f"{where}.role", f"{role!r:.40} must be {expected!r}: {rule}")
        if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
            content = "".join(text_of(part.get("text"), f"{where}.content") for part in content)
        turns.append(with_plain_quotes(text_of(content, f"{where}.content")).strip())
    if not turns[-1]:
        raise wrong(f"messages[{len(turns) - 1}].content", "is empty; there is nothing to answer.")
    return tuple(turns)


def text_of(value: Any, where: str) -> str:
    """Returns a text that is not too long."""
    if not isinstance(value, str):
        raise wrong(where, "must be text.")
    if len(value) > MOST_CHARACTERS:
        message = f"{where} has {len(value)} characters; {MOST_CHARACTERS} are allowed."
        raise ApiError(400, message, param=where, code="context_length_exceeded")
    return _whole_characters(value)


def _whole_characters(text: str) -> str:
    """Replaces lone surrogates, which no response can hold, by question marks."""
    return text.encode(errors="replace").decode()


def embedding_request(body: Any) -> tuple[str, list[str], bool]:
    """Parses the body of /v1/embeddings: the model, the texts, and whether vectors are wanted in base64.

    Raises:
      ApiError: 400, names the field.
    """
    known(body, ("input", "model", "encoding_format"))
    given = body.get("input")
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not 1 <= len(texts) <= MOST_TEXTS:
        raise wrong("input", f"must be a text or 1 to {MOST_TEXTS} texts.")
    form = body.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise wrong("encoding_format", f"{form!r} must be 'float' or 'base64'.")
    model = text_of(body.get("model"), "model")
    return model, [text_of(text, f"input[{i}]") for i, text in enumerate(texts)], form == "base64"


def embeddings(model: str, vectors: np.ndarray, tokens: int, *, base64_wanted: bool) -> dict[str, Any]:
    """Builds the response of /v1/embeddings."""
    rows = vectors.astype("<f4")
    data = [base64.b64encode(row.tobytes()).decode() if base64_wanted else row.tolist() for row in rows]
    return {
        "object": "list",
        "model": model,
        "data": [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(data)],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def completion(asked: ChatRequest, said: Sequence[Said], *, why: bool) -> dict[str, Any]:
    """Builds the response of /v1/chat/completions; `why` adds the explanation of each reply under "empax"."""
    choices = []
    for i, one in enumerate(said):
        message = {"role": "assistant", "content": one.text}
        choices.append({"index": i, "message": message, **_end(one, why=why)})
    return {**_head("chat.completion", asked.model), "choices": choices, "usage": _usage(said)}


async def events(
    asked: ChatRequest, replies: AsyncIterable[tuple[int, str | Said]], *, why: bool
) -> AsyncIterator[str]:
    """Yields the response as server-sent events, one per piece."""
    head, said = _head("chat.completion.chunk", asked.model), dict[int, Said]()
    told = [""] * len(asked.asked)

    def event(choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'choices': choices, **more}, ensure_ascii=False)}\n\n"

    def delta(i: int, **fields: str) -> str:
        return event([{"index": i, "delta": fields, "finish_reason": None}])

    for i in range(len(told)):
        yield delta(i, role="assistant", content="")
    try:
        async for i, one in replies:
            piece = one if isinstance(one, str) else one.text[len(told[i]) :]
            told[i] += piece
            if piece:
                yield delta(i, content=piece)
            if not isinstance(one, str):
                said[i] = one
                yield event([{"index": i, "delta": {}, **_end(one, why=why)}])
    except ApiError as error:  # too late for a status
        yield f"data: {json.dumps(error.body)}\n\n"
        return
    if asked.usage:
        yield event([], usage=_usage([said[i] for i in sorted(said)]))
    yield "data: [DONE]\n\n"


def _end(one: Said, *, why: bool) -> dict[str, Any]:
    return {"finish_reason": "length" if one.cut else "stop", **({"empax": one.why} if why else {})}


def _head(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


def _usage(said: Sequence[Said]) -> dict[str, int]:
    read, written = said[0].prompt_tokens, sum(one.completion_tokens for one in said)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def wrong(param: str, message: str) -> ApiError:
    """Returns the error of an invalid field; shortens its name, which may be anything."""
    param = _whole_characters(param)
    return ApiError(400, f"{param}: {_whole_characters(message)}", param=param)


def known(body: Any, names: Sequence[str]) -> None:
    """Raises ApiError unless `body` is an object whose fields are all known or have no effect."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object.")
    for name, value in body.items():
        if name in names or name in _TOLD or value is None or value in _NEUTRAL.get(name, ()):
            continue
        if name in _NEUTRAL:
            raise wrong(name, "is not supported here; leave it out.")
        raise wrong(name, f"is unknown; there are {', '.join(names)}.")


def number(body: Mapping[str, Any], name: str, least: float, most: float, kind: Any = int | float) -> Any:
    """Returns a field that is a number (of the `kind` int: a whole one) or absent."""
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most):
        raise wrong(name, f"{value!r:.40} must be a {'whole ' * (kind is int)}number from {least} to {most}.")
    return value


def flag(body: Mapping[str, Any], name: str) -> bool:
    """Returns a field that is true or false; absent = false."""
    value = body.get(name)
    if value not in (None, True, False) or (isinstance(value, int) and not isinstance(value, bool)):
        raise wrong(name, f"{value!r:.40} must be true or false.")
    return bool(value)
