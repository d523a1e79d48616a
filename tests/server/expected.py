"""What ikpy should answer where it deliberately differs from the recorded program, with the reasons."""

from __future__ import annotations

import copy
import json
import math
import re
from typing import Any

Capture = dict[str, Any]

JSON_ERRORS = re.compile(r"^\[json\.exception|^vector::|^ik_llama\.cpp does not|cannot get value|^invalid adapter id")
WRONG_METHOD = frozenset({"140-completion-get", "143-method-put", "144-method-delete", "305-get-embedding"})
CHAT_PATHS = (
    "/v1/chat/completions",
    "/chat/completions",
    "/apply-template",
    "/v1/messages",
    "/v1/responses",
    "/responses",
)
PLAIN = "llama-server -m MODEL -t 1 -c 2048 -np 2 --metrics --slot-save-path slots/"
TEXTS = frozenset({"content", "generated_text", "text", "arguments"})
LIMITS = ("max_tokens", "max_completion_tokens", "n_predict", "max_output_tokens")

STATUS_ONLY = {
    "007-props-post": (501, "POST /props is there, behind --props"),
    "020-tokenize-no-parse-special": (200, "parse_special works"),
    "022-tokenize-pieces": (200, "with_pieces works"),
    "304-get-v1-models-MODEL": (200, "a model has an entry of its own"),
    "030-detokenize-partial-utf8": (200, "incomplete characters are replaced"),
    "052-completion-grammar-bad": (400, "an unparsable grammar is an error"),
    "053-completion-grammar-no-root": (400, "an unparsable grammar is an error"),
    "055-completion-json-schema-and-grammar": (400, "grammar and json_schema exclude each other"),
    "115-completion-return-progress-stream": (200, "return_progress works"),
    "235-chat-return-progress": (200, "return_progress works"),
    "418-jinja-chat-return-progress": (200, "return_progress works"),
    "113-completion-response-fields": (200, "response_fields works"),
    "094-completion-return-tokens": (200, "return_tokens works"),
    "125-completion-n-2": (200, "n works"),
    "154-v1-completions-n2": (200, "n works"),
    "155-v1-completions-echo": (200, "echo works"),
    "160-v1-completions-array-prompt": (200, "the OpenAI form has a choice for every prompt, not a list of answers"),
    "217-chat-n2": (200, "n works"),
    "400-jinja-chat-n2": (200, "n works"),
    "474-puppet-no-tools-bad_utf8": (200, "invalid bytes are replaced"),
    "512-puppet-completion-bad_utf8": (200, "invalid bytes are replaced"),
    "513-puppet-v1-completions-bad_utf8": (200, "invalid bytes are replaced"),
    "522-puppet-completion-n-probs-utf8": (200, "incomplete characters are replaced"),
    "091-completion-n-predict-0-stream": (200, "n_predict 0 evaluates the prompt only"),
    "299-get-api-tags": (200, "Ollama probe"),
    "300-get-api-show": (405, "an Ollama route, but for POST"),
    "004-v1-health": (200, "same as /health"),
    "529-puppet-no-tools-utf8_split-stream": (200, "the role always comes first"),
    "530-puppet-no-tools-bad_utf8-stream": (200, "invalid bytes are replaced, the text is sent"),
    "642-puppet-messages-utf8_split-stream": (200, "message_start always comes first"),
    "643-puppet-responses-utf8_split-stream": (200, "response.created always comes first"),
    "578-puppet-completion-n-probs-utf8-stream": (200, "probabilities of every token are sent"),
    "550-puppet-stop-inside-stream": (200, "no part of a stop string is sent"),
    "551-puppet-stop-across-pieces-stream": (200, "no part of a stop string is sent"),
    "552-puppet-stop-not-found-stream": (200, "text that may be a stop string waits"),
    "637-puppet-messages-stop-sequences-stream": (200, "no part of a stop string is sent"),
    "538-puppet-tools-auto-tool_unknown-stream": (200, "another number of blanks that the grammar allows"),
    "539-puppet-tools-auto-tool_badjson-stream": (200, "another number of blanks that the grammar allows"),
    "501-puppet-think-budget-0": (200, "the limit of reasoning works"),
    "502-puppet-think-budget-2": (200, "the limit of reasoning works"),
    "557-puppet-think-budget-0-stream": (200, "the limit of reasoning works"),
    "558-puppet-think-budget-2-stream": (200, "the limit of reasoning works"),
    "543-puppet-tools-required-text_then_tool-stream": (200, "a required call comes alone"),
    "544-puppet-tools-required-think_tool-stream": (200, "a required call comes alone"),
    "387-jinja-chat-json-object-schema": (200, "the schema always holds"),
    "388-jinja-chat-json-schema": (200, "the schema always holds"),
    "389-jinja-chat-json-schema-stream": (200, "the schema always holds"),
    "210-chat-json-schema-field": (200, "blanks behind the value follow the converter's own rule"),
    "393-jinja-chat-json-schema-field": (200, "blanks behind the value follow the converter's own rule"),
    "204-chat-json-object-schema": (200, "the schema always holds"),
    "205-chat-json-schema": (200, "the schema always holds"),
    "206-chat-json-schema-stream": (200, "the schema always holds"),
    "487-puppet-tools-required-text_then_tool": (200, "a required call comes alone"),
    "488-puppet-tools-required-think_tool": (200, "a required call comes alone"),
    "071-completion-timings-per-token": (200, "the timings are in every chunk"),
    "324-slots-after": (200, "values of earlier requests"),
    "334-slots-fail-on-no-slot-idle": (200, "values of earlier requests"),
    "325-slots-list-after": (200, "earlier requests stay cached"),
    "014-root": (200, "another page"),
    "015-root-gzip": (200, "another page"),
    "749-key-none-root": (200, "another page"),
    "333-metrics-after": (200, "numbers of earlier requests"),
    "682-emb-mean-v1-dimensions": (200, "embeddings have the dimensions asked for"),
    "462-jinja-slot-save-off": (501, "a disabled feature"),
    **{name: (200, "a full context ends the answer, with its text") for name in (
        "120-completion-wrong-type-n-predict", "132-completion-fill-context", "244-messages-no-max-tokens",
        "427-jinja-messages-no-max-tokens", "656-puppet-fill-context-off", "657-puppet-fill-context-off-stream",
        "658-puppet-fill-context-off-n-keep", "660-puppet-exact-fit-off", "661-puppet-fill-context-chat-off",
        "662-puppet-fill-context-no", "663-puppet-fill-context-no-stream", "664-puppet-fill-context-no-n-keep",
        "666-puppet-exact-fit-no", "667-puppet-fill-context-chat-no", "761-completion-no-context-shift-fill")},
    **{f"{n}-rerank-{x}": (501, "needs --embeddings") for n, x in
       ((288, "rerank"), (289, "reranking"), (290, "v1-rerank"), (291, "v1-reranking"))},
    **{f"{n}-infill-{x}": (501, "the model has no fill-in-the-middle tokens") for n, x in
       ((278, "plain"), (279, "missing-prefix"), (280, "missing-suffix"), (281, "extra"), (282, "stream"),
        (283, "empty"), (284, "wrong-type"))},
}  # fmt: skip
"""Cases of which only the status is compared; the behaviour has its own tests."""

