"""Embedding routes: pooling, normalization, native and OpenAI answers (server.md#routes)."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from ikpy.engine.pooling import pool
from ikpy.server.errors import ApiError, bad_request
from ikpy.server.front import Front, check_number
from ikpy.server.http import aside, made_response, read_body
from ikpy.server.prompts import Prompt, is_batch, read_prompts
from ikpy.server.read_params import integer
from ikpy.server.routes_status import front_of
from ikpy.server.tasks import Embedded, EmbeddingTask

if TYPE_CHECKING:
    from ikpy.vocab import Vocab

Vectors = NDArray[np.float32]
TOO_LARGE = "input is too large to process. increase the physical batch size"
NOT_OPENAI = "Pooling type 'none' is not OAI compatible. Please use a different pooling type"
NEEDS_POOLING = "Pooling type 'none' gives no vector for a text. Start the server with `--pooling mean`"
MOST_NUMBERS = 16 << 20
"""Numbers of the states of all texts of a request; each takes about 60 bytes while the answer is made."""
L2 = 2


async def embedding(request: Request) -> Response:
    """POST /embedding and /embeddings."""
    return await native_answer(request, *await need_embeddings(request))


async def native_answer(request: Request, front: Front, body: dict[str, Any]) -> Response:
    """Embeddings in the form of llama.cpp."""
    found, normalize = await embed(request, front, texts_of(body)), integer(body, "embd_normalize", L2)

    def answer() -> list[dict[str, Any]]:
        return [
            {"index": event.index, "embedding": vectors_of(front, event, normalize).astype(float).tolist()}
            for event in found
        ]

    return await made_response(n_numbers(front, found), answer)


async def v1_embeddings(request: Request) -> Response:
    """POST /v1/embeddings; a request with ``content`` in place of ``input`` is one of llama.cpp's."""
    front, body = await need_embeddings(request)
    if front.settings.pooling == "none":
        raise bad_request(NOT_OPENAI)
    if "input" not in body and "content" in body:
        return await native_answer(request, front, body)
    encoding = body.get("encoding_format") or "float"
    if encoding not in ("float", "base64"):
        raise bad_request("The format to return the embeddings in. Can be either float or base64")
    normalize, n_first = integer(body, "embd_normalize", L2), read_dimensions(body, front)
    found = await embed(request, front, texts_of(body))
    n_tokens = sum(event.n_tokens for event in found)
    model = body.get("model")

    def answer() -> dict[str, Any]:
        vectors = [vectors_of(front, event, normalize, n_first)[0] for event in found]
        data = [
            {"embedding": encoded(vector, encoding), "index": i, "object": "embedding"}
            | ({"encoding_format": "base64"} if encoding == "base64" else {})
            for i, vector in enumerate(vectors)
        ]
        return {
            "model": model if isinstance(model, str) and model else front.settings.alias,
            "object": "list",
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
            "data": data,
        }

    return await made_response(n_numbers(front, found), answer)


def n_numbers(front: Front, found: Sequence[Embedded]) -> int:
    """Numbers of the vectors that an answer shows."""
    n_vectors = sum(len(event.vectors) for event in found) if front.settings.pooling == "none" else len(found)
    return n_vectors * front.model.hparams.n_embd


