"""Behaviour beyond the recorded answers: deliberate differences, combinations, limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from ikpy.engine.sampling_params import SamplingParams
from ikpy.tools.sampler_setup import breakers_of
from tests.server.behaviour import COMMAND, HELLO, TOOLS, complete, post
from tests.server.harness import MODELS, loaded, read_events, running


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("slots")
    with running(COMMAND, folder) as client:
        client.folder = folder  # type: ignore[attr-defined]
        yield client


@pytest.fixture(scope="module")
def puppet() -> Iterator[TestClient]:
    with running("llama-server -m PUPPET -t 1 -c 2048 -np 2") as client:
        yield client


def test_an_empty_stop_field_stops_nothing(tiny: TestClient) -> None:
    got = complete(tiny, stop="")
    assert (got["content"], got["stopped_word"]) == (complete(tiny)["content"], False)
    assert complete(tiny, stop=" room")["stopped_word"]
    assert complete(tiny, stop=[""])["content"] == "", "a list is taken as it is, as by ik_llama.cpp's server"


def test_n_answers_differ_only_in_their_random_numbers(tiny: TestClient) -> None:
    answers = complete(tiny, n=3, temperature=1.5, seed=3, top_k=0, n_predict=12)
    assert [a["generation_settings"]["seed"] for a in answers] == [3, 4, 5]
    assert len({a["content"] for a in answers}) == 3
    assert len(complete(tiny, n_cmpl=2, n_predict=1)) == 2, "llama.cpp's name"
    greedy = post(tiny, "/v1/chat/completions", messages=HELLO, n=2, temperature=0, max_tokens=4)
    assert [c["index"] for c in greedy["choices"]] == [0, 1]
    assert greedy["usage"]["completion_tokens"] == 8
    texts = [c["message"]["content"] for c in greedy["choices"]]
    assert texts[0] == texts[1] != ""


def test_streamed_n_answers_carry_their_index(tiny: TestClient) -> None:
    body = {"messages": HELLO, "n": 2, "temperature": 0, "max_tokens": 3, "stream": True}
    events = read_events(tiny.post("/v1/chat/completions", json=body).text)
    choices = [e["data"]["choices"][0] for e in events if e["data"] != "[DONE]"]
    for index in (0, 1):
        own = [c for c in choices if c["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert own[-1]["finish_reason"] == "length"


def test_response_fields(tiny: TestClient) -> None:
    got = complete(tiny, response_fields=["content", "timings/predicted_n", "nothing/here"])
    assert got == {"content": " the room, and the\n", "timings/predicted_n": 6}


def test_n_predict_0_evaluates_the_prompt_only(tiny: TestClient) -> None:
    got = complete(tiny, n_predict=0)
    assert (got["content"], got["tokens_predicted"], got["stopped_limit"]) == ("", 0, True)
    assert got["tokens_cached"] == got["tokens_evaluated"] == 6


def test_the_time_limit_ends_the_answer_with_a_line(tiny: TestClient) -> None:
    got = complete(tiny, n_predict=500, t_max_predict_ms=1)
    assert got["stopped_limit"] and got["content"].endswith("\n")
    assert got["content"].count("\n") == 1
    assert complete(tiny, n_predict=500, t_max_predict_ms=1, grammar='root ::= "sea"{9}')["content"] == 9 * "sea"


def test_lines_that_are_not_indented_end_the_answer(tiny: TestClient) -> None:
    more = {"grammar": 'root ::= "f(\\n    a\\n\\t   b\\n  c"', "n_predict": 40}
    for n_indent, wanted in ((5, "f(\n    "), (4, "f(\n    a\n\t   b\n  "), (2, "f(\n    a\n\t   b\n  c")):
        got = complete(tiny, **more, n_indent=n_indent)
        assert (got["content"], got["stopped_limit"]) == (wanted, n_indent > 2)
        events = read_events(
            tiny.post("/completion", json={"prompt": "x", "stream": True, "n_indent": n_indent, **more}).text
        )
        assert "".join(event["data"]["content"] for event in events) == wanted


def test_tokens_are_returned(tiny: TestClient) -> None:
    got = complete(tiny, return_tokens=True, n_predict=6)
    assert post(tiny, "/detokenize", tokens=got["tokens"])["content"] == got["content"]
    assert len(got["tokens"]) == 6 and complete(tiny)["tokens"] == []
    assert complete(tiny, return_tokens=True, response_fields=["tokens"]) == {"tokens": got["tokens"]}
    body = {"prompt": "The old man looked at", "temperature": 0, "n_predict": 6, "return_tokens": True, "stream": True}
    events = read_events(tiny.post("/completion", json=body).text)
    assert [token for event in events for token in event["data"]["tokens"]] == got["tokens"]


@pytest.mark.parametrize("seed", [2**53 + 1, 2**64 - 5, 10**30 + 7, -2])
def test_seeds_keep_their_lower_bits(tiny: TestClient, seed: int) -> None:
    assert complete(tiny, seed=seed, n_predict=1)["generation_settings"]["seed"] == seed % 2**32


def test_probabilities_sum_to_one(tiny: TestClient) -> None:
    got = complete(tiny, n_probs=4096, n_predict=1)["completion_probabilities"][0]["probs"]
    assert sum(item["prob"] for item in got) == pytest.approx(1, abs=1e-9)
    assert [item["prob"] for item in got] == sorted((item["prob"] for item in got), reverse=True)
    sampled = complete(tiny, n_probs=3, n_predict=1, temperature=0.7, top_k=5, seed=1, post_sampling_probs=True)
    probs = sampled["completion_probabilities"][0]["probs"]
    assert len(probs) == 3
    assert sum(item["prob"] for item in probs) <= 1 + 1e-9


def test_ends_that_are_ignored_have_no_probability(tiny: TestClient) -> None:
    end = tiny.post("/tokenize", json={"content": "<|end_of_text|>", "parse_special": True}).json()["tokens"][0]
    body = {"prompt": "The old man", "max_tokens": 1, "temperature": 0, "logprobs": 4096, "logit_bias": [[end, 100]]}
    for ignored in (False, True):
        answer = tiny.post("/v1/completions", json=body | {"ignore_eos": ignored}).json()
        shown = answer["choices"][0]["logprobs"]["content"][0]
        found = {item["id"]: item["logprob"] for item in shown["top_logprobs"]}
        assert shown["id"] == shown["top_logprobs"][0]["id"] != (end if ignored else -1)
        assert found[end] == (-9999.0 if ignored else pytest.approx(0, abs=1e-6))


def test_seeds_reproduce_and_mirostat_too(tiny: TestClient) -> None:
    for more in ({}, {"mirostat": 1}, {"mirostat": 2}, {"xtc_probability": 0.5, "xtc_threshold": 0.05}):
        texts = [complete(tiny, temperature=1.2, seed=9, n_predict=16, **more)["content"] for _ in range(2)]
        assert texts[0] == texts[1], more


def test_penalties_see_the_penalty_prompt_instead_of_the_prompt(tiny: TestClient) -> None:
    """A presence penalty on the token that would come first moves it away, wherever it stands."""
    ids = post(tiny, "/tokenize", content=" the")["tokens"]
    assert complete(tiny, n_predict=1)["content"] == " the"
    options = {"n_predict": 1, "presence_penalty": 100.0, "repeat_last_n": 64}
    for given in (ids, " the"):
        moved = complete(tiny, penalty_prompt=given, **options)
        assert moved["content"] != " the"
        assert moved["generation_settings"]["penalty_prompt_tokens"] == ids
        assert moved["generation_settings"]["use_penalty_prompt_tokens"] is True
    prompt = "Look at the the the old man looked at"
    free = complete(tiny, prompt=prompt, n_predict=1)["content"]
    own = post(tiny, "/tokenize", content=free)["tokens"]
    bound = complete(tiny, prompt=f"{free}{free} {prompt}", **options)["content"]
    without = complete(tiny, prompt=f"{free}{free} {prompt}", penalty_prompt=[], **options)["content"]
    assert (
        len(own) == 1
        and bound != free
        and without == complete(tiny, prompt=f"{free}{free} {prompt}", n_predict=1)["content"]
    )


def test_dry_breakers_may_be_the_text_of_a_list(tiny: TestClient) -> None:
    text = json.dumps(["\n", "*"])
    answer = complete(tiny, prompt="The", n_predict=1, dry_multiplier=0.8, dry_sequence_breakers=text)
    assert answer["generation_settings"]["dry_sequence_breakers"] == ["\n", "*"]
    for wrong in ("*", "[]", "[1]", "[" * 100_000):
        error = post(tiny, "/completion", 400, prompt="The", dry_sequence_breakers=wrong)["error"]
        assert "non-empty array of strings" in error["message"]
    many = [f"{i}" for i in range(101)]
    assert "at most 100" in post(tiny, "/completion", 400, prompt="The", dry_sequence_breakers=many)["error"]["message"]


def test_dry_breakers_are_found_once_for_equal_lists() -> None:
    vocab = loaded(MODELS["MODEL"]).vocab
    one, other = ((f"a{i}", "\n") for i in (1, 2))
    first = breakers_of(SamplingParams(dry_multiplier=0.8, dry_sequence_breakers=one), vocab)
    assert breakers_of(SamplingParams(dry_multiplier=0.5, dry_sequence_breakers=tuple(one)), vocab) is first
    assert breakers_of(SamplingParams(dry_multiplier=0.8, dry_sequence_breakers=other), vocab) != first
    assert breakers_of(SamplingParams(dry_sequence_breakers=one), vocab) == {}


def test_json_schema_answers_follow_the_schema(tiny: TestClient) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    got = post(tiny, "/v1/chat/completions", messages=HELLO, response_format=form, temperature=0, max_tokens=64)
    assert set(json.loads(got["choices"][0]["message"]["content"])) == {"a"}


def test_slot_settings_do_not_leak_into_later_requests(tiny: TestClient) -> None:
    plain = complete(tiny, id_slot=0)["content"]
    complete(tiny, id_slot=0, stop=[" the"], logit_bias=[[901, 100]], samplers=["top_k"], ignore_eos=True)
    again = complete(tiny, id_slot=0)
    assert again["content"] == plain
    assert again["generation_settings"]["logit_bias"] == []


def test_slot_files_survive_a_new_cache(tiny: TestClient) -> None:
    prompt = "It was the best of times, it was the worst of times"
    first = complete(tiny, prompt=prompt, id_slot=1)
    post(tiny, "/slots/1?action=save", filename="state.bin")
    assert post(tiny, "/slots/1?action=erase")["n_erased"] == first["tokens_cached"]
    for target in (0, 1):
        restored = post(tiny, f"/slots/{target}?action=restore", filename="state.bin")
        assert restored["n_restored"] == first["tokens_cached"]
        again = complete(tiny, prompt=prompt, id_slot=target)
        assert again["timings"]["prompt_n"] == 1
        assert again["content"] == first["content"]


def test_damaged_slot_files_are_refused(tiny: TestClient) -> None:
    complete(tiny, id_slot=0)
    post(tiny, "/slots/0?action=save", filename="good.bin")
    folder: Path = tiny.folder  # type: ignore[attr-defined]
    data = (folder / "good.bin").read_bytes()
    for name, content in (("cut", data[:-1]), ("empty", b""), ("noise", b"\0" * 100), ("head", data[:40])):
        (folder / name).write_bytes(content)
        message = post(tiny, "/slots/0?action=restore", 400, filename=name)["error"]["message"]
        assert message.startswith("Unable to restore slot")
    assert complete(tiny, id_slot=0)["timings"]["prompt_n"] == 1


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "", ".hidden", "x\0", "a" * 300, "\ud800", None, 5])
def test_file_names_cannot_leave_the_folder(tiny: TestClient, name: Any) -> None:
    for path in ("/slots/0?action=save", "/slots/0?action=restore", "/delete_prompt"):
        response = tiny.post(path, content=json.dumps({"filename": name}))
        assert (response.status_code, response.json()["error"]["message"]) == (400, "Invalid filename")


@pytest.mark.parametrize("number", ["2", "-1", "x", "\u00b2", "\u0663", "9" * 20, "1" * 5000, "0" * 5000])
def test_numbers_of_slots_that_are_not_there(tiny: TestClient, number: str) -> None:
    assert post(tiny, f"/slots/{number}?action=erase", 400)["error"]["message"] == "Invalid slot ID"


def test_metrics_count_tokens(tiny: TestClient) -> None:
    def values() -> dict[str, float]:
        response = tiny.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = text_string_to_metric_families(response.text)
        return {sample.name: sample.value for family in families for sample in family.samples}

    before = values()
    got = complete(tiny, cache_prompt=False)
    after = values()
    assert after["llamacpp:prompt_tokens_total"] - before["llamacpp:prompt_tokens_total"] == 6
    predicted = after["llamacpp:tokens_predicted_total"] - before["llamacpp:tokens_predicted_total"]
    assert predicted == got["tokens_predicted"] == 6
    assert after["llamacpp:requests_processing"] == 0


def test_mean_pooling_is_the_mean_of_the_hidden_states() -> None:
    with running("llama-server -m MODEL -t 1 -c 512 --embeddings --pooling none") as client:
        states = np.array(post(client, "/embedding", content="Hello")[0]["embedding"])
    with running("llama-server -m MODEL -t 1 -c 512 --embeddings --pooling mean") as client:
        raw = np.array(post(client, "/embedding", content="Hello", embd_normalize=-1)[0]["embedding"][0])
        unit = np.array(post(client, "/embedding", content="Hello")[0]["embedding"][0])
    np.testing.assert_allclose(raw, states.mean(axis=0), atol=2e-5)
    np.testing.assert_allclose(unit, raw / np.linalg.norm(raw), atol=1e-6)


def test_required_tool_call(puppet: TestClient) -> None:
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "temperature": 0, "max_tokens": 80}
    for bias, name in ((262, "get_weather"), (282, "get_weather"), (395, "get_time")):
        named = {"tool_choice": {"type": "function", "function": {"name": name}}}
        message = post(puppet, "/v1/chat/completions", **body | named, logit_bias={str(bias): 100})["choices"][0][
            "message"
        ]
        assert message["content"] == ""
        assert [call["function"]["name"] for call in message["tool_calls"]] == [name]
        assert message["tool_calls"][0]["function"]["arguments"].startswith("{")


def test_a_begun_call_cannot_become_malformed(puppet: TestClient) -> None:
    """The script writes {city: Paris}; the grammar that holds behind <tool_call> lets only JSON of the schema pass."""
    tool = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": tool}}]
    body = {"messages": HELLO, "tools": tools, "temperature": 0, "max_tokens": 120, "logit_bias": {"367": 100}}
    message = post(puppet, "/v1/chat/completions", **body)["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "get_weather"
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert '{"city":"Rome"}'.startswith("".join(arguments.split())), arguments
    free = post(puppet, "/v1/chat/completions", **body | {"tools": None})["choices"][0]["message"]["content"]
    assert "city: Paris" in free
    odd = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "nonsense"}}}]
    post(puppet, "/v1/chat/completions", **body | {"tools": odd})
    post(puppet, "/v1/chat/completions", 400, **body | {"tools": odd, "tool_choice": "required"})


def test_regular_expressions_and_lark(tiny: TestClient) -> None:
    assert complete(tiny, regex="[a-c]{3}-[0-9]{2}", n_predict=20)["content"][3] == "-"
    got = complete(tiny, lark='start: "yes" | "no"', n_predict=20)["content"]
    assert got in ("yes", "no")
    assert complete(tiny, grammar=f'%llguidance {{}}\nstart: "{got}"', n_predict=20)["content"] == got
    for body in ({"regex": "[", "n_predict": 2}, {"lark": "start: (", "n_predict": 2}, {"regex": "a", "lark": "b"}):
        assert post(tiny, "/completion", 400, prompt="x", **body)["error"]["message"]


@pytest.mark.parametrize("route", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_timings_come_with_every_token_only_if_wanted(tiny: TestClient, route: str) -> None:
    body = {"prompt": "Once", "messages": HELLO, "temperature": 0, "max_tokens": 5, "stream": True, "ignore_eos": True}
    for wanted in (False, True):
        events = read_events(tiny.post(route, json=body | {"timings_per_token": wanted}).text)
        *pieces, last = [event["data"] for event in events if event["data"] != "[DONE]"]
        counts = [event["timings"]["predicted_n"] for event in pieces if "timings" in event]
        assert last["timings"]["predicted_n"] == 5
        assert counts == sorted(counts) and len(set(counts)) >= 4 if wanted else not counts


def test_stop_strings_do_not_leak_into_chat_streams(puppet: TestClient) -> None:
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 80, "logit_bias": {"441": 100}, "stop": ["e STOP f"]}
    events = read_events(puppet.post("/v1/chat/completions", json=body | {"stream": True}).text)
    text = "".join(e["data"]["choices"][0]["delta"].get("content") or "" for e in events[:-1])
    assert text == "One, two, thre"


def test_a_full_context_ends_the_answer_and_keeps_its_text() -> None:
    """The latent cache cannot drop old tokens: all that was written is given out, with the limit as its reason."""
    text = "The old man looked at"
    with running("llama-server -m MODEL -t 1 -c 256 -np 1") as client:
        first = complete(client, n_predict=40)["content"]
        native = complete(client, n_predict=-1)
        assert native["content"].startswith(first) and native["stopped_limit"] and native["truncated"]
        assert native["tokens_evaluated"] + native["tokens_predicted"] == 256
        banned = complete(client, n_predict=-1, banned_strings=["zzzz zzzz", native["content"][-4:] + "?"])
        assert banned["content"] == native["content"] and banned["truncated"]
        chat = post(client, "/v1/chat/completions", messages=HELLO, temperature=0)["choices"][0]
        assert chat["finish_reason"] == "length" and len(chat["message"]["content"]) > 300
        body = {"messages": HELLO, "temperature": 0, "stream": True}
        events = [e["data"] for e in read_events(client.post("/v1/chat/completions", json=body).text)]
        events = [event for event in events if event != "[DONE]"]
        assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == chat["message"]["content"]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        post(client, "/completion", 400, prompt=text * 100)


HELLO_CHAT = {"messages": HELLO, "temperature": 0, "max_tokens": 8}


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}},
        {"type": "json_schema", "json_schema": {"json_schema": {"type": "boolean"}}},
        {"type": "json_schema", "schema": {"type": "boolean"}},
        {"type": "json_object", "schema": {"type": "boolean"}},
    ],
)
def test_schemas_are_found_where_clients_put_them(tiny: TestClient, wanted: dict[str, Any]) -> None:
    answer = post(tiny, "/v1/chat/completions", **HELLO_CHAT, response_format=wanted)
    assert answer["choices"][0]["message"]["content"].strip() in ("true", "false")


def test_a_schema_holds_beside_tools_that_cannot_be_called(tiny: TestClient, puppet: TestClient) -> None:
    """The template of ``tiny`` drops tools; that of ``puppet`` has them, but the request wants no call."""
    body = HELLO_CHAT | {"tools": TOOLS, "response_format": {"type": "json_object", "schema": {"type": "boolean"}}}
    for client, choice in ((tiny, "auto"), (puppet, "none")):
        answer = post(client, "/v1/chat/completions", **body, tool_choice=choice, reasoning_format="none")
        assert answer["choices"][0]["message"]["content"].strip() in ("true", "false"), choice


def test_log_probabilities_without_alternatives(tiny: TestClient) -> None:
    def content(**body: Any) -> list[dict[str, Any]]:
        answer = post(tiny, "/v1/chat/completions", **HELLO_CHAT, logprobs=True, **body)
        return answer["choices"][0]["logprobs"]["content"]

    alone, pairs = content(top_logprobs=0), content(top_logprobs=2)
    assert [item["top_logprobs"] for item in alone] == [[]] * 8
    assert [item["token"] for item in alone] == [item["token"] for item in pairs]
    assert [item["logprob"] for item in alone] == pytest.approx([item["logprob"] for item in pairs], abs=0.01)
    assert len(content()[0]["top_logprobs"]) == 20


@pytest.mark.parametrize("stop", [[".", "!", "?"], ["e t", "e a", "s a", "d t", "n t", "e s"], []])
def test_streams_have_the_log_probabilities_of_plain_answers(tiny: TestClient, stop: list[str]) -> None:
    """Also those of tokens that a stop string cuts off."""
    body = HELLO_CHAT | {"temperature": 1.2, "max_tokens": 24, "logprobs": True, "top_logprobs": 2, "stop": stop}
    asked = body | {"input": "Tell me", "max_output_tokens": 24}
    cut = 0
    for seed in range(6):
        plain = post(tiny, "/v1/chat/completions", **body, seed=seed)["choices"][0]
        events = read_events(tiny.post("/v1/chat/completions", json=body | {"seed": seed, "stream": True}).text)
        choices = [event["data"]["choices"][0] for event in events[:-1]]
        found = [entry for choice in choices for entry in choice.get("logprobs", {}).get("content", [])]
        assert tokens_of(found) == tokens_of(plain["logprobs"]["content"])
        cut += plain["finish_reason"] == "stop"
        message = post(tiny, "/v1/responses", **asked, seed=seed)["output"][0]["content"][0]
        events = read_events(tiny.post("/v1/responses", json=asked | {"seed": seed, "stream": True}).text)
        deltas = [event["data"] for event in events if event["event"] == "response.output_text.delta"]
        found = [entry for delta in deltas for entry in delta["logprobs"]]
        assert tokens_of(found) == tokens_of(message["logprobs"])
        done = events[-1]["data"]["response"]["output"][0]["content"][0]
        assert (done["logprobs"], done["text"]) == (found, message["text"])
    assert cut > 2 or not stop


def tokens_of(entries: list[dict[str, Any]]) -> list[int]:
    return [entry["id"] for entry in entries]


def test_embeddings_of_content_are_given_in_the_native_form() -> None:
    with running("llama-server -m MODEL -t 1 -c 256 -np 1 --embeddings --pooling mean") as client:
        native = post(client, "/embeddings", content="Hello there")
        assert post(client, "/v1/embeddings", content="Hello there") == native
        assert post(client, "/v1/embeddings", content="x", input="Hello there")["object"] == "list"