SHAPE_ONLY = {
    "046-completion-stop-string": "stop may be a string",
    "054-completion-json-schema": "another but equivalent grammar text",
    "090-completion-n-predict-0": "n_predict 0 evaluates the prompt only",
    "163-v1-completions-max-tokens-0": "max_tokens 0 evaluates the prompt only",
    "114-completion-t-max-predict-ms": "the time limit works",
    "482-puppet-tools-auto-tool_unknown": "another number of blanks that the grammar allows",
    "483-puppet-tools-auto-tool_badjson": "another number of blanks that the grammar allows",
    "492-puppet-tools-auto-tool-logprobs": "nothing of a call that a limit cuts off is text",
    "170-v1-completions-response-format": "text",
    "310-completion-after-restore": "slot memory",
    "345-slot-state-10-no-samplers-field": "slot memory",
    "348-slot-state-13-no-ignore-eos": "slot memory",
    "349-slot-state-14-grammar": "slot memory",
    "350-slot-state-15-no-grammar": "slot memory",
    "352-slot-state-17-completion-after-chat": "slot memory",
    "337-slot-state-2-no-stop-field": "slot memory",
    "338-slot-state-3-stop-as-string": "slot memory",
    "342-slot-state-7-no-logit-bias-field": "slot memory",
    "351-slot-state-16-chat": "template of the model",
    "386-jinja-chat-json-object": "the schema always holds",
    "392-jinja-chat-json-schema-missing": "the schema always holds",
    "203-chat-json-object": "the schema always holds",
    "209-chat-json-schema-missing": "the schema always holds",
    "520-puppet-completion-sentence-limit": "slot memory",
    "576-puppet-completion-sentence-limit-stream": "slot memory",
    "647-puppet-too-long-default": "slot memory",
    "648-puppet-exact-fit-default": "slot memory",
    "653-puppet-too-long-on": "slot memory",
    "654-puppet-exact-fit-on": "slot memory",
    "683-emb-mean-normalize-off": "the recorded mean is twice the mean of the hidden states",
    "710-emb-none-one-token": "one token alone has other values in the recorded program",
    "733-emb-default-one-token": "one token alone has other values in the recorded program",
    "687-emb-mean-one-token": "one token alone has other values in the recorded program",
    "686-emb-mean-v1-empty": "one token alone has other values in the recorded program",
    "688-emb-mean-two-with-empty": "one token alone has other values in the recorded program",
    "711-emb-none-two-with-empty": "one token alone has other values in the recorded program",
    "734-emb-default-two-with-empty": "one token alone has other values in the recorded program",
}
"""Cases of which names, order and types of fields are compared, but no values."""

