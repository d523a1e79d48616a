"""Every recorded request against ikpy: status, field names and their order, types, values, error texts, events."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.server.additions import without_additions
from tests.server.compare import Difference, compare, compare_shape
from tests.server.expected import SHAPE_ONLY, STATUS_ONLY, expected, free_fields
from tests.server.harness import load_captures, play, running

ROOT = Path(__file__).parents[2]
CAPTURES = {c["name"]: c for c in load_captures()}
NAMES = list(CAPTURES)


@functools.cache
def answers(command: str) -> dict[str, dict[str, Any]]:
    """Answers to all captures of one server, asked in order."""
    with tempfile.TemporaryDirectory() as folder, running(command, Path(folder)) as client:
        return {name: play(client, CAPTURES[name]) for name in NAMES if CAPTURES[name]["server"] == command}


@pytest.mark.parametrize("name", NAMES)
def test_capture(name: str) -> None:
    capture = CAPTURES[name]
    got = answers(capture["server"])[name]
    if name in STATUS_ONLY:
        assert got["status"] == STATUS_ONLY[name][0], f"{name}: {got}"
        return
    want = expected(capture, CAPTURES)
    assert got["status"] == want["status"], f"{name}: status; answer {str(got)[:300]}"
    try:
        for key in ("response", "events", "response_text"):
            if want.get(key) is not None:
                answer = without_additions(capture["path"], want[key], got.get(key))
                if name in SHAPE_ONLY:
                    compare_shape(want[key], answer, key)
                else:
                    compare(want[key], answer, key, free_fields(capture))
    except Difference as difference:
        pytest.fail(f"{name}: {difference}", pytrace=False)


def test_the_page_of_differences_is_up_to_date() -> None:
    line = [sys.executable, str(ROOT / "scripts" / "make_server_differences.py"), "--check"]
    result = subprocess.run(line, capture_output=True, text=True, check=False)
    assert result.returncode == 0, "run: python scripts/make_server_differences.py"


def test_what_clients_cause_is_no_server_error() -> None:
    """Wherever the recorded program answered with an error, ended, or went silent: 4xx, or 501, with a message."""
    refused = 0
    for name, capture in CAPTURES.items():
        got = answers(capture["server"])[name]
        assert got["status"] < 500 or got["status"] == 501, name
        if got["status"] >= 400 and capture["method"] != "HEAD":
            error = got["response"]["error"]
            assert error if isinstance(error, str) else error["message"], name
            refused += capture.get("status") in (None, 400, 500)
    assert refused > 100
