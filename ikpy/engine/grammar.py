"""Grammars over tokens: GBNF and JSON schema, executed by llguidance.

Token texts come in as bytes, so the engine needs no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.gbnf import GrammarError, TokenRef, children, parse_gbnf, to_lark
from ikpy.engine.json_schema import schema_to_gbnf


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
        source = _TokenSource(token_bytes, sorted(self.special), min(self.eog, default=self.n_vocab))
        self.tokenizer = LLTokenizer(TokenizerWrapper(source), n_vocab=len(source.tokens), slices=[])

    def ids_of(self, name: str) -> list[int]:
        """Ids of a token written as text in a grammar."""
        return self.tokenize(name) if self.tokenize else []


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

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("grammars with forced tokens are not used")


class TextGrammar:
    """State of one grammar along one generated sequence; see :class:`ikpy.engine.sampling.TokenGrammar`."""

    def __init__(self, lark: str, texts: TokenTexts) -> None:
        from llguidance import LLMatcher, LLParserLimits

        self._texts = texts
        limits = LLParserLimits(step_max_items=2_000_000, max_items_in_row=20_000)
        self._matcher = LLMatcher(texts.tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits)
        self._ended = False
        self._check()

    @property
    def complete(self) -> bool:
        """Whether the text so far is a whole sentence of the grammar."""
        return bool(self._matcher.is_accepting())

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next."""
        if self._ended:
            return False
        if token in self._texts.eog:
            return self.complete
        return bool(self._matcher.validate_tokens([token]) == 1)

    def mask(self) -> NDArray[np.bool_]:
        """True for every token that may come next, [n_vocab]."""
        n = self._texts.n_vocab
        if self._ended:
            return np.zeros(n, dtype=np.bool_)
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.unpackbits(words, bitorder="little")[:n].astype(np.bool_)
        allowed[list(self._texts.eog)] = self.complete
        return allowed

    def accept(self, token: int) -> None:
        """Advances by ``token``; raises GrammarError if the grammar does not allow it."""
        if not self.allows(token):
            raise GrammarError(f"Unexpected empty grammar stack after accepting token {token}")
        if token in self._texts.eog:
            self._ended = True
            return
        self._matcher.consume_token(token)
        self._check()

    def reset(self) -> None:
        """Returns to the start."""
        self._ended = False
        self._matcher.reset()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"grammar cannot be used: {self._matcher.get_error().splitlines()[0]}")


def gbnf_grammar(source: str, texts: TokenTexts) -> TextGrammar:
    """Grammar from GBNF text; raises GrammarError naming the place of an error."""
    rules = parse_gbnf(source)
    names: set[str] = set()
    nodes = list(rules.values())
    while nodes:
        node = nodes.pop()
        nodes += children(node)
        if isinstance(node, TokenRef) and isinstance(node.token, str):
            names.add(node.token)
    return TextGrammar(to_lark(rules, {name: texts.ids_of(name) for name in names}), texts)


def json_schema_grammar(schema: str | dict[str, Any] | bool, texts: TokenTexts) -> TextGrammar:
    """Grammar of the JSON texts a schema allows; raises GrammarError for one that cannot be converted."""
    parsed: Any = schema
    if isinstance(schema, str):
        try:
            parsed = json.loads(schema)
        except ValueError as error:
            raise GrammarError(f"JSON schema is not valid JSON: {error}") from None
    return gbnf_grammar(schema_to_gbnf(parsed), texts)


def make_grammar(grammar: str, json_schema: str | None, texts: TokenTexts) -> TextGrammar | None:
    """Grammar of a request, or None; raises GrammarError if both kinds are given."""
    if grammar and json_schema is not None:
        raise GrammarError('Either "json_schema" or "grammar" can be specified, but not both')
    if json_schema is not None:
        return json_schema_grammar(json_schema, texts)
    return gbnf_grammar(grammar, texts) if grammar else None
