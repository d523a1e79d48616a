"""Status routes: health, props, slots, models, metrics, version."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ikpy.server.chat.tool_formats import tool_format
from ikpy.server.errors import ApiError, bad_request, engine_ended
from ikpy.server.front import Front
from ikpy.server.http import json_response, made_response, parsed, read_bytes
from ikpy.server.model_entries import file_type, model_list, shown_entry
from ikpy.server.settings import BUILD
from ikpy.tools.media_marks import MARKER

VOCAB_TYPES = {"none": 0, "spm": 1, "bpe": 2, "wpm": 3, "ugm": 4, "rwkv": 5, "plamo": 6}


def front_of(request: Request) -> Front:
    """The shared state of the application."""
    return request.app.state.front


async def health(request: Request) -> Response:
    """GET /health."""
    front = front_of(request)
    if front.engine.failure is not None:
        raise engine_ended(front.engine.failure)
    idle = front.engine.n_idle
    body: dict[str, Any] = {
        "status": "ok" if idle else "no slot available",
        "slots_idle": idle,
        "slots_processing": len(front.engine.slots) - idle,
    }
    # Slots show prompts; the path itself needs no key.
    if "include_slots" in request.query_params and front.settings.slots and request.scope["known_client"]:
        body["slots"] = front.slot_status()
    return json_response(body, 503 if not idle and "fail_on_no_slot" in request.query_params else 200)


async def slots(request: Request) -> Response:
    """GET /slots."""
    front = front_of(request)
    if not front.settings.slots:
        raise ApiError(501, "This server does not support slots endpoint.")
    if "fail_on_no_slot" in request.query_params and not front.engine.n_idle:
        raise ApiError(503, "no slot available")
    return json_response(front.slot_status())


async def slots_list(request: Request) -> Response:
    """GET /slots/list: cached text of every slot."""
    front = front_of(request)
    found = [(slot.id, list(slot.tokens)) for slot in front.engine.slots]

    def answer() -> list[dict[str, Any]]:
        return [{"slot_id": i, "token_count": len(t), "prompt": front.text_of(t)} for i, t in found]

    return await made_response(sum(len(tokens) for _, tokens in found), answer)


async def props(request: Request) -> Response:
    """GET /props."""
    front = front_of(request)
    vocab, settings = front.vocab, front.settings
    shown = front.default_settings() | {"seed": -1}
    shown |= {"params": dict(shown)}  # where llama.cpp's server has them
    body = {
        "system_prompt": "",
        "model_alias": settings.alias,
        "model_ftype": file_type(front.model.metadata),
        "model_path": settings.model_path,
        "default_generation_settings": shown,
        "total_slots": settings.n_slots,
        "model_name": front.model_name,
        "chat_template": front.template.source,
        "chat_template_caps": capabilities(front),
        "bos_token": vocab.special_text(vocab.bos),
        "eos_token": vocab.special_text(vocab.eos),
        "modalities": modalities(front),
        "n_ctx": front.n_ctx,
        "cors_proxy_enabled": False,
        "endpoint_slots": settings.slots,
        "endpoint_props": settings.change_props,
        "endpoint_metrics": settings.metrics,
        "ui": settings.webui,
        "build_info": BUILD,
        "is_sleeping": False,
    }
    if front.media is not None:
        body["media_marker"] = MARKER
    if "tools" in front.tool_template.source:
        body["chat_template_tool_use"] = front.tool_template.source
    return json_response(body)


def modalities(front: Front) -> dict[str, bool]:
    """What the model understands beside text."""
    return {"vision": front.takes["image"], "video": False, "audio": front.takes["audio"]}


def capabilities(front: Front) -> dict[str, bool]:
    """What conversations may have that the template writes, in the words of llama.cpp's server."""
    template, tools = front.template, tool_format(front.tool_template.source) is not None
    return {
        "supports_object_arguments": template.wants_object_arguments,
        "supports_parallel_tool_calls": tools and front.tool_template.shows_several_calls,
        "supports_preserve_reasoning": template.shows_earlier_reasoning,
        "supports_reasoning_effort": "reasoning_effort" in template.source,
        "supports_string_content": True,  # which becomes a list of parts where the template wants one
        "supports_system_role": template.shows_system,
        "supports_tool_calls": tools,
        "supports_tools": tools,
        "supports_typed_content": template.wants_content_parts,
    }


async def change_props(request: Request) -> Response:
    """POST /props: llama-server documents no property that could be changed, so none is taken."""
    front = front_of(request)
    if not front.settings.change_props:
        raise ApiError(501, "This server does not support changing global properties. Start it with `--props`")
    content = await read_bytes(request, front.settings)
    names = await parsed(content) if content.strip() else {}
    if not isinstance(names, dict):
        raise bad_request("the request body must be a JSON object")
    if names:
        raise bad_request(f"no global property can be changed; settings belong to requests: {', '.join(names)}")
    return json_response({"success": True})


async def v1_props(request: Request) -> Response:
    """GET /v1/props: the part clients of the OpenAI API ask for."""
    front = front_of(request)
    body = {
        "model_name": front.model_name,
        "model_path": front.settings.model_path,
        "modalities": modalities(front),
        "n_ctx": front.n_ctx,
    }
    return json_response(body)


async def models(request: Request) -> Response:
    """GET /v1/models."""
    return json_response(model_list([model_entry(front_of(request))], request.headers))


async def model(request: Request) -> Response:
    """GET /v1/models/NAME."""
    front, name = front_of(request), request.path_params["id"]
    if name != front.settings.alias:
        raise ApiError(404, f"there is no model {name}; the model is {front.settings.alias}")
    return json_response(shown_entry(model_entry(front), request.headers))


def model_entry(front: Front) -> dict[str, Any]:
    """What clients of the OpenAI API see of the model."""
    hparams = front.model.hparams
    meta = {
        "vocab_type": VOCAB_TYPES[front.vocab.kind],
        "n_vocab": hparams.n_vocab,
        "n_ctx": front.n_ctx_slot,
        "n_ctx_train": hparams.n_ctx_train,
        "n_embd": hparams.n_embd,
        "n_params": front.model.n_params,
        "size": front.model.size_bytes,
        "ftype": file_type(front.model.metadata),
    }
    return {
        "id": front.settings.alias,
        "aliases": [front.settings.alias],
        "tags": [],
        "object": "model",
        "created": front.started,
        "owned_by": "llamacpp",
        "architecture": architecture(front),
        "meta": meta,
        "max_model_len": front.n_ctx_slot,
    }


def architecture(front: Front) -> dict[str, list[str]]:
    """What goes into the model and what comes out."""
    takes = [kind for kind, there in front.takes.items() if there]
    return {"input_modalities": ["text", *takes], "output_modalities": ["text"]}


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    front = front_of(request)
    if not front.settings.metrics:
        raise ApiError(501, "This server does not support metrics endpoint.")
    engine = front.engine
    text = engine.metrics.text(
        used_cells=engine.context.kv.used_cells,
        n_ctx=front.n_ctx,
        processing=len(engine.slots) - engine.n_idle,
        deferred=engine.n_deferred,
        cached_bytes=engine.prompt_cache.nbytes,
        cache_hits=engine.prompt_cache.n_hits,
    )
    headers = {"Process-Start-Time-Unix": str(front.started)}
    return Response(text, headers=headers, media_type="text/plain; version=0.0.4")


async def version(request: Request) -> Response:
    """GET /version."""
    return json_response({"version": 4, "features": {"sql": False, "zstd_compression": False}})
