"""Native routes: completion, tokenize, detokenize, apply-template."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ikpy.engine.grammars.gbnf import GrammarError
from ikpy.server import probabilities
from ikpy.server.errors import bad_request, error_body
from ikpy.server.front import Front, check_number, check_repeated
from ikpy.server.generation import Generation
from ikpy.server.http import (
    EventStream,
    aside,
    data_event,
    encoded_size,
    json_response,
    made_event,
    made_response,
    read_body,
)
from ikpy.server.params import GenerationParams
from ikpy.server.prompts import Prompt, check_tokens, is_batch, is_token, join_tokens, read_prompts
from ikpy.server.read_params import flag
from ikpy.server.routes_status import front_of
from ikpy.server.tasks import CompletionTask, Failed, Finished, Piece, Progress

LONGEST_TEXT = 16 << 20
"""Bytes of a text that is put together from tokens; one with two digits may stand for a hundred bytes."""
MOST_PIECES = 1_000_000
"""Tokens that are answered one by one with their texts; each takes about 400 bytes meanwhile."""
N_FIELDS = 80
"""Values of a whole answer that does not depend on the request."""


async def completion(request: Request) -> Response:
    """POST /completion and /completions."""
    front = front_of(request)
    body = await read_body(request, front.settings)
    if "prompt" not in body:
        raise bad_request('"prompt" is required')
    params = await aside(request, front.read_params, body)
    several = await aside(request, is_batch, body["prompt"])
    if several:
        check_number(len(body["prompt"]) * params.n)  # before all of them are tokenized
    prompts = await aside(request, read_prompts, body["prompt"], front.vocab)
    prompts = [await front.seen(prompt, request) for prompt in prompts]
    return await answer_prompts(request, front, prompts, params, several=several)


async def answer_prompts(
    request: Request, front: Front, prompts: Sequence[Prompt], params: GenerationParams, *, several: bool
) -> Response:
    """Answers to prompts in the native form, a list of them for ``several`` or more than one each. Raises ApiError."""
    await aside(request, check_answers, front, prompts, params)
    generation = await front.start(prompts, params, request)
    if params.stream:
        await generation.first(request)
        return EventStream(stream(front, generation, params), generation.cancel, ping=front.settings.ping_interval)
    results = await generation.results(request)

    def answer() -> Any:
        objects = [final_object(front, generation, params, item) for item in results]
        return objects if several or params.n > 1 else objects[0]

    return await made_response(sum(n_final_values(generation, item) for item in results), answer)


def check_answers(front: Front, prompts: Sequence[Prompt], params: GenerationParams) -> None:
    """Raises ApiError 400 if several answers would repeat too much of a request, or for a schema that cannot be used.

    One alone repeats no more than the body has.
    """
    n_answers = len(prompts) * params.n
    check_number(n_answers)
    if n_answers == 1:
        return
    try:
        settings = encoded_size([front.describe(params)])
    except GrammarError as error:
        raise bad_request(str(error)) from None
    check_repeated(n_answers * settings + params.n * encoded_size(prompt.shown for prompt in prompts))


def n_final_values(generation: Generation, event: Finished) -> int:
    """About how many values the whole answer has."""
    task = generation.tasks[event.index]
    assert isinstance(task, CompletionTask)
    params, prompt = task.params, task.prompt
    n = len(params.penalty_prompt or ()) + len(params.sampling.logit_bias) + len(params.stop)
    shown = len(prompt) if isinstance(prompt, list) else 0
    n += len(event.tokens) if params.return_tokens else 0
    return N_FIELDS + n + shown + n_probability_values(event, params)


def n_probability_values(event: Piece | Finished, params: GenerationParams) -> int:
    """About how many values the probabilities of an event have."""
    return len(event.probabilities) * (1 + max(0, params.n_probs)) * (2 + probabilities.N_ENTRY)


async def stream(front: Front, generation: Generation, params: GenerationParams) -> AsyncIterator[str]:
    """Events of a native stream."""
    async for event in generation.events():
        if isinstance(event, Failed):
            yield data_event(error_body(event.code, event.message))
        elif isinstance(event, Piece):
            yield await made_event(n_probability_values(event, params), partial(piece_object, front, params, event))
        elif isinstance(event, Progress):
            yield data_event(chunk_object(event, "", 0) | {"prompt_progress": event.json()})
        elif isinstance(event, Finished):
            last = partial(last_object, front, generation, params, event)
            yield await made_event(n_final_values(generation, event), last)


def chunk_object(event: Piece | Progress, text: str, n_decoded: int, tokens: Sequence[int] = ()) -> dict[str, Any]:
    """What every streamed chunk has. ``n_decoded``: tokens of the answer so far."""
    return {
        "index": event.index,
        "content": text,
        "tokens": list(tokens),
        "stop": False,
        "id_slot": event.id_slot,
        "multimodal": False,
        "tokens_predicted": n_decoded,
        "tokens_evaluated": event.n_prompt,
    }


def piece_object(front: Front, params: GenerationParams, event: Piece) -> dict[str, Any]:
    """One streamed chunk."""
    out = chunk_object(event, event.text, event.n_decoded, event.tokens)
    if params.n_probs > 0:
        out["completion_probabilities"] = shown_probabilities(front, params, event)
    if event.timings is not None:
        out["timings"] = event.timings.json()
    return out


def shown_probabilities(front: Front, params: GenerationParams, event: Piece | Finished) -> list[dict[str, Any]]:
    """Array ``completion_probabilities`` of an event."""
    return probabilities.native(front.vocab, event.probabilities, post_sampling=params.post_sampling_probs)


def final_object(front: Front, generation: Generation, params: GenerationParams, event: Finished) -> dict[str, Any]:
    """The whole answer, or only its ``response_fields``."""
    task = generation.tasks[event.index]
    assert isinstance(task, CompletionTask)
    out = {
        "index": event.index,
        "content": event.text,
        "generated_text": event.text,
        "tokens": list(event.tokens) if params.return_tokens else [],
        "id_slot": event.id_slot,
        "stop": True,
        "model": front.settings.alias,
        "tokens_predicted": event.n_decoded,
        "tokens_evaluated": event.n_prompt,
        "generation_settings": front.describe(task.params),
        "prompt": task.prompt,
        "has_new_line": "\n" in event.text,
        "truncated": event.truncated,
        "stop_type": event.stop_type,
        "stopped_eos": event.stopped_eos,
        "stopped_word": event.stopped_word,
        "stopped_limit": event.stopped_limit,
        "stopping_word": event.stopping_word,
        "tokens_cached": event.n_past,
        "timings": event.timings.json(),
    }
    if params.n_probs > 0:
        out["completion_probabilities"] = shown_probabilities(front, params, event)
    return selected(out, params.response_fields) if params.response_fields else out


def last_object(front: Front, generation: Generation, params: GenerationParams, event: Finished) -> dict[str, Any]:
    """The last chunk: the whole answer without its text and tokens, which have been streamed."""
    answer = final_object(front, generation, params, event)
    return answer | {"content": ""} | ({"tokens": []} if "tokens" in answer else {})


def selected(answer: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """Parts of an answer by their paths (``timings/predicted_n``), which are their names; unknown ones are left out."""
    found: dict[str, Any] = {}
    for path in fields:
        value: Any = answer
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            found[path] = value
    return found


async def tokenize(request: Request) -> Response:
    """POST /tokenize. With ``prompt`` instead of ``content`` in the form of vLLM's server."""
    front = front_of(request)
    body = await read_body(request, front.settings)
    as_vllm = "prompt" in body and "content" not in body
    content = body["prompt"] if as_vllm else body.get("content", "")
    add_special = flag(body, "add_special_tokens", True) if as_vllm else flag(body, "add_special")
    parse_special = flag(body, "parse_special", True)
    tokens = await aside(request, content_tokens, content, front, add_special=add_special, parse_special=parse_special)
    if flag(body, "with_pieces"):
        if len(tokens) > MOST_PIECES:
            raise bad_request(f"{len(tokens)} tokens are too many for with_pieces: at most {MOST_PIECES}")
        return await made_response(
            3 * len(tokens), lambda: {"tokens": [{"id": token, "piece": piece(front, token)} for token in tokens]}
        )
    more = {"count": len(tokens), "max_model_len": front.n_ctx_slot} if as_vllm else {}
    return await made_response(len(tokens), lambda: {"tokens": tokens, **more})