OWN_METRICS = (
    "# HELP llamacpp:prompt_tokens_cached_total Prompt tokens that were not evaluated again.",
    "# TYPE llamacpp:prompt_tokens_cached_total counter",
    "llamacpp:prompt_tokens_cached_total 0",
    "# HELP llamacpp:n_decode_total Batches evaluated.",
    "# TYPE llamacpp:n_decode_total counter",
    "llamacpp:n_decode_total 0",
    "# HELP llamacpp:n_tokens_max Tokens of the longest text of a slot so far.",
    "# TYPE llamacpp:n_tokens_max counter",
    "llamacpp:n_tokens_max 0",
    "# HELP llamacpp:n_busy_slots_per_decode Slots in a batch, on average.",
    "# TYPE llamacpp:n_busy_slots_per_decode gauge",
    "llamacpp:n_busy_slots_per_decode 0",
    "# HELP llamacpp:spec_decode_num_drafts_total Drafts judged.",
    "# TYPE llamacpp:spec_decode_num_drafts_total counter",
    "llamacpp:spec_decode_num_drafts_total 0",
    "# HELP llamacpp:spec_decode_num_draft_tokens_total Drafted tokens.",
    "# TYPE llamacpp:spec_decode_num_draft_tokens_total counter",
    "llamacpp:spec_decode_num_draft_tokens_total 0",
    "# HELP llamacpp:spec_decode_num_accepted_tokens_total Drafted tokens that held.",
    "# TYPE llamacpp:spec_decode_num_accepted_tokens_total counter",
    "llamacpp:spec_decode_num_accepted_tokens_total 0",
    "# HELP ikpy:prompt_cache_bytes Saved texts in host memory.",
    "# TYPE ikpy:prompt_cache_bytes gauge",
    "ikpy:prompt_cache_bytes 0",
    "# HELP ikpy:prompt_cache_hits_total Requests that used a saved text.",
    "# TYPE ikpy:prompt_cache_hits_total counter",
    "ikpy:prompt_cache_hits_total 0",
)
"""Metrics the recorded program does not have."""

STOP_SEQUENCES = {
    "243-messages-stop-sequences": ",",
    "426-jinja-messages-stop-sequences": ",",
    "632-puppet-messages-stop-sequences": "STOP",
}
"""Stop sequences that end answers of /v1/messages, which name them as Anthropic's do."""

RANDOM_TEXT = re.compile(
    r"^(040|043|044|06[2346]|09[5-9]|10[0-9]|121|123|165|22[4]|407|252|435|344|690|713|736|739|740|759|760|76[4567]|689)-"
)
"""Sampled text, texts under penalties (which see the documented window here), or of another chat template."""


def counterpart(capture: Capture, captures: dict[str, Capture]) -> Capture:
    """A chat capture without --jinja: here the model's own template is always used, so the jinja capture counts."""
    if capture["server"] != PLAIN or capture["path"] not in CHAT_PATHS:
        return capture
    name = capture["name"].partition("-")[2]
    return next((c for c in captures.values() if c["name"].partition("-")[2] == f"jinja-{name}"), capture)


