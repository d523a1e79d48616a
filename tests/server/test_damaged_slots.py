"""Damaged slot files: restored, or refused with a message; the server goes on either way."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from starlette.testclient import TestClient

from tests.cpu.gguf.damage import damage_state
from tests.server.harness import running

CASES = 60


def complete(client: TestClient, slot: int) -> None:
    body = {"prompt": "The sea, the sea, the old man", "n_predict": 2, "id_slot": slot, "cache_prompt": True}
    response = client.post("/completion", json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("types", ["", "-ctk q8_0 -ctv q4_0"])
def test_damaged_slot_files(types: str, tmp_path: Path) -> None:
    command = f"llama-server -m PUPPET -c 256 -np 2 -t 1 --temp 0 --slot-save-path X {types}"
    statuses = set()
    with running(command, tmp_path) as client:
        complete(client, 0)
        client.post("/slots/0?action=save", json={"filename": "state"}).raise_for_status()
        intact = (tmp_path / "state").read_bytes()
        for seed in range(CASES):
            (tmp_path / "damaged").write_bytes(damage_state(Random(f"{types} {seed}"), intact))
            response = client.post("/slots/1?action=restore", json={"filename": "damaged"})
            statuses.add(response.status_code)
            assert response.status_code in (200, 400), f"seed {seed}: {response.status_code} {response.text[:500]}"
            if response.status_code == 400:
                message = response.json()["error"]["message"]
                assert message and "\n" not in message and len(message) < 500, f"seed {seed}: {message[:600]!r}"
            else:
                complete(client, 1)  # the checksums are right
        complete(client, 0)
    assert statuses == {200, 400}
