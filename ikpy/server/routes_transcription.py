"""OpenAI transcription route: a sound becomes text."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ikpy.server.chat.deltas import Delta
from ikpy.server.chat.request import ChatRequest, chat_request
from ikpy.server.errors import bad_request, error_body
from ikpy.server.form import read_form
from ikpy.server.generation import Generation
from ikpy.server.http import DONE, EventStream, aside, data_event, json_response, parse_json, read_bytes
from ikpy.server.routes_status import front_of
from ikpy.server.tasks import Failed, Finished, Piece

DEFAULT_PROMPT = "Transcribe audio to text"
TEXTS = ("model", "language", "prompt", "response_format")
"""Fields that are no JSON."""
UNUSED = ("chunking_strategy", "user")
"""Texts of OpenAI's clients that say nothing here."""
FORMATS = ("json", "text")
WORDS = {b"True": True, b"False": False}
"""As forms of Python programs have them."""


def to_chat(fields: Mapping[str, bytes]) -> dict[str, Any]:
    """The request in the chat form: what is asked, then the sound. Raises ApiError 400."""
    texts = {name: fields.get(name, b"").decode("utf-8", "replace") for name in TEXTS}
    if not fields.get("file"):
        raise bad_request("No input file found for transcription")
    if (texts["response_format"] or FORMATS[0]) not in FORMATS:
        raise bad_request("Only 'json' and 'text' response_format are supported for transcription")
    prompt = texts["prompt"] or DEFAULT_PROMPT
    prompt += f" (language: {texts['language']})" if texts["language"] else ""
    sound = {"data": base64.b64encode(fields["file"]).decode()}
    content = [{"type": "text", "text": prompt}, {"type": "input_audio", "input_audio": sound}]
    others = (name for name in fields if name not in (*TEXTS, *UNUSED, "file") and not name.endswith("[]"))
    more = {name: _value(name, fields[name]) for name in others}
    return {**more, "model": texts["model"], "messages": [{"role": "user", "content": content}], "n": 1}


def _value(name: str, data: bytes) -> Any:
    """A number or another value of a field, as JSON. Raises ApiError 400."""
    try:
        return WORDS[data] if data in WORDS else parse_json(data)
    except Exception:  # said below with the name of the field
        raise bad_request(f"field '{name}' is no number, true or false") from None


def usage(event: Finished) -> dict[str, Any]:
    """Object ``usage`` of an answer."""
    return {
        "type": "tokens",
        "input_tokens": event.n_prompt,
        "output_tokens": event.n_decoded,
        "total_tokens": event.n_prompt + event.n_decoded,
        "input_tokens_details": {"cached_tokens": event.n_cached},
    }


def content_of(deltas: Sequence[Delta]) -> str:
    """The text of deltas without reasoning."""
    return "".join(delta.text for delta in deltas if delta.kind == "content")


def done(text: str, event: Finished) -> dict[str, Any]:
    """The whole answer, which is also the last event of a stream."""
    return {"type": "transcript.text.done", "text": text, "usage": usage(event)}


def answer(chat: ChatRequest, event: Finished) -> dict[str, Any]:
    """The answer to a request that is not streamed."""
    reader = chat.output.reader()
    return done(content_of([*reader.feed(event.text), *reader.end(event)]), event)


async def stream(chat: ChatRequest, generation: Generation) -> AsyncIterator[str]:
    """Events of a stream."""
    reader, text = chat.output.reader(), ""
    async for event in generation.events():
        if isinstance(event, Failed):
            yield data_event(error_body(event.code, event.message))
        elif isinstance(event, (Piece, Finished)):
            new = content_of(reader.end(event) if isinstance(event, Finished) else reader.feed(event.text))
            text += new
            if new:
                yield data_event({"type": "transcript.text.delta", "delta": new})
            if isinstance(event, Finished):
                yield data_event(done(text, event))
    yield DONE


async def transcriptions(request: Request) -> Response:
    """POST /v1/audio/transcriptions."""
    front = front_of(request)
    data = await read_bytes(request, front.settings)
    fields = await aside(request, read_form, request.headers.get("content-type", ""), data)
    body = to_chat(fields)
    chat = await chat_request(request, body, front)
    generation = await front.start([chat.prompt], chat.params, request)
    if chat.params.stream:
        await generation.first(request)
        return EventStream(stream(chat, generation), generation.cancel, ping=front.settings.ping_interval)
    (event,) = await generation.results(request)
    found = answer(chat, event)
    return PlainTextResponse(found["text"] + "\n") if fields.get("response_format") == b"text" else json_response(found)
