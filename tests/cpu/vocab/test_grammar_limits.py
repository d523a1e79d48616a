"""Grammars that ask for unbounded work end soon, with a short error or as a usable grammar, in little memory."""

from __future__ import annotations

import json
import subprocess
import sys

from ikpy.engine.grammars.gbnf import LONGEST_MESSAGE
from ikpy.engine.grammars.grammar import LONGEST_SOURCE, TokenTexts, regex_grammar
from tests.cpu.vocab.grammar_bombs import BOMBS
from tests.shared import ROOT

PATIENCE = 600.0
"""Seconds for all of them; each takes some seconds at most, but without limits they would take years."""
MOST_MEMORY = 1 << 20
"""KiB that all may add to a process."""


def test_short_texts_cannot_ask_for_unbounded_work() -> None:
    line = [sys.executable, "-m", "tests.cpu.vocab.grammar_bombs"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, _, _ in found] == list(BOMBS), done.stderr[-2000:]
    for name, error, _ in found:
        wanted = BOMBS[name][2]
        assert (error is None) if wanted is None else (wanted in (error or "")), f"{name}: {error}"
        assert error is None or len(error) <= LONGEST_MESSAGE + 5, f"{name}: {len(error)} characters"
    assert found[-1][2] < MOST_MEMORY, f"{found[-1][2]} KiB"


def test_long_grammars_push_each_other_out() -> None:
    """A compiled grammar takes memory in proportion to its text."""
    texts = TokenTexts([bytes([i]) for i in range(256)], eog=(0,))
    for i in range(8):
        regex_grammar(f"{i}" + "a" * (LONGEST_SOURCE // 4), texts)
    assert 1 <= len(texts._compiled) <= 4
    regex_grammar("b", texts)
    assert ("regex", "b") in texts._compiled