def expected(capture: Capture, captures: dict[str, Capture]) -> Capture:
    """The capture as ikpy should answer it."""
    want = copy.deepcopy(counterpart(capture, captures))
    if want.get("status") is None:
        want["status"] = 400
        want["response"] = {"error": {"code": 400, "message": "", "type": "invalid_request_error"}}
    if capture["name"] in WRONG_METHOD:
        want["status"] = 405
        want["response"] = {"error": {"code": 405, "message": "Method Not Allowed", "type": "invalid_request_error"}}
    if want["status"] == 500:
        want["status"] = 400
    for error in find(want, "error"):
        if isinstance(error, dict) and error.get("code") == 500:
            error.update(code=400, type="invalid_request_error")
    request = capture.get("request")
    limit_reasons(want, request if isinstance(request, dict) else {})
    for key in ("response", "events"):
        if key in want:
            want[key] = with_probabilities(want[key])
    if capture["path"] == "/v1/completions":
        add_lists(want)
    if capture["path"] in ("/v1/responses", "/responses"):
        add_places(want)
    renamed(want)
    share_of_a_slot(want)
    if capture["name"] in STOP_SEQUENCES:
        want["response"].update(stop_reason="stop_sequence", stop_sequence=STOP_SEQUENCES[capture["name"]])
    return want


