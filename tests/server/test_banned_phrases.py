"""Banned phrases: taken back from the model's cache, from streams and from the grammar as if they had never come."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ikpy.cli.parser import parse
from ikpy.server import phrase_ban
from ikpy.server.ban_patterns import BanPatterns
from ikpy.server.build import Server
from ikpy.server.phrase_ban import LONGEST_PHRASE, MOST_PHRASES, BannedPhrases, HeldToken, PhraseBan, fold, folded
from tests.server.harness import read_events
from tests.server.live import listening

PROMPT = "The old man looked at"
Pair = tuple[httpx.Client, Server]


@pytest.fixture(name="tiny", scope="module")
def start_tiny() -> Iterator[Pair]:
    with listening("llama-server -m MODEL -t 1 -c 1024 -np 2") as pair:
        yield pair


def complete(client: httpx.Client, prompt: Any = PROMPT, **body: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 24, "temperature": 0, "id_slot": 0, "seed": 1} | body
    response = client.post("/completion", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def plain_tokens(pair: Pair) -> tuple[list[int], list[int]]:
    """Tokens of the prompt and of its answer."""
    client, server = pair
    n = complete(client)["tokens_evaluated"]
    tokens = list(server.engine.slots[0].tokens)
    return tokens[:n], tokens[n:]


def text_of(pair: Pair, tokens: list[int]) -> str:
    return b"".join(map(pair[1].front.vocab.token_to_piece, tokens)).decode()


@pytest.mark.parametrize(("first", "n"), [(0, 1), (0, 3), (5, 1), (5, 3), (9, 4)])
def test_the_answer_goes_on_as_if_the_first_token_had_been_banned(tiny: Pair, first: int, n: int) -> None:
    """The same text as without the phrase up to it, then what the model writes behind that under a bias."""
    client, _ = tiny
    prompt, plain = plain_tokens(tiny)
    phrase, before = text_of(tiny, plain[first : first + n]), text_of(tiny, plain[:first])
    biased = complete(
        client, prompt + plain[:first], n_predict=1, logit_bias=[[plain[first], -999]], cache_prompt=False
    )
    wanted = before + biased["content"]
    got = complete(client, banned_strings=[phrase.upper()], n_predict=60)
    assert fold(phrase) not in fold(got["content"])
    assert got["content"].startswith(wanted)
    assert got["tokens_predicted"] == 60, "tokens that were taken back count"
    again = complete(client, banned_strings=[phrase], n_predict=60, id_slot=1, cache_prompt=False)
    assert again["content"] == got["content"]
    tokens = tiny[1].engine.slots[1].tokens
    alone = complete(client, tokens, n_predict=8, cache_prompt=False)["content"]
    assert complete(client, tokens, n_predict=8, id_slot=1)["content"] == alone, "the cache is that of the text"


def test_streams_show_no_part_of_a_phrase(tiny: Pair) -> None:
    client, _ = tiny
    _, plain = plain_tokens(tiny)
    phrases = [text_of(tiny, plain[4:8]), text_of(tiny, plain[10:12])]
    body = {"prompt": PROMPT, "n_predict": 60, "temperature": 0, "stream": True, "banned_strings": phrases}
    events = [event["data"] for event in read_events(client.post("/completion", json=body).text)]
    whole = complete(client, banned_strings=phrases, n_predict=60)
    assert "".join(event["content"] for event in events) == whole["content"]
    assert not any(phrase in whole["content"] for phrase in phrases)


def test_probabilities_and_stop_strings_of_what_stays(tiny: Pair) -> None:
    client, _ = tiny
    _, plain = plain_tokens(tiny)
    phrase = text_of(tiny, plain[5:8])
    got = complete(client, banned_strings=[phrase], n_predict=40, n_probs=2)
    assert "".join(item["content"] for item in got["completion_probabilities"]) == got["content"]
    stop = got["content"][30:34]
    stopped = complete(client, banned_strings=[phrase], n_predict=40, stop=[stop])
    assert stopped["stopped_word"] and stopped["content"] == got["content"].partition(stop)[0]


def test_a_grammar_is_taken_back_too(tiny: Pair) -> None:
    client, _ = tiny
    for _ in range(2):
        got = complete(client, grammar='root ::= ("yes" | "no" | "maybe") "!"', logit_bias=[["yes", 50]])
        assert got["content"] == "yes!"
        got = complete(client, grammar='root ::= ("yes" | "no" | "maybe") "!"', banned_strings=["yes", "NO"])
        assert got["content"] == "maybe!"
    only = complete(client, grammar='root ::= "yes!"', banned_strings=["yes"], temperature=1.0)
    assert only["content"] == "yes!", "a phrase without an alternative stays"


def test_limits_of_taking_back(tiny: Pair) -> None:
    client, _ = tiny
    plain = complete(client)["content"]
    _, tokens = plain_tokens(tiny)
    phrase = text_of(tiny, tokens[3:5])
    assert complete(client, banned_strings=[phrase], rewind_count_max=0)["content"] == plain
    same = complete(client, banned_strings=[phrase], banned_bias=0)["content"]
    assert phrase in same and plain.startswith(same), "the same token is drawn again"
    assert complete(client, banned_strings=["", "zzzz"])["content"] == plain
    assert complete(client, banned_strings=[phrase], banned_n=-1)["content"] != plain
    everything = complete(client, banned_strings=[chr(i) for i in range(32, 127)], n_predict=3)
    assert everything["tokens_predicted"] == 3


def test_patterns_are_taken_back_like_phrases(tiny: Pair) -> None:
    client, _ = tiny
    _, plain = plain_tokens(tiny)
    phrase, before = text_of(tiny, plain[5:8]), text_of(tiny, plain[:5])
    wanted = complete(client, banned_strings=[phrase], n_predict=40)["content"]
    assert complete(client, banned_regex=[re.escape(phrase)], n_predict=40)["content"] == wanted
    swapped = re.escape(phrase.swapcase())
    assert complete(client, banned_regex_case_insensitive=swapped, n_predict=40)["content"] == wanted
    same = complete(client, banned_regex=[swapped], n_predict=40)["content"]
    assert same == complete(client, n_predict=40)["content"]
    loose = re.escape(phrase[:2]) + "[^z]*?" + re.escape(phrase[-2:])
    got = complete(client, banned_regex=[loose], n_predict=40)["content"]
    assert got.startswith(before) and not re.search(loose, got)


def test_streams_show_no_match_and_words_end_with_the_answer(tiny: Pair) -> None:
    client, _ = tiny
    words = complete(client, n_predict=40)["content"].split()
    banned = [rf"\b{re.escape(word)}\b" for word in words if word.isalpha()][2:6]
    body = {"prompt": PROMPT, "n_predict": 60, "temperature": 0, "stream": True, "banned_regex": banned}
    events = [event["data"] for event in read_events(client.post("/completion", json=body).text)]
    text = "".join(event["content"] for event in events)
    assert text == complete(client, banned_regex=banned, n_predict=60)["content"]
    assert not re.search("|".join(banned), text)


def test_text_that_may_match_for_ever_is_given_out_after_a_while(tiny: Pair) -> None:
    client, _ = tiny
    plain = complete(client, n_predict=40)["content"]
    body = {"prompt": PROMPT, "n_predict": 40, "temperature": 0, "stream": True, "banned_regex": "[^~]*~"}
    for wait in (4, 10):
        answer = client.post("/completion", json=body | {"banbuffer_size": wait})
        texts = [event["data"]["content"] for event in read_events(answer.text)]
        assert "".join(texts) == plain
        longest = max(map(len, texts))
        assert longest < len(plain) / 2, "no event brings a large part of the text"
    assert complete(client, banned_regex="[^~]*~", n_predict=40)["content"] == plain


def test_waiting_tokens_take_little_memory(tiny: Pair) -> None:
    """Not the logits of each, which with large vocabularies would be hundreds of MiB."""
    client, server = tiny
    body = {"prompt": PROMPT, "n_predict": 300, "temperature": 0, "ignore_eos": True}
    plain = complete(client, **body)["content"]
    banned = body | {"banned_regex": "[^~]*~", "banbuffer_size": 1000}
    complete(client, **banned)  # all plans and tables are made
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        got = complete(client, **banned)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert got["content"] == plain, "nothing was given out before the end, nothing was taken back"
    assert peak - before < 100 * 4 * server.engine.context.model.hparams.n_vocab


def test_phrases_of_the_command_line(tmp_path: Path, tiny: Pair) -> None:
    _, tokens = plain_tokens(tiny)
    phrase = text_of(tiny, tokens[3:5])
    file = tmp_path / "phrases"
    file.write_text(f"{phrase}\n\nzzz\n")
    params = parse(["--banned-string-file", str(file), "--banned-n", "2"], "server", {})
    assert (params.server.banned_strings, params.server.banned_n) == ([phrase, "zzz"], 2)
    with listening(f"llama-server -m MODEL -t 1 -c 512 -np 1 --banned-string-file {file}") as (client, _):
        assert phrase not in complete(client, n_predict=40)["content"]
        assert phrase in complete(client, n_predict=40, banned_strings=[])["content"]
    with listening(f"llama-server -m MODEL -t 1 -c 512 -np 1 --spec-type ngram-mod --banned-string-file {file}") as (
        client,
        _,
    ):
        assert phrase not in complete(client, n_predict=40)["content"]


@pytest.mark.parametrize(
    "body",
    [
        {"banned_strings": ["x" * 501]},
        {"banned_strings": ["x"] * 10_001},
        {"banned_regex": ["a(?=b)"]},
        {"banned_regex": "((a{1000}){1000}){1000}"},
        {"banned_regex_case_insensitive": ["a)"]},
        {"banned_regex": ["a"] * 101},
        {"system_prompt": {"prompt": "a"}},
        {"allowlist_piece_array": ["a"]},
        {"expiring_logit_bias": [[1, 1, 1]]},
    ],
)
def test_what_is_refused(tiny: Pair, body: dict[str, Any]) -> None:
    response = tiny[0].post("/completion", json={"prompt": "x", "n_predict": 1} | body)
    assert response.status_code == 400
    assert next(iter(body)).removesuffix("_case_insensitive") in response.json()["error"]["message"]


PIECES = ("a", "b", "ab", "ba", "aab", "B", " ", "é".encode()[:1], "é".encode()[1:], "xé")
VOCABULARY = [piece if isinstance(piece, bytes) else piece.encode() for piece in PIECES]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["ab", "aba", "b a", "éa", "BB", "aéb", "xé"]), min_size=1, max_size=3),
    st.lists(st.sampled_from(["ab+", r"\ba", "é.?a", r"BB|b\b", "xé"]), max_size=2),
    st.lists(st.integers(0, len(PIECES) - 1), max_size=40),
)
@example(["BB"], [], [4, 7, 7, 7, 7, 7])  # first bytes of characters that never come
def test_what_is_released_holds_no_phrase(phrases: list[str], regexes: list[str], wanted: list[int]) -> None:
    patterns = BanPatterns([(pattern, False) for pattern in regexes]) if regexes else None
    ban = PhraseBan(BannedPhrases(folded(phrases), patterns=patterns))
    out: list[HeldToken] = []
    logits: dict[int, np.ndarray] = {}
    """By place."""
    for choice in wanted:
        logits[len(out) + len(ban.held)] = np.eye(len(PIECES), dtype=np.float32)[choice]
        while True:
            token = int(ban.biased(logits[len(out) + len(ban.held)]).argmax())
            ban.add(HeldToken(token, VOCABULARY[token], None))
            n = ban.n_back(ended=False)
            if not n:
                break
            assume(ban.may_take_back(n))  # unless all ten tokens were tried: each began something banned later
            ban.take_back(n)
        out += ban.release(everything=False)
        held = fold(b"".join(item.piece for item in ban.held).decode("utf-8", "replace"))
        assert len(held) < 3 + max(map(len, phrases)) + max(map(len, PIECES))
    out += ban.release(everything=True)
    text = b"".join(item.piece for item in out).decode("utf-8", "replace")
    assert not any(fold(phrase) in fold(text) for phrase in phrases), text
    known = [pattern for pattern in regexes if "b\\b" not in pattern]  # the last b may stand before another letter
    assert not any(re.search(pattern, text) for pattern in known), text
    assert ban.held == []


class Searched(PhraseBan):
    """Finds phrases by looking for each of them in all of the text."""

    def _n_phrase(self) -> int:
        before, text = self._released.decode("utf-8", "surrogateescape"), self._text()
        both = fold(before + text)
        found = [both.find(phrase) for phrase in self._banned.phrases if phrase in both]
        if not found:
            return 0
        start = min(found) - len(before)
        return self._n_last(len(text[start:].encode("utf-8", "surrogateescape"))) if start >= 0 else len(self.held)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("abB é", max_size=5), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, len(PIECES) - 1), st.booleans()), max_size=40),
)
@example(["ab", "aba", "b", "B "], [(2, True), (0, False), (6, True)])
def test_sorted_phrases_find_what_a_search_finds(phrases: list[str], wanted: list[tuple[int, bool]]) -> None:
    """Also those that begin with others, which `folded` leaves out. Some are taken back, others stay."""
    fast = PhraseBan(BannedPhrases(folded(phrases)))
    slow = Searched(BannedPhrases(tuple(sorted({fold(phrase) for phrase in phrases if phrase}))))
    for token, may_go in wanted:
        for ban in (fast, slow):
            ban.add(HeldToken(token, VOCABULARY[token], None))
        n = fast.n_back(ended=False)
        assert n == slow.n_back(ended=False)
        if n and may_go:
            fast.take_back(n)
            slow.take_back(n)
            continue
        freed = [[item.token for item in ban.release(everything=n > 0)] for ban in (fast, slow)]
        assert freed[0] == freed[1]


def test_long_lists_take_few_steps_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phrases are prepared with the request; a token is compared with them at no more places than a phrase is long."""
    common = "the " * (LONGEST_PHRASE // 4 - 2)
    banned = BannedPhrases(folded(f"{common}{i}" for i in range(MOST_PHRASES)))
    n_looks = [0]

    def counted(look: Any) -> Any:
        def looking(*args: Any) -> int:
            n_looks[0] += 1
            return look(*args)

        return looking

    for name in ("bisect_left", "bisect_right"):
        monkeypatch.setattr(f"ikpy.server.phrase_ban.{name}", counted(getattr(phrase_ban, name)))
    ban = PhraseBan(banned)
    assert n_looks == [0]
    for _ in range(300):
        before = n_looks[0]
        ban.add(HeldToken(0, b"the ", None))
        assert ban.n_back(ended=False) == 0
        ban.release(everything=False)
        assert n_looks[0] - before <= 2 * LONGEST_PHRASE
    assert len(ban.held) > 100, "the text may be the beginning of all of them"
    ban.add(HeldToken(1, b"9999", None))
    assert ban.n_back(ended=False) == len(common) // 4 + 1
