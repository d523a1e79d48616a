"""The Ollama API: chat, generate, embeddings and what clients ask about models.

Requests are turned into chat or completion requests of the other APIs; answers are lines of JSON.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ikpy.server.chat.deltas import Delta
from ikpy.server.chat.output import ChatMessage, OutputFormat
from ikpy.server.chat.request import chat_request, model_of
from ikpy.server.chat.tags import reasoning_tags
from ikpy.server.chat.tool_reading import parse_value
from ikpy.server.errors import ApiError, bad_request
from ikpy.server.front import Front
from ikpy.server.generation import Generation
from ikpy.server.http import EventStream, aside, json_response, made_json, made_response, read_body, to_json
from ikpy.server.model_entries import FOREVER, digest, file_type, stamp
from ikpy.server.ollama_requests import chat_messages, common_fields, read_images, read_logprobs, with_images
from ikpy.server.params import GenerationParams
from ikpy.server.probabilities import N_ENTRY, openai
from ikpy.server.prompts import Prompt, is_token, read_prompts
from ikpy.server.read_params import flag
from ikpy.server.routes_embeddings import (
    L2,
    check_pooling,
    embed,
    n_numbers,
    need_embeddings,
    read_dimensions,
    vectors_of,
)
from ikpy.server.routes_status import front_of, modalities
from ikpy.server.tasks import Failed, Finished, Piece, TokenProbability
from ikpy.tools.media_marks import with_markers

LINES = "application/x-ndjson"
# answers


class Answer:
    """Writes the lines of one answer; ``field`` wraps new text into the objects of the route."""

    def __init__(self, front: Front, body: Mapping[str, Any], output: OutputFormat, *, chat: bool) -> None:
        named = isinstance(body.get("model"), str) and body["model"]
        self._model = model_of(body, front) if named else front.settings.alias
        self._reader = output.reader()
        self._message = ChatMessage()
        self._chat = chat
        self._vocab, self._n_top = front.vocab, read_logprobs(body)
        self._unsent: list[TokenProbability] = []
        self._began = time.perf_counter()

    def add(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        """Objects for new output; calls are given out whole, at the end."""
        out = []
        for delta in deltas:
            self._message.add(delta)
            if delta.kind == "content":
                out.append(self._object(delta.text, "", []) | self._logprobs())
            elif delta.kind == "reasoning":
                out.append(self._object("", delta.text, []) | self._logprobs())
        return out

    def feed(self, text: str, probabilities: Sequence[TokenProbability] = ()) -> list[dict[str, Any]]:
        """Objects for more text of the answer; the probabilities of its tokens go with the first."""
        self._unsent += probabilities
        return self.add(self._reader.feed(text))

    def _logprobs(self) -> dict[str, Any]:
        """Log probabilities of the tokens since the last object."""
        found, self._unsent = self._unsent, []
        if self._n_top is None or not found:
            return {}
        shown = openai(self._vocab, found, post_sampling=False, n_top=self._n_top)["content"]
        for entry in shown:
            for item in [entry, *entry["top_logprobs"]]:
                del item["id"]
            if not self._n_top:
                del entry["top_logprobs"]
        return {"logprobs": shown}

    def finish(self, event: Finished) -> list[dict[str, Any]]:
        """Objects for what was held back, and for calls."""
        out = self.add(self._reader.end(event))
        calls = self._calls()
        return [*out, self._object("", "", calls) | self._logprobs()] if calls and self._chat else out

    def whole(self, event: Finished, prompt: Prompt) -> dict[str, Any]:
        """The answer as one object."""
        self.add([*self._reader.feed(event.text), *self._reader.end(event)])
        message = self._message
        self._unsent = list(event.probabilities)
        said = self._object(message.content, message.reasoning, self._calls())
        return said | self._logprobs() | self.end(event, prompt)

    def n_values(self, event: Piece | Finished) -> int:
        """About how many values the tokens of an event have in an answer."""
        n_context = 0 if self._chat or isinstance(event, Piece) else event.n_prompt + event.n_decoded
        return n_context + (0 if self._n_top is None else len(event.probabilities) * (1 + self._n_top) * N_ENTRY)

    def end(self, event: Finished, prompt: Prompt) -> dict[str, Any]:
        """Fields of the last object."""
        t = event.timings
        out: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if event.stopped_limit else "stop",
            "total_duration": int(1e9 * (time.perf_counter() - self._began)),
            "load_duration": 0,
            "prompt_eval_count": event.n_prompt,
            "prompt_eval_duration": int(1e6 * t.prompt_ms),
            "eval_count": event.n_decoded,
            "eval_duration": int(1e6 * t.predicted_ms),
        }
        if self._chat:
            return out
        known = [token for token in prompt.tokens if token < self._vocab.n_tokens]  # without what stands for pictures
        return out | {"context": [*known, *event.tokens]}

    def last(self, event: Finished, prompt: Prompt) -> dict[str, Any]:
        """The last object of a stream."""
        return self._object("", "", []) | self._logprobs() | self.end(event, prompt)

    def loaded(self) -> dict[str, Any]:
        """Answer to a request without anything to answer: the model is loaded."""
        return self._object("", "", []) | {"done": True, "done_reason": "load"}

    def _calls(self) -> list[dict[str, Any]]:
        found = []
        for call in self._message.calls:
            try:
                arguments = parse_value(call["arguments"])
            except ValueError:
                arguments = {}
            found.append({"function": {"name": call["name"], "arguments": arguments}})
        return found

    def _object(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        head: dict[str, Any] = {"model": self._model, "created_at": stamp()}
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            more["tool_calls"] = calls
        if self._chat:
            return head | {"message": {"role": "assistant", "content": content} | more, "done": False}
        return head | {"response": content} | more | {"done": False}

    async def stream(self, generation: Generation, prompt: Prompt) -> AsyncIterator[str]:
        """Lines of a stream."""
        async for event in generation.events():
            if isinstance(event, Failed):
                yield to_json({"error": event.message}) + "\n"
            elif isinstance(event, Piece):
                for item in self.feed(event.text, event.probabilities):
                    yield to_json(item) + "\n"
            elif isinstance(event, Finished):
                for item in self.finish(event):
                    yield to_json(item) + "\n"
                yield await made_json(self.n_values(event), partial(self.last, event, prompt)) + "\n"


async def respond(request: Request, front: Front, answer: Answer, prompt: Prompt, params: GenerationParams) -> Response:
    """Generates and answers, as a stream or at once."""
    generation = await front.start([prompt], params, request)
    if params.stream:
        await generation.first(request)
        stream = answer.stream(generation, prompt)
        return EventStream(stream, generation.cancel, media_type=LINES)
    result = (await generation.results(request))[0]
    return await made_response(answer.n_values(result), lambda: answer.whole(result, prompt))


async def chat(request: Request) -> Response:
    """POST /api/chat."""
    front = front_of(request)
    body = await read_body(request, front.settings)
    messages = chat_messages(body.get("messages", []))
    if not messages:
        return json_response(Answer(front, body, OutputFormat(), chat=True).loaded())
    fields = common_fields(body) | {"messages": messages}
    if body.get("tools"):
        fields["tools"] = body["tools"]
    found = await chat_request(request, fields, front)
    return await respond(request, front, Answer(front, body, found.output, chat=True), found.prompt, found.params)


async def generate(request: Request) -> Response:
    """POST /api/generate: with the chat template around the prompt, unless ``raw``."""
    front = front_of(request)
    body = await read_body(request, front.settings)
    prompt, system = body.get("prompt", ""), body.get("system", "")
    if not isinstance(prompt, str) or not isinstance(system, str):
        raise bad_request("'prompt' and 'system' must be strings")
    if body.get("suffix"):
        raise ApiError(501, "suffix is not supported; use /infill")
    images = read_images(body)
    if not prompt and not images:
        return json_response(Answer(front, body, OutputFormat(), chat=False).loaded())
    fields = common_fields(body)
    earlier = body.get("context") or []
    if not isinstance(earlier, list) or not all(is_token(item) for item in earlier):
        raise bad_request("'context' must be an array of token ids")
    if flag(body, "raw"):
        params = await aside(request, front.read_params, fields)
        given = {"prompt_string": with_markers(prompt, len(images)), "multimodal_data": images} if images else prompt
        text = await front.seen((await aside(request, read_prompts, given, front.vocab))[0], request)
        output = OutputFormat()
    else:
        messages = [{"role": "system", "content": system}] if system else []
        fields["messages"] = [*messages, {"role": "user", "content": with_images(prompt, images)}]
        found = await chat_request(request, fields, front)
        text, params, output = found.prompt, found.params, found.output
    if earlier:
        begins = front.vocab.add_bos and text.tokens[:1] == [front.vocab.bos]
        new = text.tokens[1:] if begins else text.tokens
        text = replace(text, tokens=read_prompts(earlier, front.vocab)[0].tokens + new)
    return await respond(request, front, Answer(front, body, output, chat=False), text, params)


async def embed_texts(request: Request) -> Response:
    """POST /api/embed. Texts that are too long are cut, unless ``truncate`` is false."""
    front, body = await need_embeddings(request)
    check_pooling(front)
    value = body.get("input")
    if value in ("", [], None):
        return json_response({"model": front.settings.alias, "embeddings": []})
    n_first, began = read_dimensions(body, front), time.perf_counter()
    found = await embed(request, front, value, cut=flag(body, "truncate", True))

    def answer() -> dict[str, Any]:
        return {
            "model": front.settings.alias,
            "embeddings": [vectors_of(front, event, L2, n_first)[0].astype(float).tolist() for event in found],
            "total_duration": int(1e9 * (time.perf_counter() - began)),
            "load_duration": 0,
            "prompt_eval_count": sum(event.n_tokens for event in found),
        }

    return await made_response(n_numbers(front, found), answer)


async def embed_prompt(request: Request) -> Response:
    """POST /api/embeddings: the older form, one text, which is cut if it is too long."""
    front, body = await need_embeddings(request)
    check_pooling(front)
    if not isinstance(body.get("prompt"), str):
        raise bad_request("'prompt' must be a string")
    if not body["prompt"]:
        return json_response({"embedding": []})
    found = await embed(request, front, body["prompt"], cut=True)
    return json_response({"embedding": vectors_of(front, found[0], L2)[0].astype(float).tolist()})


# models


def details(front: Front) -> dict[str, Any]:
    """Description of the model."""
    arch = front.model.hparams.arch
    size = f"{front.model.n_params / 1e9:.1f}B" if front.model.n_params >= 1e8 else f"{front.model.n_params / 1e6:.1f}M"
    found = {"parent_model": "", "format": "gguf", "family": arch, "families": [arch], "parameter_size": size}
    return found | {"quantization_level": file_type(front.model.metadata)}


def model_entry(front: Front) -> dict[str, Any]:
    """The model in lists."""
    name = front.settings.alias
    size = front.model.size_bytes
    entry = {"name": name, "model": name, "modified_at": stamp(front.started), "size": size}
    return entry | {"digest": digest(name, size, front.model.fingerprint), "details": details(front)}


async def tags(request: Request) -> Response:
    """GET /api/tags: the models there are."""
    return json_response({"models": [model_entry(front_of(request))]})


async def running(request: Request) -> Response:
    """GET /api/ps: the models that are loaded."""
    front = front_of(request)
    return json_response({"models": [model_entry(front) | {"expires_at": FOREVER, "context_length": front.n_ctx_slot}]})


async def show(request: Request) -> Response:
    """POST /api/show."""
    front = front_of(request)
    await read_body(request, front.settings)
    arch = front.model.hparams.arch
    info = {
        "general.architecture": arch,
        "general.parameter_count": front.model.n_params,
        f"{arch}.context_length": front.n_ctx_slot,
        f"{arch}.embedding_length": front.model.hparams.n_embd,
        f"{arch}.block_count": front.model.hparams.n_layer,
    }
    abilities = ["completion"] + (["tools"] if "tools" in front.tool_template.source else [])
    abilities += ["embedding"] if front.settings.embeddings else []
    abilities += [name for name, there in modalities(front).items() if there]
    abilities += ["thinking"] if reasoning_tags(front.template.source) else []
    body = {"modelfile": "", "parameters": "", "template": front.template.source, "details": details(front)}
    return json_response(body | {"model_info": info, "capabilities": abilities})


async def version(request: Request) -> Response:
    """GET /api/version."""
    import ikpy

    return json_response({"version": ikpy.__version__})
