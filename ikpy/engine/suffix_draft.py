"""Drafts from the longest suffix that occurred before, weighed by how often each continuation followed
(suffix decoding, arXiv:2411.04975), on a suffix automaton that grows by one token in amortized constant time.
"""

from __future__ import annotations

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

    def best(self, state: int) -> tuple[int, float] | None:
        """Most frequent token behind a state's substrings and its share; None at the end of the text."""
        counts = {token: 1 + self._again.get((state, token), 0) for token in self.next[state]}
        if not counts:
            return None
        token = max(counts, key=lambda t: counts[t])
        return token, counts[token] / sum(counts.values())

    def repeated_suffix(self, longest: int) -> int:
        """State of the longest suffix of the text, of at most ``longest`` tokens, that also ends elsewhere."""
        at = self.link[self.last]
        while at > 0 and self.length[self.link[at]] >= longest:
            at = self.link[at]
        return max(at, 0)


class SuffixDraft(Drafter):
    """Follows the most frequent continuation while the draft as a whole is likelier than ``p_min`` says.

    ``corpus``: texts that are known from the start, as token lists.
    """

    name = "suffix"

    def __init__(self, params: SpeculativeParams, corpus: Sequence[Sequence[int]] = ()) -> None:
        self.params = params
        self._corpus = corpus
        self._restart()

    def _restart(self) -> None:
        self._automaton = SuffixAutomaton()
        self._learned: list[int] = []
        separator = -1
        for text in self._corpus:
            for token in text:
                self._automaton.extend(token)
            self._automaton.extend(separator)
            separator -= 1

    def begin(self, tokens: Sequence[int]) -> None:
        self._restart()

    def draft(self, tokens: Sequence[int], n_max: int, p_min: float | None = None) -> list[int]:
        known = len(self._learned)
        if known > len(tokens) or (known and tokens[known - 1] != self._learned[-1]):
            self._restart()
            known = 0
        for token in tokens[known:]:
            self._automaton.extend(token)
        self._learned += tokens[known:]
        return self._follow(n_max, self.params.p_min if p_min is None else p_min)

    def _follow(self, n_max: int, p_min: float) -> list[int]:
        automaton, params = self._automaton, self.params
        state = automaton.repeated_suffix(params.max_depth)
        matched = min(automaton.length[state], params.max_depth)
        if matched < params.pattern_len:
            return []
        found: list[int] = []
        probability = 1.0
        while len(found) < min(n_max, LENGTH_PER_MATCHED * matched):
            best = automaton.best(state)
            if best is None:
                break
            token, share = best
            probability *= share
            if token < 0 or probability < p_min:
                break
            found.append(token)
            state = automaton.next[state][token]
        return found
