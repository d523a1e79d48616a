"""Grammars over tokens: GBNF, JSON schema, regular expressions and Lark, executed by llguidance.

Token texts come in as bytes, so the engine needs no tokenizer. Compiled grammars are kept with the vocabulary.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.grammars import strict_json
from ikpy.engine.grammars.gbnf import GrammarError, TokenRef, children, parse_gbnf
from ikpy.engine.grammars.gbnf_lark import to_lark
from ikpy.engine.grammars.json_schema import schema_to_gbnf

LARK_MARK = "%llguidance"
"""A grammar text that begins with this is Lark, not GBNF."""
NO_FORCING = LARK_MARK + ' {"no_forcing": true}'
"""Head of Lark grammars: texts that are the only way to go on may be written in any tokens."""
TOO_DEEP = "JSON schema is nested too deeply"
MOST_COMPILED = 64
LONGEST_SOURCE = 1 << 20
"""Characters of a grammar text, a larger one is refused before it is parsed; and of all that are kept compiled, since a
compiled grammar may take some hundred bytes for each."""
MASKS_AHEAD = 8
"""Tokens for which masks are computed ahead after one was needed."""
MOST_ROW_ITEMS, MOST_STEP_ITEMS = 10_000, 500_000
"""Ways on which a grammar may be followed at the same time, and steps on them for one mask (about a second)."""
QUICK_RULES = 500
"""Rules with which a step is quick; in larger grammars it may take longer in proportion to their number."""
MOST_LARK_PARTS = 1000
"""Rules, groups and members of schemas in a Lark text: llguidance follows those in each other on the stack; from
some number between 1000 and 2000 on the process would end."""
MOST_MASKS = 4
"""Masks that are computed at the same time."""


@cache
def _pool() -> ThreadPoolExecutor:
    """The threads that compute masks while the model evaluates the token before."""
    return ThreadPoolExecutor(min(MOST_MASKS, os.cpu_count() or 1), "grammar")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # its threads are the parent's


class TokenTexts:
    """The vocabulary as a grammar sees it; building it once serves any number of grammars.

    ``token_bytes[id]``: text of every token; ids in ``special`` (control tokens) match no text, only explicit
    token references; ids in ``eog`` may come where the grammar can end. ``tokenize`` gives the ids of a token
    name used in a grammar.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special: Iterable[int] = (),
        eog: Iterable[int] = (),
        tokenize: Callable[[str], list[int]] | None = None,
    ) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        self.n_vocab = len(token_bytes)
        self.eog = frozenset(eog)
        self.special = frozenset(special) | self.eog
        self.tokenize = tokenize
        self._compiled: OrderedDict[tuple[str, str], Future[TextGrammar]] = OrderedDict()
        self._lock = threading.Lock()
        self._source = _TokenSource(token_bytes, sorted(self.special), min(self.eog, default=self.n_vocab))
        self.tokenizer = LLTokenizer(TokenizerWrapper(self._source), n_vocab=len(self._source.tokens), slices=[])

    def ids_of(self, name: str) -> list[int]:
        """Ids of a token written as text in a grammar."""
        return self.tokenize(name) if self.tokenize else []

    def compiled(self, kind: str, source: str, make: Callable[[], TextGrammar]) -> TextGrammar:
        """A grammar at its start, from the cache or ``make``; what it raises is passed on. Who asks for one that is
        being made waits for it.
        """
        key = kind, source
        with self._lock:
            found = self._compiled.get(key)
            mine = found is None
            if found is None:
                found = self._compiled[key] = Future()
            self._compiled.move_to_end(key)
            while len(self._compiled) > 1 and not self._fits():
                self._compiled.popitem(last=False)
        if mine:
            self._make(key, make, found)
        return found.result().copy()

    def _fits(self) -> bool:
        n = sum(len(source) for _, source in self._compiled)
        return len(self._compiled) <= MOST_COMPILED and n <= LONGEST_SOURCE

    def _make(self, key: tuple[str, str], make: Callable[[], TextGrammar], result: Future[TextGrammar]) -> None:
        """Compiles a grammar, for all who wait for it; a failure is not kept."""
        try:
            grammar = make()
            grammar.prepare()
        except BaseException as error:
            with self._lock:
                self._compiled.pop(key, None)
            result.set_exception(error)
        else:
            result.set_result(grammar)

    def tokens_of(self, text: bytes) -> list[int] | None:
        """The fewest text tokens whose bytes are ``text``; None if there are none."""
        return self._source.tokens_of(text)