def share_of_a_slot(want: Capture) -> None:
    """Lists of models say what one request may have, which the recorded program does not divide by its slots."""
    slots = re.search(r" -np (\d+)", want["server"])
    n_slots = int(slots[1]) if slots else 1
    for entry in find_parents(want.get("response"), "max_model_len"):
        entry["max_model_len"] //= n_slots
    for entry in find_parents(want.get("response"), "context_window"):
        n_ctx = entry["context_window"] // n_slots
        entry.update(context_window=n_ctx, max_context_window=n_ctx, auto_compact_token_limit=n_ctx * 9 // 10)
        entry["truncation_policy"]["limit"] = n_ctx


def renamed(want: Capture) -> None:
    """Small fields: no prompt or stop string of an earlier request, the alias as default model, the order of biases."""
    for prompts in find_parents(want, "prompt"):
        if prompts["prompt"] == "x" and "PUPPET" not in want["server"] and "generation_settings" in prompts:
            prompts["prompt"] = None
    response = want.get("response")
    if isinstance(response, dict) and response.get("model") == "gpt-3.5-turbo-0613":
        response["model"] = "MODEL"
    if want["name"] == "354-jinja-props":
        del response["chat_template_tool_use"]  # type: ignore[index]
    if want["path"] == "/detokenize" and isinstance(response, dict) and "content" in response:
        response["prompt"] = response["content"]
    if want["name"] == "010-metrics-fresh":
        want["response_text"] += "\n".join(OWN_METRICS) + "\n"
    if want["name"] == "058-completion-logit-bias-false":
        response["generation_settings"]["logit_bias"].reverse()  # type: ignore[index]
    if want["name"] in ("523-puppet-completion-banned-string", "579-puppet-completion-banned-string-stream"):
        for settings in find(want, "generation_settings"):
            settings["stop"] = []
    if want["name"] in (
        "129-completion-n-probs-negative",
        "138-completion-text-plain",
        "139-completion-no-content-type",
        "306-completion-before-save",
    ):
        response["generation_settings"]["dry_sequence_breakers"] = ["\n", ":", '"', "*"]  # type: ignore[index]


def find(value: Any, key: str) -> list[Any]:
    """Values of a field, however deep."""
    return [parent[key] for parent in find_parents(value, key)]


def find_parents(value: Any, key: str) -> list[dict[str, Any]]:
    """Objects that have a field."""
    found = []
    if isinstance(value, dict):
        found = [value] if key in value else []
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            found += find_parents(item, key)
    return found


def limit_reasons(want: Capture, request: dict[str, Any]) -> None:
    """An answer that reached its limit says so."""
    limit = next((request[name] for name in LIMITS if isinstance(request.get(name), int)), None)
    counts = [*find(want, "completion_tokens"), *find(want, "output_tokens"), *find(want, "predicted_n")]
    if want["name"].startswith("766-"):
        limit = 5
    if limit is None or not counts or max(counts) != limit:
        return
    for choice in find_parents(want, "finish_reason"):
        if choice["finish_reason"] is not None:
            choice["finish_reason"] = "length"
    for message in find_parents(want, "stop_reason"):
        if message["stop_reason"] is not None:
            message["stop_reason"] = "max_tokens"
    incomplete(want)


def incomplete(want: Capture) -> None:
    """A response that reached its limit, as OpenAI's."""
    for event in want.get("events") or ():
        if event.get("event") == "response.completed":
            event["event"] = event["data"]["type"] = "response.incomplete"
        if event.get("event") == "response.output_item.done":
            event["data"]["item"]["status"] = "incomplete"
    for response in find_parents(want, "status"):
        if response.get("object") == "response" and response["status"] == "completed":
            fields = dict(response)
            response.clear()
            for key, value in fields.items():
                response[key] = value
                if key == "status":
                    response.update(status="incomplete", incomplete_details={"reason": "max_output_tokens"})
            response["output"][-1]["status"] = "incomplete"
            if "completed_at" in response:
                response["completed_at"] = None


def with_probabilities(value: Any) -> Any:
    """Recorded probabilities turned into those of the full softmax.

    The recorded program divides by 2 S - T instead of S, where S is the sum over the vocabulary and T the part of the
    tokens it shows: p = q / (1 + sum of q) * 2, with q the recorded values.
    """
    if isinstance(value, list):
        return [with_probabilities(item) for item in value]
    if not isinstance(value, dict):
        return value
    out = {key: with_probabilities(item) for key, item in value.items()}
    if "probs" in out:
        total = sum(item["prob"] for item in out["probs"])
        for item in out["probs"]:
            item["prob"] = 2 * item["prob"] / (1 + total)
    if "top_logprobs" in out:
        total = sum(math.exp(item["logprob"]) for item in out["top_logprobs"])
        for item in [out, *out["top_logprobs"]]:
            item["logprob"] += math.log(2 / (1 + total))
    return out


def add_lists(want: Capture) -> None:
    """The lists of OpenAI's /v1/completions behind the recorded array of log probabilities."""
    start = 0
    for logprobs in find([want.get("response"), want.get("events")], "logprobs"):
        if logprobs is None:
            continue
        content = logprobs["content"]
        logprobs["tokens"] = [item["token"] for item in content]
        logprobs["token_logprobs"] = [item["logprob"] for item in content]
        logprobs["top_logprobs"] = [{top["token"]: top["logprob"] for top in item["top_logprobs"]} for item in content]
        logprobs["text_offset"] = []
        for item in content:
            logprobs["text_offset"].append(start)
            start += len(item["token"])


TEXT_EVENTS = frozenset({"response.output_text.delta", "response.output_text.done"})


def add_places(want: Capture) -> None:
    """What events of /v1/responses say of their place, without which OpenAI's client cannot follow a stream."""
    for item in find_parents([want.get("response"), want.get("events")], "call_id"):
        item["id"] = item["call_id"]
    events = want.get("events") or []
    at, items = -1, [event["data"] for event in events if event["event"] == "response.output_item.done"]
    for number, event in enumerate(events):
        name, data = event["event"], event["data"]
        if name in ("response.created", "response.in_progress"):
            data["response"].update(created_at=0, model=events[-1]["data"]["response"]["model"], output=[])
        at += name == "response.output_item.added"
        if name == "response.output_item.done":
            data["output_index"] = items.index(data)
        elif "item" in data or "item_id" in data:
            data["output_index"] = at
            if name.endswith(".done"):
                data["output_index"] = next(i for i, done in enumerate(items) if done["item"]["type"] == "message")
        if "output_index" in data and "item" not in data and "function_call" not in name:
            data["content_index"] = 0
        if name in TEXT_EVENTS:
            data["logprobs"] = []
        data["sequence_number"] = number


def free_fields(capture: Capture) -> frozenset[str]:
    """Fields whose values may differ: slot numbers and cache use depend on requests that are not recorded."""
    free = {"id_slot", "prompt_n", "cached_tokens", "cache_read_input_tokens", "input_tokens", "n_params", "size"}
    if re.match("068|069|070|117", capture["name"]):
        free -= {"id_slot"} if capture["name"].startswith("117") else {"id_slot", "prompt_n", "cached_tokens"}
    if re.match("649|655", capture["name"]):
        free |= {"n_past"}  # n_keep of an earlier request
    if RANDOM_TEXT.match(capture["name"]):
        free |= TEXTS | {
            "prompt_tokens",
            "total_tokens",
            "tokens_evaluated",
            "tok_str",
            "prob",
            "n_past",
            "tokens_cached",
            "predicted_n",
            "tokens_predicted",
        }
    response = json.dumps(capture.get("response"))
    message = re.search(r'"message": "((?:[^"\\]|\\.)*)', response)
    if capture.get("status") is None or (message and JSON_ERRORS.search(json.loads(f'"{message[1]}"'))):
        free |= {"message"}
    if capture["path"].startswith("/slots") and capture["method"] == "POST":
        free |= {"n_saved", "n_erased", "n_restored"}
    if capture["path"] == "/list":
        free |= {"token_count", "prompt"}
    return frozenset(free)
