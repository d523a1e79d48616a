"""Samplers for a vocabulary: newline and end tokens, DRY breakers and grammars as the engine wants them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ikpy.engine.dry import DryBreakers, dry_breakers
from ikpy.engine.sampler_parts import TokenGrammar
from ikpy.engine.sampling import Sampler, SamplingParams

if TYPE_CHECKING:
    from ikpy.engine.grammars.grammar import TokenTexts
    from ikpy.engine.grammars.lazy_grammar import Trigger
    from ikpy.engine.grammars.thinking import ThinkingLimit
    from ikpy.vocab import Vocab

MOST_KEPT = 16
"""Lists of breakers per vocabulary whose tokens are kept."""
_breakers: WeakKeyDictionary[Vocab, dict[tuple[str, ...], DryBreakers]] = WeakKeyDictionary()
_texts: WeakKeyDictionary[Vocab, dict[int, TokenTexts]] = WeakKeyDictionary()
_making_texts = threading.Lock()


def token_texts(vocab: Vocab, n_vocab: int) -> TokenTexts:
    """The vocabulary as grammars see it, padded to the width of the logits; made once per vocabulary."""
    from ikpy.engine.grammars.grammar import TokenTexts

    with _making_texts:
        cached = _texts.setdefault(vocab, {})
        if n_vocab not in cached:
            pieces = [vocab.token_to_piece(i) for i in range(vocab.n_tokens)] + [b""] * (n_vocab - vocab.n_tokens)
            special = [i for i, piece in enumerate(pieces) if not piece]
            cached[n_vocab] = TokenTexts(
                pieces, special, vocab.eog, lambda name: vocab.tokenize(name, add_special=False, parse_special=True)
            )
        return cached[n_vocab]


def breakers_of(params: SamplingParams, vocab: Vocab) -> DryBreakers:
    """DRY breakers as token sequences, made once for equal lists; empty while DRY is off."""
    if params.dry_multiplier <= 0 or params.dry_penalty_last_n == 0:
        return {}
    kept, wanted = _breakers.setdefault(vocab, {}), tuple(params.dry_sequence_breakers)
    found = kept.get(wanted)
    if found is None:
        pieces = [vocab.token_to_piece(i, special=True) for i in range(vocab.n_tokens)]
        found = dry_breakers(wanted, pieces, lambda text: vocab.tokenize(text, add_special=False))
        if len(kept) >= MOST_KEPT:
            kept.clear()
        kept[wanted] = found
    return found


def make_sampler(
    params: SamplingParams,
    vocab: Vocab,
    n_vocab: int,
    n_ctx: int,
    trigger: Trigger | None = None,
    thinking: ThinkingLimit | None = None,
) -> Sampler:
    """Sampler over logits of ``n_vocab`` tokens; -1 in a penalty window means ``n_ctx``. With a trigger the grammar
    holds only behind its marker; ``thinking`` limits reasoning.

    Raises GrammarError for a grammar or schema that cannot be used, UsageError for bad parameters.
    """
    grammar: TokenGrammar | None = None

    def piece(token: int) -> bytes:
        return vocab.token_to_piece(token, special=True)

    if params.has_grammar:
        from ikpy.engine.grammars.grammar import make_grammar
        from ikpy.engine.grammars.lazy_grammar import LazyGrammar

        texts = token_texts(vocab, n_vocab)
        found = make_grammar(params.grammar, params.json_schema, texts, regex=params.regex)
        grammar = found
        if trigger is not None and found is not None:
            grammar = LazyGrammar(found, trigger, texts, piece)
    if thinking is not None:
        from ikpy.engine.grammars.thinking import LimitedThinking

        grammar = LimitedThinking(thinking, grammar, n_vocab, piece)
    return Sampler(
        params,
        n_vocab,
        n_ctx=n_ctx,
        newline_id=vocab.nl,
        eos_ids=vocab.eog,
        breakers=breakers_of(params, vocab),
        grammar=grammar,
    )