def content_tokens(content: Any, front: Front, *, add_special: bool, parse_special: bool) -> list[int]:
    """Ids of a text, or of texts and ids in turn. Raises ApiError 400."""
    items = content if isinstance(content, list) else [content]
    if not all(isinstance(item, str) or is_token(item) for item in items) or is_token(content):
        raise bad_request('"content" must be a string or an array of strings and token ids')
    return join_tokens(items, front.vocab, add_special=add_special, parse_special=parse_special)


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
    text = await aside(request, token_texts, body.get("tokens", []), front)
    return json_response({"content": text, "prompt": text})


def token_texts(tokens: Any, front: Front) -> str:
    """Text of a list of token ids. Raises ApiError 400."""
    if not isinstance(tokens, list) or not all(is_token(item) for item in tokens):
        raise bad_request('"tokens" must be an array of token ids')
    n_bytes = 0
    for token in check_tokens(tokens, front.vocab):
        n_bytes += len(front.vocab.token_to_piece(token, special=True))
        if n_bytes > LONGEST_TEXT:
            raise bad_request(f"the text would be longer than {LONGEST_TEXT >> 20} MiB: divide the tokens")
    return front.vocab.detokenize(tokens)


async def tokenizer_info(request: Request) -> Response:
    """GET /tokenizer_info: special tokens and the chat template, in the form of vLLM's server."""
    front = front_of(request)
    vocab = front.vocab
    texts = {"bos_token": vocab.bos, "eos_token": vocab.eos, "pad_token": vocab.pad}
    found = {name: None if token is None else vocab.special_text(token) for name, token in texts.items()}
    return json_response(found | {"chat_template": front.template.source})
