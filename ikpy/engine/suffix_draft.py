"""Drafts from the longest suffix that occurred before, weighed by how often each continuation followed
(suffix decoding, arXiv:2411.04975), on a suffix automaton that grows by one token in amortized constant time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ikpy.engine.speculative import Drafter, SpeculativeParams

# Contexts counted per token: of "aaaa..." every suffix repeats, counting all would be quadratic.
CONTEXTS = 16
# A long match justifies a long draft.
LENGTH_PER_MATCHED = 4


class SuffixAutomaton:
    """All substrings of a growing text: states with transitions, suffix links, and counts of what followed."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.last = 0
        self._again: dict[tuple[int, int], int] = {}  # (state, token) -> how often it followed after the first time

    def _add_state(self, length: int, following: dict[int, int], link: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        return len(self.next) - 1

    def extend(self, token: int) -> None:
        """Appends a token."""
        self._count(token)
        state = self._add_state(self.length[self.last] + 1, {}, 0)
        at = self.last
        while at >= 0 and token not in self.next[at]:
            self.next[at][token] = state
            at = self.link[at]
        if at >= 0:
            target = self.next[at][token]
            self.link[state] = target if self.length[target] == self.length[at] + 1 else self._split(at, token, target)
        self.last = state

    def _split(self, at: int, token: int, target: int) -> int:
        """A copy of a state for the shorter of its substrings, which now end in two places."""
        copy = self._add_state(self.length[at] + 1, dict(self.next[target]), self.link[target])
        for follower in self.next[target]:
            if (target, follower) in self._again:
                self._again[copy, follower] = self._again[target, follower]
        self.link[target] = copy
        while at >= 0 and self.next[at].get(token) == target:
            self.next[at][token] = copy
            at = self.link[at]
        return copy

    def _count(self, token: int) -> None:
        at = self.link[self.last]
        for _ in range(CONTEXTS):
            if at <= 0:
                break
            if token in self.next[at]:
                self._again[at, token] = self._again.get((at, token), 0) + 1
            at = self.link[at]

    def counts(self, state: int) -> dict[int, int]:
        """How often each token followed a state's substrings."""
        return {token: 1 + self._again.get((state, token), 0) for token in self.next[state]}

    def shortened(self, state: int, longest: int) -> int:
        """State of the suffix of at most ``longest`` tokens of a state's substrings."""
        while state > 0 and self.length[self.link[state]] >= longest:
            state = self.link[state]
        return state

    def repeated_suffix(self, longest: int) -> int:
        """State of the longest suffix of the text, of at most ``longest`` tokens, that also ends elsewhere."""
        return self.shortened(max(self.link[self.last], 0), longest)

    @classmethod
    def of_texts(cls, texts: Sequence[Sequence[int]]) -> SuffixAutomaton:
        """All substrings of several texts."""
        automaton = cls()
        for number, text in enumerate(texts):
            for token in text:
                automaton.extend(token)
            automaton.extend(-1 - number)  # no token, so that nothing goes on from one text to the next
        return automaton


class CorpusMatch:
    """The longest suffix of a growing text that a corpus has: its state there and its length. Only reads the corpus."""

    def __init__(self, corpus: SuffixAutomaton) -> None:
        self.corpus = corpus
        self.state = self.length = 0

    def extend(self, token: int) -> None:
        """Appends a token to the text."""
        corpus = self.corpus
        while self.state > 0 and token not in corpus.next[self.state]:
            self.state = corpus.link[self.state]
            self.length = corpus.length[self.state]
        if token in corpus.next[self.state]:
            self.state = corpus.next[self.state][token]
            self.length += 1


Place = tuple[SuffixAutomaton, int]


def likeliest(places: Sequence[Place]) -> tuple[int, float] | None:
    """Most frequent token behind the substring that states stand for, and its share; None if nothing follows."""
    counts: Counter[int] = Counter()
    for automaton, state in places:
        counts.update(automaton.counts(state))
    if not counts:
        return None
    token = max(counts, key=lambda t: counts[t])
    return token, counts[token] / counts.total()


class SuffixDraft(Drafter):
    """Follows the most frequent continuation while the draft as a whole is likelier than ``p_min`` says.

    ``corpus``: texts that are known from the start; drafters may share them.
    """

    name = "suffix"

    def __init__(self, params: SpeculativeParams, corpus: SuffixAutomaton | None = None) -> None:
        self.params = params
        self._corpus = SuffixAutomaton() if corpus is None else corpus
        self._restart()

    def _restart(self) -> None:
        self._text = SuffixAutomaton()
        self._match = CorpusMatch(self._corpus)
        self._learned: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        self._restart()

    def draft(self, tokens: Sequence[int], n_max: int, p_min: float | None = None) -> list[int]:
        known = len(self._learned)
        if known > len(tokens) or (known and tokens[known - 1] != self._learned[-1]):
            self._restart()
            known = 0
        for token in tokens[known:]:
            self._text.extend(token)
            self._match.extend(token)
        self._learned += tokens[known:]
        return self._follow(n_max, self.params.p_min if p_min is None else p_min)

    def _follow(self, n_max: int, p_min: float) -> list[int]:
        places, matched = self._matches()
        if matched < self.params.pattern_len:
            return []
        found: list[int] = []
        probability = 1.0
        while len(found) < min(n_max, LENGTH_PER_MATCHED * matched):
            best = likeliest(places)
            if best is None:
                break
            token, share = best
            probability *= share
            if token < 0 or probability < p_min:
                break
            found.append(token)
            places = [(a, a.next[state][token]) for a, state in places if token in a.next[state]]
        return found

    def _matches(self) -> tuple[list[Place], int]:
        """Where the longest suffix that occurred before stands, in the corpus and in the text, and its length."""
        text, match = self._text, self._match
        repeated = text.repeated_suffix(self.params.max_depth)
        matched = min(max(match.length, text.length[repeated]), self.params.max_depth)
        places = [(match.corpus, match.corpus.shortened(match.state, matched))] if match.length >= matched else []
        return places + ([(text, repeated)] if text.length[repeated] >= matched else []), matched