class _TokenSource:
    """What llguidance reads; adds an end token where the vocabulary has none."""

    def __init__(self, token_bytes: Sequence[bytes], special: list[int], end: int) -> None:
        self.tokens = list(token_bytes)
        if end >= len(self.tokens):
            self.tokens.append(b"<end>")
            special = [*special, end]
        for token in special:
            self.tokens[token] = self.tokens[token] or f"<{token}>".encode()
        self.special_token_ids = special
        self.eos_token_id = end
        self.bos_token_id = None
        self._lookup: tuple[dict[bytes, int], int] | None = None

    def _texts(self) -> tuple[dict[bytes, int], int]:
        """Ids of the text tokens by their bytes, and the length of the longest. Several threads may ask at a time."""
        if self._lookup is None:
            special = set(self.special_token_ids)
            ids = {data: i for i, data in enumerate(self.tokens) if data and i not in special}
            self._lookup = ids, max(map(len, ids), default=0)
        return self._lookup

    def tokens_of(self, text: bytes) -> list[int] | None:
        """The fewest text tokens whose bytes are ``text``; None if there are none."""
        ids, longest = self._texts()
        best: list[list[int] | None] = [[]]
        for end in range(1, len(text) + 1):
            found: list[int] | None = None
            for start in range(max(0, end - longest), end):
                before, token = best[start], ids.get(text[start:end])
                if before is not None and token is not None and (found is None or len(before) + 1 < len(found)):
                    found = [*before, token]
            best.append(found)
        return best[-1]

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of a text that a grammar forces."""
        found = self.tokens_of(text.encode() if isinstance(text, str) else text)
        if found is None:
            raise ValueError("the vocabulary has no tokens for a text of the grammar")
        return found


class TextGrammar:
    """State of one grammar along one generated sequence; see :class:`ikpy.engine.sampler_parts.TokenGrammar`.

    ``grammar`` is Lark text or another form that llguidance reads. Once a mask was needed, the next ones are computed
    in another thread as soon as the token before is known, while the model is evaluated. While ``ready`` is false,
    all other methods wait for that thread; `begin_mask` and `when_ready` never do.
    """

    def __init__(self, grammar: str, texts: TokenTexts) -> None:
        from llguidance import LLMatcher, LLParserLimits

        n_rules = max(QUICK_RULES, grammar.count("\n"))
        n_steps = MOST_STEP_ITEMS * QUICK_RULES // n_rules
        limits = LLParserLimits(step_max_items=n_steps, max_items_in_row=MOST_ROW_ITEMS)
        self._begin(LLMatcher(texts.tokenizer, grammar, log_level=0, limits=limits), texts)
        self._check()

    def _begin(self, matcher: Any, texts: TokenTexts) -> None:
        self._matcher = matcher
        self._texts = texts
        self._ended = False
        self._start: Future[NDArray[np.bool_]] | None = None
        self._ahead: Future[NDArray[np.bool_]] | None = None
        self._n_ahead = 0

    def prepare(self) -> None:
        """Computes the mask of the start, which copies share. Raises GrammarError."""
        if self._start is None:
            self._start = Future()
            self._start.set_result(self._mask())
            self._ahead = self._start

    def copy(self) -> TextGrammar:
        """The same grammar in the same state, to be advanced on its own."""
        new = TextGrammar.__new__(TextGrammar)
        new._begin(self._settled().deep_copy(), self._texts)
        new._ended, new._start, new._ahead = self._ended, self._start, self._ahead
        return new

    def _settled(self) -> Any:
        """The matcher, when no other thread uses it."""
        if self._ahead is not None:
            self._ahead.exception()
        return self._matcher

    @property
    def complete(self) -> bool:
        """Whether the text so far is a whole sentence of the grammar."""
        return bool(self._settled().is_accepting())

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next."""
        if self._ended:
            return False
        if token in self._texts.eog:
            return self.complete
        return bool(self._settled().validate_tokens([token]) == 1)

    @property
    def ready(self) -> bool:
        """Whether no mask is being computed in another thread."""
        return self._ahead is None or self._ahead.done()

    def when_ready(self, call: Callable[[], object]) -> None:
        """Calls a function once ``ready`` is true, from another thread if it is not yet."""
        if self._ahead is None:
            call()
        else:
            self._ahead.add_done_callback(lambda _: call())

    def begin_mask(self) -> None:
        """Has `mask` computed in another thread, if it is not known."""
        if self._ahead is None and not self._ended:
            self._ahead = _pool().submit(self._mask)

    def mask(self) -> NDArray[np.bool_]:
        """True for every token that may come next, [n_vocab], not to be written to."""
        if self._ended:
            return np.zeros(self._texts.n_vocab, dtype=np.bool_)
        self._n_ahead = MASKS_AHEAD
        if self._ahead is None:
            return self._mask()
        return self._ahead.result()

    def _mask(self) -> NDArray[np.bool_]:
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.unpackbits(words, bitorder="little")[: self._texts.n_vocab].astype(np.bool_)
        allowed[list(self._texts.eog)] = bool(self._matcher.is_accepting())
        allowed.flags.writeable = False
        return allowed

    def accept(self, token: int) -> None:
        """Advances by ``token``; raises GrammarError if the grammar does not allow it."""
        if not self.allows(token):
            raise GrammarError(f"Unexpected empty grammar stack after accepting token {token}")
        self._ahead = None
        if token in self._texts.eog:
            self._ended = True
            return
        self._matcher.consume_token(token)
        self._check()
        if self._n_ahead:
            self._n_ahead -= 1
            self.begin_mask()

    def reset(self) -> None:
        """Returns to the start."""
        self._settled().reset()
        self._ended, self._ahead = False, self._start

    def _check(self) -> None:
        if self._matcher.is_error():
            problem = self._matcher.get_error().splitlines()[0]
            if problem.startswith("panic"):  # numbers of 16 bits overflow
                problem = "it is too large"
            raise GrammarError(f"grammar cannot be used: {problem}")


