"""Writes docs/server-differences.md: every recorded request whose answer ikpy deliberately gives differently.

python scripts/make_server_differences.py [--check]
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.server.additions import RESPONSES  # noqa: E402
from tests.server.expected import (  # noqa: E402
    RANDOM_TEXT,
    SHAPE_ONLY,
    STATUS_ONLY,
    WRONG_METHOD,
    counterpart,
    expected,
    find,
    free_fields,
)
from tests.server.harness import load_captures  # noqa: E402

PAGE = ROOT / "docs" / "server-differences.md"
ROUTINE = frozenset(
    {"id_slot", "prompt_n", "cached_tokens", "cache_read_input_tokens", "input_tokens", "n_params", "size"}
)
HEAD = """# Recorded requests and ikpy's answers

The tests play {total} recorded requests of ik_llama.cpp's server against ikpy (`tests/server/test_captures.py`),
and five recorded connections byte by byte (`tests/server/test_raw_streams.py`).
{full} answers are the same in status, field names, their order, types, values, and the order of events. The others
differ on purpose; this page lists each of them. It is made by `scripts/make_server_differences.py`.

Not compared anywhere: identifiers, times, and fields that depend on requests which are not recorded (slot numbers, the
number of cached tokens). `n_params` and `size` describe the test's own copy of the model. Fields of llama.cpp's server
that the recorded one does not have (`ADDED` in `tests/server/additions.py`) stand beside those of ik_llama.cpp's in
answers and are left out before the comparison; [below](#differences-from-llamacpps-server) is what else differs from
that server.

"""
DIFFERENCES = (
    (
        "prompt longer than the context",
        "400",
        "its middle is left out (`truncated`); 400 with `--context-shift off`",
        "as ik_llama.cpp",
    ),
    (
        "fields of a wrong type",
        "400; some are ignored (`stop`, `grammar`, `logit_bias`)",
        "numbers and booleans: the default, and a warning in the log; others 400",
        "numbers as ik_llama.cpp; lists and grammars that are ignored give another answer than was asked for",
    ),
    (
        "values out of range (`repeat_last_n` below 0, limits above 31 bits)",
        "400",
        "the nearest that can be used; below 0 as ik_llama.cpp",
        "its clients send them",
    ),
    ("empty `prompt`, for a model without a BOS token", "an empty answer", "400", "there is nothing to go on from"),
    ("limit reached: `/v1/responses`", "`completed`", "`incomplete`, `response.incomplete`", "OpenAI's form"),
    ("`stop_sequences` of `/v1/messages`", "`end_turn`", "`stop_sequence` and the string", "Anthropic's form"),
    (
        "fields of llama.cpp in `/v1/messages` and `/v1/responses` (`logit_bias`, `grammar`)",
        "left out",
        "taken",
        "they are asked for",
    ),
    (
        "an assistant message to be continued",
        "the answer repeats it",
        "the answer is what follows",
        "clients put both together",
    ),
    (
        "errors of `/v1/messages`",
        "OpenAI's form",
        'with Anthropic\'s `"type": "error"`; `prompt is too long: ...`',
        "what its clients read",
    ),
    (
        "connections without a request",
        "closed after 5 seconds",
        "closed after 75 seconds",
        "clients that keep them meet fewer closed ones",
    ),
    ("events of `/v1/responses`", "without places and numbers", "with all fields of OpenAI's", "OpenAI's form"),
    ("`model` of chats and completions", "the alias", "what the request names", "as ik_llama.cpp"),
    ("`usage` with `n` above 1, or of several prompts", "tokens of one answer", "of all answers", "OpenAI's form"),
    ("`n_predict` or `max_tokens` 0", "one token", "none", "it fills the cache"),
    ("unknown `id_slot`", "any slot", "400", "the cached text is not where it was looked for"),
    (
        "`prompt` of `/completion` answers",
        "the text with its BOS token",
        "what was sent, null for lists of several",
        "as ik_llama.cpp",
    ),
    ("`logit_bias` of settings", '`{"bias", "token"}`', "`[token, bias]`", "as ik_llama.cpp"),
    (
        "`backend_sampling`, `generation_prompt`, `speculative.types` of settings; `__verbose`; `ui_settings`",
        "there",
        "not there",
        "about parts that ikpy does not have",
    ),
    ("`id_slot` of native chunks", "-1", "the slot", "as ik_llama.cpp"),
    ("`next_token` of `/slots`", "a list", "an object", "as ik_llama.cpp"),
    ("`input_prefix` or `input_suffix` of `/infill` is missing", "400", "empty", "files have beginnings and ends"),
    (
        "`prompt` of `/infill`",
        "end of the prefix",
        "behind the token of the middle, as the documentation of both says",
        "what is typed there leaves the cached text as it is",
    ),
    ("`/rerank` with `--embeddings` alone", "501", "cosines of the embeddings", "any model can do it"),
    (
        "`tools`, pictures, roles that cannot be used; token ids out of range; texts to embed above a micro-batch",
        "500",
        "400 with the same or a plainer message",
        "the client can mend it",
    ),
    (
        "tool calls of the conversation whose arguments are no JSON",
        "500",
        "text, where the template can write it",
        "an answer that a limit cut off does not end the conversation",
    ),
    ("wrong method on a route", "404", "405", "HTTP"),
    ("`n_predict` of `generation_settings`", "the request's limit, as `max_tokens`", "the server's", "as ik_llama.cpp"),
)
"""Topic, llama.cpp's server, ikpy, and why."""
LLAMA = """## Differences from llama.cpp's server

Requests of some 640 kinds were sent to ikpy and to llama.cpp's server of October 2026 with the same model. Status,
names and types of fields, events and their order agree but for these. Names of ik_llama.cpp (`generated_text`,
`stopped_eos`, `tok_str`, the flat settings of `/slots`) stand beside those of llama.cpp's.

{differences}

With several models (`--models-dir`, `--models-preset`) statuses, fields and routes are those of llama.cpp, but:

| topic | llama.cpp | ikpy |
|---|---|---|
| POST `/models/load` | answers at once; 400 if it runs | answers when it is loaded, 500 if it cannot be |
| `status` of a model | with its command line (`args`) | without; with memory, crashes and running requests |
| `architecture` of a model that was not loaded yet | of its files | text alone |
| GET `/models/sse` | states, progress of loading and downloads, changes of the list | states |
| GET `/models?reload=1` | looks for models again | every list does |
| GET `/props` without `model` | of the router | of the model if only one is there or loaded, else of the router |
| POST and DELETE `/models` | download and delete models of the cache | 501 |
| all models busy, no further one may be loaded | waits | 503 with `Retry-After` |
"""


def numbers(names: list[str]) -> str:
    """Names of cases as a list of code."""
    return ", ".join(f"`{name}`" for name in sorted(names))


def section(title: str, groups: dict[str, list[str]]) -> list[str]:
    """A table of reasons and the cases they hold for."""
    lines = [f"## {title}", "", "| why | cases |", "|---|---|"]
    lines += [f"| {reason} | {numbers(names)} |" for reason, names in sorted(groups.items())]
    return [*lines, ""]


def reasons(capture: dict, captures: dict[str, dict]) -> list[str]:
    """Why a compared answer is expected to differ from the recorded one."""
    found = []
    name = capture["name"]
    want = expected(capture, captures)
    if counterpart(capture, captures) is not capture:
        found.append("chats use the model's own template without --jinja too; compared with the recording with --jinja")
    if name in WRONG_METHOD:
        found.append("a wrong method on a route is 405")
    elif capture.get("status") is None:
        found.append("the recorded program ended or never answered; here 400")
    elif counterpart(capture, captures).get("status") == 500:
        found.append("what the client caused is 400 with the same message, not 500")
    if "n_probs" in str(capture.get("request")) or "logprobs" in str(capture.get("request")):
        found.append("probabilities are those of the softmax")
        if find(want, "text_offset"):
            found.append("OpenAI's lists of log probabilities stand beside llama.cpp's array")
    recorded = counterpart(capture, captures)
    if capture["path"] in RESPONSES and want["status"] == 200:
        found.append("responses have all fields and events of OpenAI's; events say their place, items end one by one")
    if capture["path"] == "/v1/messages" and want.get("events"):
        found.append("blocks of messages begin with all their fields and end one by one")
    if find(want, "incomplete_details"):
        found.append("responses that reached a limit are `incomplete`")
    if find(want, "max_model_len") and recorded["response"] != want["response"]:
        found.append("the context of a model in lists is what one request may have, not that of all slots together")
    if any(str(recorded.get(key)) != str(want.get(key)) for key in ("response", "events")) and not found:
        found.append(
            "a reached limit is `length` or `max_tokens`; or another small field (alias, biases, stop sequence)"
        )
    if RANDOM_TEXT.match(name):
        found.append("sampled text, or text under penalties, which see the documented window")
    if "message" in free_fields(capture) - ROUTINE:
        found.append("the message comes from another JSON parser; status and type are compared")
    return found


def page() -> str:
    """The whole page."""
    captures = {c["name"]: c for c in load_captures()}
    status: dict[str, list[str]] = defaultdict(list)
    shape: dict[str, list[str]] = defaultdict(list)
    values: dict[str, list[str]] = defaultdict(list)
    full = 0
    for name, capture in captures.items():
        if name in STATUS_ONLY:
            status[STATUS_ONLY[name][1]].append(name)
        elif name in SHAPE_ONLY:
            shape[SHAPE_ONLY[name]].append(name)
        else:
            found = reasons(capture, captures)
            full += not found
            for reason in found:
                values[reason].append(name)
    lines = section("Everything is compared, with these expected differences", values)
    lines += section("Names, order and types of fields are compared, values are not", shape)
    lines += section("Only the status is compared; the behaviour has tests of its own", status)
    rows = [f"| {' | '.join(row)} |" for row in DIFFERENCES]
    table = "\n".join(["| topic | llama.cpp | ikpy | why |", "|---|---|---|---|", *rows])
    return HEAD.format(total=len(captures), full=full) + "\n".join([*lines, LLAMA.replace("{differences}", table)])


def main() -> None:
    text = page()
    if "--check" in sys.argv:
        raise SystemExit(0 if PAGE.read_text(encoding="utf-8") == text else f"{PAGE.name} is not up to date")
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
