"""The server's own description as an OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.routing import Route

import ikpy
from ikpy.server.read_params import FLAGS, FLOATS, INTEGERS

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
ANY: Schema = {}
OBJECT: Schema = {"type": "object"}


def array(items: Schema, **more: Any) -> Schema:
    """Schema of an array."""
    return {"type": "array", "items": items, **more}


def record(required: Iterable[str] = (), **fields: Schema) -> Schema:
    """Schema of an object; other fields are allowed."""
    out: Schema = {"type": "object", "properties": fields}
    return out | ({"required": list(required)} if required else {})


def either(*schemas: Schema) -> Schema:
    """Schema of one of several forms."""
    return {"anyOf": list(schemas)}


TEXTS = either(TEXT, array(TEXT))
MIXED = either(TEXT, array(INTEGER), array(either(TEXT, INTEGER)))
SEEN = record(["prompt_string"], prompt_string=TEXT, multimodal_data=array(TEXT))
"""A text with markers, and base64 of the files that they stand for."""
PROMPT = either(TEXT, array(INTEGER), array(either(TEXT, INTEGER)), SEEN)
SAMPLING: dict[str, Schema] = {
    **dict.fromkeys(FLOATS, NUMBER),
    **dict.fromkeys(INTEGERS, INTEGER),
    **dict.fromkeys(FLAGS, FLAG),
    "seed": INTEGER, "stop": TEXTS, "samplers": TEXTS, "logit_bias": either(array(array(ANY)), OBJECT),
    "grammar": TEXT, "json_schema": OBJECT, "regex": TEXT, "lark": TEXT,
    "structured_outputs": OBJECT, "stream": FLAG, "cache_prompt": FLAG,
    "n_cache_reuse": INTEGER,
    "n_predict": INTEGER, "max_tokens": INTEGER, "n_probs": INTEGER, "n_keep": INTEGER, "id_slot": INTEGER,
    "t_max_predict_ms": INTEGER, "n_indent": INTEGER, "timings_per_token": FLAG, "return_tokens": FLAG,
    "return_progress": FLAG, "response_fields": array(TEXT), "n": INTEGER, "n_cmpl": INTEGER,
    "banned_strings": TEXTS, "banned_n": INTEGER, "banned_bias": NUMBER, "rewind_count_max": INTEGER,
    "banned_regex": TEXTS, "banned_regex_case_insensitive": TEXTS, "banbuffer_size": INTEGER,
    "penalty_prompt": either(TEXT, array(INTEGER)),
}  # fmt: skip
SOUND = either(TEXT, record(data=TEXT, url=TEXT, format=TEXT))
PICTURE = either(TEXT, record(["url"], url=TEXT))
PART = either(TEXT, array(record(["type"], type=TEXT, text=TEXT, image_url=PICTURE, input_audio=SOUND)))
MESSAGES = array(record(["role", "content"], role=TEXT, content=PART), minItems=1)
OLLAMA_MESSAGES = array(record(["role", "content"], role=TEXT, content=TEXT, images=array(TEXT)), minItems=1)
TOOLS = array(record(["type", "function"], type=TEXT, function=record(["name"], name=TEXT, parameters=OBJECT)))
CHAT = record(
    ["messages"],
    messages=MESSAGES,
    tools=TOOLS,
    tool_choice=either(TEXT, OBJECT),
    response_format=OBJECT,
    logprobs=FLAG,
    top_logprobs=INTEGER,
    chat_template_kwargs=OBJECT,
    reasoning_format=TEXT,
    thinking_budget_tokens=INTEGER,
    reasoning_effort=TEXT,
    parallel_tool_calls=FLAG,
    model=TEXT,
    **SAMPLING,
)
OLLAMA = {
    "model": TEXT, "stream": FLAG, "options": OBJECT, "format": ANY, "think": ANY, "keep_alive": ANY,
    "logprobs": FLAG, "top_logprobs": INTEGER,
}  # fmt: skip
RERANK = record(
    ["query"],
    query=TEXT,
    documents=array(TEXT, minItems=1),
    texts=array(TEXT, minItems=1),
    top_n=INTEGER,
    return_documents=FLAG,
    return_text=FLAG,
    model=TEXT,
)
EMBED = record(
    input=PROMPT, content=PROMPT, embd_normalize=INTEGER, encoding_format=TEXT, dimensions=INTEGER, model=TEXT
)
EXTRA = array(record(filename=TEXT, text=TEXT))
FILE = record(["filename"], filename=TEXT)
BODIES: dict[str, tuple[str, Schema]] = {
    "/completion": ("Continue a text", record(["prompt"], prompt=PROMPT, **SAMPLING)),
    "/v1/completions": (
        "Continue a text (OpenAI)",
        record(["prompt"], prompt=PROMPT, logprobs=INTEGER, echo=FLAG, **SAMPLING),
    ),
    "/v1/chat/completions": ("Answer in a conversation (OpenAI)", CHAT),
    "/apply-template": ("Prompt of a conversation", CHAT),
    "/v1/messages": (
        "Answer in a conversation (Anthropic)",
        record(["messages"], messages=MESSAGES, system=PART, tools=array(record(["name"], name=TEXT)), **SAMPLING),
    ),
    "/v1/messages/count_tokens": ("Tokens of a conversation", record(["messages"], messages=MESSAGES, system=PART)),
    "/v1/responses": (
        "Answer (OpenAI responses)",
        record(["input"], input=either(TEXT, MESSAGES), instructions=TEXT, max_output_tokens=INTEGER, **SAMPLING),
    ),
    "/v1/chat/completions/input_tokens": ("Tokens of a conversation (OpenAI form)", CHAT),
    "/v1/responses/input_tokens": (
        "Tokens of a conversation (OpenAI responses)",
        record(["input"], input=either(TEXT, MESSAGES), instructions=TEXT),
    ),
    "/v1/audio/transcriptions": (
        "Text of a sound (OpenAI)",
        record(
            ["file"],
            file={"type": "string", "format": "binary"},
            model=TEXT,
            language=TEXT,
            prompt=TEXT,
            response_format={"enum": ["json", "text"]},
            temperature=NUMBER,
            stream=FLAG,
        ),
    ),
    "/infill": (
        "Text between two texts",
        record(input_prefix=TEXT, input_suffix=TEXT, prompt=TEXT, input_extra=EXTRA, **SAMPLING),
    ),
    "/embedding": ("Embeddings", EMBED),
    "/v1/embeddings": ("Embeddings (OpenAI)", EMBED),
    "/rerank": ("Rank documents", RERANK),
    "/tokenize": (
        "Text to token ids",
        record(
            content=MIXED, add_special=FLAG, parse_special=FLAG, with_pieces=FLAG, prompt=TEXT, add_special_tokens=FLAG
        ),
    ),
    "/detokenize": ("Token ids to text", record(["tokens"], tokens=array(INTEGER))),
    "/props": ("Change global properties, of which there are none", OBJECT),
    "/slots/{id}": ("Save, restore or erase a slot", record(filename=TEXT)),
    "/rename_prompt": ("Rename a slot file", record(old_filename=TEXT, new_filename=TEXT)),
    "/delete_prompt": ("Delete a slot file", FILE),
    "/lora-adapters": ("Scales of adapters", array(record(["id"], id=INTEGER, scale=NUMBER))),
    "/control-vectors/load": (
        "Load a control vector",
        record(["path"], path=TEXT, scale=NUMBER, layer_start=INTEGER, layer_end=INTEGER),
    ),
    "/control-vectors/apply": ("Scales of control vectors", array(record(["id"], id=INTEGER, scale=NUMBER))),
    "/control-vectors/unload": ("Unload a control vector", record(["id"], id=INTEGER)),
    "/api/chat": (
        "Answer in a conversation (Ollama)",
        record(["messages"], messages=OLLAMA_MESSAGES, tools=TOOLS, **OLLAMA),
    ),
    "/api/generate": (
        "Answer a prompt (Ollama)",
        record(["prompt"], prompt=TEXT, images=array(TEXT), system=TEXT, raw=FLAG, **OLLAMA),
    ),
    "/api/embed": (
        "Embeddings (Ollama)",
        record(["input"], input=TEXTS, model=TEXT, dimensions=INTEGER, truncate=FLAG),
    ),
    "/api/embeddings": ("Embedding of one text (Ollama)", record(["prompt"], prompt=TEXT, model=TEXT)),
    "/api/show": ("Description of the model (Ollama)", record(model=TEXT)),
}
ALIASES = {
    "/completions": "/completion",
    "/chat/completions": "/v1/chat/completions",
    "/audio/transcriptions": "/v1/audio/transcriptions",
    "/chat/completions/input_tokens": "/v1/chat/completions/input_tokens",
    "/responses": "/v1/responses",
    "/embeddings": "/embedding",
    "/reranking": "/rerank",
    "/v1/rerank": "/rerank",
    "/v1/reranking": "/rerank",
}
FORMS = {"/v1/audio/transcriptions"}
"""Paths whose bodies are forms."""
QUERIES: dict[str, list[tuple[str, Schema]]] = {
    "/slots/{id}": [("action", {"enum": ["save", "restore", "erase"]})],
    "/health": [("include_slots", TEXT), ("fail_on_no_slot", TEXT)],
    "/slots": [("fail_on_no_slot", TEXT)],
}
IDS = {"/slots/{id}": INTEGER, "/v1/models/{id}": TEXT}
ERRORS = {
    400: "the request cannot be used",
    401: "no known API key",
    404: "no such thing",
    413: "the body is too large",
    501: "not supported by this model or not switched on",
    503: "too many requests are waiting, or no slot is idle",
}
ERROR = either(
    record(
        ["error"],
        error=record(
            ["code", "message"], code=INTEGER, message=TEXT, type=TEXT, n_prompt_tokens=INTEGER, n_ctx=INTEGER
        ),
    ),
    record(["error"], error=TEXT),
)


def document(routes: Iterable[Route]) -> Schema:
    """OpenAPI 3.1 document of the routes."""
    paths: dict[str, Schema] = {}
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            path = route.path.replace(":path}", "}")
            paths.setdefault(path, {})[method.lower()] = operation(path, method)
    security = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ikpy server", "version": ikpy.__version__},
        "paths": paths,
        "components": {"schemas": {"Error": ERROR}, "securitySchemes": security},
        "security": [{}, {"bearer": []}],
    }


def operation(path: str, method: str) -> Schema:
    """One method of a path."""
    name = path.strip("/").replace("/", "-").replace("{", "").replace("}", "") or "page"
    text, body = BODIES.get(ALIASES.get(path, path), ("", OBJECT))
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    responses: Schema = {"200": {"description": "the answer"}}
    responses |= {str(code): {"description": meaning, **error} for code, meaning in ERRORS.items()}
    out: Schema = {"operationId": f"{method.lower()}-{name}", "responses": responses}
    parameters: list[Schema] = [{"name": key, "in": "query", "schema": schema} for key, schema in QUERIES.get(path, [])]
    if "{id}" in path:
        parameters.append({"name": "id", "in": "path", "required": True, "schema": IDS[path]})
    if parameters:
        out["parameters"] = parameters
    if method == "POST":
        form = "multipart/form-data" if ALIASES.get(path, path) in FORMS else "application/json"
        out["requestBody"] = {"content": {form: {"schema": body}}, "required": True}
        out["summary"] = text or "Not supported"
    return out
