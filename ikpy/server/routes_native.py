"""Native routes: completion, tokenize, detokenize, apply-template."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ikpy.server import probabilities
from ikpy.server.errors import bad_request, error_body
from ikpy.server.front import Front, Generation
from ikpy.server.http import EventStream, aside, data_event, data_events, json_response, read_body
from ikpy.server.params import GenerationParams
from ikpy.server.prompts import is_batch, is_token, join_tokens, read_prompts
from ikpy.server.read_params import flag, read_generation
from ikpy.server.routes_status import front_of
from ikpy.server.tasks import CompletionTask, Failed, Finished, Piece, Progress


async def completion(request: Request) -> Response:
    """POST /completion and /completions."""
    front = front_of(request)
    body = await read_body(request, front.settings)
    if "prompt" not in body:
        raise bad_request('"prompt" is required')
    params = await aside(request, read_generation, body, front.settings, front.vocab, front.settings.n_slots)
    prompts = await aside(request, read_prompts, body["prompt"], front.vocab)
    generation = await front.start(prompts, params)
    if params.stream:
        await generation.first(request)
        return EventStream(stream(front, generation, params), generation.cancel, front.settings.timeout)
    results = [final_object(front, generation, params, item) for item in await generation.results(request)]
    several = is_batch(body["prompt"]) or params.n > 1
    return json_response(results if several else results[0])


async def stream(front: Front, generation: Generation, params: GenerationParams) -> AsyncIterator[str]:
    """Events of a native stream."""
    plain: dict[int, Callable[[str], str]] = {}
    """Events of slots with nothing but text."""
    async for event in generation.events():
        if isinstance(event, Failed):
            yield data_event(error_body(event.code, event.message))
        elif isinstance(event, Piece) and params.n_probs <= 0 and event.timings is None:
            if event.id_slot not in plain:
                plain[event.id_slot] = data_events(partial(text_object, event.id_slot))
            yield plain[event.id_slot](event.text)
        elif isinstance(event, Piece):
            yield data_event(piece_object(front, params, event))
        elif isinstance(event, Progress):
            yield data_event(text_object(event.id_slot, "") | {"prompt_progress": event.json()})
        elif isinstance(event, Finished):
            yield data_event(final_object(front, generation, params, event) | {"content": ""})


def text_object(id_slot: int, text: str) -> dict[str, Any]:
    """A streamed chunk of nothing but text."""
    return {"content": text, "stop": False, "id_slot": id_slot, "multimodal": False}


def piece_object(front: Front, params: GenerationParams, event: Piece) -> dict[str, Any]:
    """One streamed chunk."""
    out = text_object(event.id_slot, event.text)
    if params.n_probs > 0:
        out["completion_probabilities"] = probabilities.native(front.vocab, event.probabilities)
    if event.timings is not None:
        out["timings"] = event.timings.json()
    return out


def final_object(front: Front, generation: Generation, params: GenerationParams, event: Finished) -> dict[str, Any]:
    """The whole answer (specification 10.5), or only its ``response_fields``."""
    task = generation.tasks[event.index]
    assert isinstance(task, CompletionTask)
    out = {
        "content": event.text,
        "generated_text": event.text,
        "id_slot": event.id_slot,
        "stop": True,
        "model": front.settings.alias,
        "tokens_predicted": event.n_decoded,
        "tokens_evaluated": event.n_prompt,
        "generation_settings": front.describe(task.params),
        "prompt": task.prompt,
        "truncated": event.truncated,
        "stopped_eos": event.stopped_eos,
        "stopped_word": event.stopped_word,
        "stopped_limit": event.stopped_limit,
        "stopping_word": event.stopping_word,
        "tokens_cached": event.n_past,
        "timings": event.timings.json(),
    }
    if params.n_probs > 0:
        out["completion_probabilities"] = probabilities.native(front.vocab, event.probabilities)
    return selected(out, params.response_fields) if params.response_fields else out


def selected(answer: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """Parts of an answer by their paths (``timings/predicted_n``), under their last name; unknown ones are left out."""
    found: dict[str, Any] = {}
    for path in fields:
        value: Any = answer
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            found[path.rpartition("/")[2]] = value
    return found


async def tokenize(request: Request) -> Response:
    """POST /tokenize. With ``prompt`` instead of ``content`` in the form of vLLM's server."""
    front = front_of(request)
    body = await read_body(request, front.settings)
    as_vllm = "prompt" in body and "content" not in body
    content = body["prompt"] if as_vllm else body.get("content", "")
    items = content if isinstance(content, list) else [content]
    if not all(isinstance(item, str) or is_token(item) for item in items) or is_token(content):
        raise bad_request('"content" must be a string or an array of strings and token ids')
    add_special = flag(body, "add_special_tokens", True) if as_vllm else flag(body, "add_special")
    parse_special = flag(body, "parse_special", True)
    tokens = await aside(request, join_tokens, items, front.vocab, add_special=add_special, parse_special=parse_special)
    if flag(body, "with_pieces"):
        return json_response({"tokens": [{"id": token, "piece": piece(front, token)} for token in tokens]})
    more = {"count": len(tokens), "max_model_len": front.n_ctx} if as_vllm else {}
    return json_response({"tokens": tokens, **more})


def piece(front: Front, token: int) -> str | list[int]:
    """Text of a token, or its bytes where they are no text."""
    data = front.vocab.token_to_piece(token, special=True)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)


async def detokenize(request: Request) -> Response:
    """POST /detokenize. The text is ``content`` for clients of llama.cpp's server, ``prompt`` for those of vLLM's."""
    front = front_of(request)
    body = await read_body(request, front.settings)
    tokens = body.get("tokens", [])
    if not isinstance(tokens, list) or not all(is_token(item) for item in tokens):
        raise bad_request('"tokens" must be an array of token ids')
    join_tokens(tokens, front.vocab, add_special=False)
    text = front.vocab.detokenize(tokens)
    return json_response({"content": text, "prompt": text})


async def tokenizer_info(request: Request) -> Response:
    """GET /tokenizer_info: special tokens and the chat template, in the form of vLLM's server."""
    front = front_of(request)
    vocab = front.vocab
    texts = {"bos_token": vocab.bos, "eos_token": vocab.eos, "pad_token": vocab.pad}
    found = {name: None if token is None else vocab.special_text(token) for name, token in texts.items()}
    return json_response(found | {"chat_template": front.template.source})