def encoded(vector: NDArray[np.float32], encoding: str) -> Any:
    """A vector as a list of numbers, or as base64 of its little-endian float32 values."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.astype(float).tolist()


async def need_embeddings(request: Request) -> tuple[Front, dict[str, Any]]:
    """Front and body of a request for embeddings. Raises ApiError 501 when they are off."""
    front = front_of(request)
    if not front.settings.embeddings:
        raise ApiError(501, "This server does not support embeddings. Start it with `--embeddings`")
    return front, await read_body(request, front.settings)


def check_pooling(front: Front) -> str:
    """How states are pooled. Raises ApiError 400 if they are not."""
    if front.settings.pooling == "none":
        raise bad_request(NEEDS_POOLING)
    return front.settings.pooling


def texts_of(body: dict[str, Any]) -> Any:
    """Field ``input`` or ``content``."""
    value = body["input"] if "input" in body else body.get("content")
    if value is None:
        raise bad_request('"input" or "content" must be provided')
    return value


async def embed(request: Request, front: Front, value: Any, *, cut: bool = False) -> list[Embedded]:
    """Vectors of every text (a string, token ids, or a list of them); ``cut``: of the beginnings of those that are too
    long. Raises ApiError 400 for texts that are too long, too many, or have too many states without pooling."""
    if await aside(request, is_batch, value):
        check_number(len(value))  # before all of them are tokenized
    prompts = await aside(request, read_prompts, value, front.vocab)
    prompts = [await front.seen(prompt, request, may_exceed=True) for prompt in prompts]
    n_most = min(front.engine.context.n_ubatch, front.n_ctx_slot)
    if cut:
        prompts = [replace(prompt, tokens=beginning(prompt.tokens, n_most, front.vocab)) for prompt in prompts]
    if max(len(prompt.tokens) for prompt in prompts) > n_most:
        raise bad_request(TOO_LARGE)
    check_states(front, prompts)
    generation = front.generation()
    make = partial(EmbeddingTask, pool=partial(pooled, front))
    generation.submit([make(p.tokens, generation.sink, i, p.shown, media=p.media) for i, p in enumerate(prompts)])
    return await generation.results(request)


def check_states(front: Front, prompts: Sequence[Prompt]) -> None:
    """Raises ApiError 400 if the states of all tokens are wanted and of several texts too many. One text has no more
    than a micro-batch."""
    n_tokens = sum(len(prompt.tokens) for prompt in prompts)
    n_most = MOST_NUMBERS // front.model.hparams.n_embd
    if front.settings.pooling == "none" and len(prompts) > 1 and n_tokens > n_most:
        raise bad_request(f"states of {n_tokens} tokens are too many for several texts: at most {n_most}")


def beginning(tokens: list[int], n: int, vocab: Vocab) -> list[int]:
    """At most n tokens of a text, with the special token at its end if it has one."""
    if len(tokens) <= n:
        return tokens
    end = tokens[-1:] if tokens[-1] in (vocab.eos, vocab.sep) else []
    return tokens[: n - len(end)] + end


def read_dimensions(body: dict[str, Any], front: Front) -> int | None:
    """Field ``dimensions``: how many values a vector should have. Raises ApiError 400."""
    n, n_embd = body.get("dimensions"), front.model.hparams.n_embd
    if n is None:
        return None
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= n_embd:
        raise bad_request(f"dimensions must be between 1 and {n_embd}")
    return n


def pooled(front: Front, states: Vectors) -> Vectors:
    """Vectors [1, n_embd] of a text from hidden states [n_tokens, n_embd], or scores of a classification head
    [1, n_classes]; without pooling all states as they are."""
    pooling = front.settings.pooling
    arch = front.model.arch
    found = pool(states, pooling, arch.classifier, arch.projection)
    return found if pooling == "none" else found[None]


def vectors_of(front: Front, event: Embedded, normalize: int, n_first: int | None = None) -> Vectors:
    """Vectors of a text as answers show them: normalized, if they are neither scores nor states of tokens.

    ``n_first``: so many values, for models whose first ones are embeddings themselves.
    """
    if front.settings.pooling in ("none", "rank"):
        return event.vectors
    return normalized(event.vectors[0, :n_first], normalize)[None]


def normalized(vector: Vectors, kind: int) -> Vectors:
    """kind < 0: unchanged; 0: largest absolute value 32760; 2: Euclidean norm 1; n: n-norm 1."""
    if kind < 0:
        return vector
    x = vector.astype(np.float64)
    size = np.abs(x)
    largest = float(size.max())
    if largest == 0:
        return np.zeros_like(vector)
    # Relative to the largest value, so that no power overflows.
    norm = largest / 32760.0 if kind == 0 else largest * float(((size / largest) ** kind).sum() ** (1.0 / kind))
    return (x / norm).astype(np.float32)