def gbnf_grammar(source: str, texts: TokenTexts) -> TextGrammar:
    """Grammar from GBNF text; raises GrammarError naming the place of an error."""

    def make() -> TextGrammar:
        rules = parse_gbnf(_bounded(source))
        names: set[str] = set()
        nodes = list(rules.values())
        while nodes:
            node = nodes.pop()
            nodes += children(node)
            if isinstance(node, TokenRef) and isinstance(node.token, str):
                names.add(node.token)
        return TextGrammar(to_lark(rules, {name: texts.ids_of(name) for name in names}), texts)

    return texts.compiled("gbnf", source, make)


def parsed_schema(source: str) -> Any:
    """The schema of a JSON text; raises GrammarError."""
    try:
        return strict_json.loads(_bounded(source))
    except ValueError as error:
        raise GrammarError(f"JSON schema is not valid JSON: {error}") from None
    except RecursionError:
        raise GrammarError(TOO_DEEP) from None


def json_schema_grammar(schema: str | dict[str, Any] | bool, texts: TokenTexts) -> TextGrammar:
    """Grammar of the JSON texts a schema allows; raises GrammarError for one that cannot be converted."""
    try:
        source = schema if isinstance(schema, str) else json.dumps(schema)
    except RecursionError:
        raise GrammarError(TOO_DEEP) from None
    parsed = parsed_schema(source)
    return texts.compiled("schema", source, lambda: gbnf_grammar(schema_to_gbnf(parsed), texts))


def regex_grammar(pattern: str, texts: TokenTexts) -> TextGrammar:
    """Grammar of the texts that a regular expression matches as a whole; raises GrammarError."""
    from llguidance import LLMatcher

    def make() -> TextGrammar:
        lark = json.loads(LLMatcher.grammar_from_regex(_bounded(pattern)))["grammars"][0]["lark_grammar"]
        return TextGrammar(f"{NO_FORCING}\n{lark}", texts)

    return texts.compiled("regex", pattern, make)


def lark_grammar(source: str, texts: TokenTexts) -> TextGrammar:
    """Grammar from llguidance's Lark dialect; raises GrammarError."""
    text = source if source.lstrip().startswith(LARK_MARK) else f"{NO_FORCING}\n{source}"
    return texts.compiled("lark", source, lambda: TextGrammar(_shallow(_bounded(text)), texts))


def _shallow(source: str) -> str:
    """The Lark text, if its parts cannot be nested too deeply. Raises GrammarError."""
    n_parts = sum(source.count(mark) for mark in ":([")
    if n_parts > MOST_LARK_PARTS:
        raise GrammarError(
            f"the Lark grammar may be nested too deeply: it has {n_parts} colons, parentheses and brackets, at most "
            f"{MOST_LARK_PARTS} are accepted"
        )
    return source


def _bounded(source: str) -> str:
    if len(source) > LONGEST_SOURCE:
        raise GrammarError(f"the grammar has {len(source)} characters; at most {LONGEST_SOURCE} are accepted")
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(f"the grammar is not valid Unicode: lone surrogate at character {error.start + 1}") from None
    return source


def make_grammar(
    grammar: str, json_schema: str | None, texts: TokenTexts, *, regex: str | None = None
) -> TextGrammar | None:
    """Grammar of a request, or None; raises GrammarError if more than one kind is given."""
    if (bool(grammar) + (json_schema is not None) + (regex is not None)) > 1:
        raise GrammarError('Either "json_schema" or "grammar" can be specified, but not both')
    if json_schema is not None:
        return json_schema_grammar(json_schema, texts)
    if regex is not None:
        return regex_grammar(regex, texts)
    if grammar.lstrip().startswith(LARK_MARK):
        return lark_grammar(grammar, texts)
    return gbnf_grammar(grammar, texts) if grammar else None
