"""Ranking of documents by how well they answer a query, over embeddings (Jina, Cohere and TEI forms)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ikpy.server.errors import bad_request
from ikpy.server.front import Front, check_number
from ikpy.server.http import aside, json_response
from ikpy.server.read_params import flag, integer
from ikpy.server.routes_embeddings import L2, check_pooling, embed, need_embeddings, vectors_of


async def rerank(request: Request) -> Response:
    """POST /rerank and its aliases: the score is the classification head's for the pair, or the cosine of embeddings.

    Fields: query, documents (or texts) as strings or objects with text, top_n, return_documents (return_text).
    """
    front, body = await need_embeddings(request)
    pooling = check_pooling(front)
    query = body.get("query")
    if not isinstance(query, str) or not query:
        raise bad_request('"query" must be a string that is not empty')
    name = "texts" if "texts" in body else "documents"
    texts = document_texts(body.get(name), name)
    if pooling == "rank":
        found = await embed(request, front, await aside(request, pairs, front, query, texts))
        scores = np.array([vectors_of(front, event, -1)[0, 0] for event in found], np.float64)
    else:
        found = await embed(request, front, [query, *texts])
        vectors = np.stack([vectors_of(front, event, L2)[0] for event in found]).astype(np.float64)
        scores = vectors[1:] @ vectors[0]
    order = np.argsort(-scores, kind="stable")[: max(0, integer(body, "top_n", len(texts)))]
    if name == "texts":
        shown = flag(body, "return_text")
        return json_response(
            [{"index": int(i), "score": float(scores[i])} | ({"text": texts[i]} if shown else {}) for i in order]
        )
    wanted = flag(body, "return_documents")
    results = [
        {"index": int(i), "relevance_score": float(scores[i])} | ({"document": {"text": texts[i]}} if wanted else {})
        for i in order
    ]
    n_tokens = sum(event.n_tokens for event in found)
    model = body.get("model")
    return json_response(
        {
            "model": model if isinstance(model, str) and model else front.settings.alias,
            "object": "list",
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
            "results": results,
        }
    )


def pair(front: Front, query: str, text: str) -> list[int]:
    """Tokens of query and document as one text, each with its closing special tokens; where those are not separators
    themselves (XLM-RoBERTa, of a file that does not say otherwise), one stands between them."""
    vocab = front.vocab
    second = vocab.tokenize(text, add_special=True)[int(vocab.add_bos) :]
    between = [vocab.sep] if vocab.add_sep and vocab.kind != "wpm" and vocab.sep is not None else []
    return [*vocab.tokenize(query, add_special=True), *between, *second]


def pairs(front: Front, query: str, texts: Sequence[str]) -> list[list[int]]:
    """`pair` of every text."""
    return [pair(front, query, text) for text in texts]


def document_texts(value: Any, name: str) -> list[str]:
    """Texts of documents given as strings or as objects with a field ``text``. Raises ApiError 400."""
    if not isinstance(value, list) or not value:
        raise bad_request(f'"{name}" must be an array that is not empty')
    check_number(len(value))
    found = [item.get("text") if isinstance(item, dict) else item for item in value]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) < len(found):
        raise bad_request(f'"{name}" must hold strings or objects with a string "text"')
    return texts
