"""LoRA adapters and control vectors of a running server, and their command-line options."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import ikpy
from ikpy.engine.adapter import LoraAdapter
from ikpy.engine.model import Model
from tests.cpu.models.test_adapters import write_adapter, write_directions
from tests.server.harness import loaded, running, start_server

BUNDLED = str(ikpy.default_model_path())
PROMPT = "The old man looked at"
STORY = "The old man looked at the sea and thought of the years that had gone by"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An adapter of the bundled model's output and attention, and a control vector."""
    folder = tmp_path_factory.mktemp("adapters")
    model = Model.load(BUNDLED)
    random = np.random.default_rng(2)
    pairs = {}
    for name, value in model.weights.items():
        if name.endswith(("attn_output.weight", "ffn_down_shexp.weight", "attn_q_b.weight")):
            a = random.normal(0, value.shape[0] ** -0.5, (4, value.shape[0]))
            pairs[name.removesuffix(".weight")] = a, random.normal(0, 0.5, (value.shape[1], 4))
    assert pairs
    hp = model.hparams
    rows = {n: random.normal(0, 40.0, hp.n_embd).astype(np.float32) for n in range(1, hp.n_layer)}
    return (
        write_adapter(folder / "lora.gguf", hp.arch, pairs, 0.0),
        write_directions(folder / "vector.gguf", rows),
    )


def text(client: TestClient, **body: Any) -> str:
    response = client.post("/completion", json={"prompt": PROMPT, "temperature": 0, "n_predict": 8, **body})
    assert response.status_code == 200, response.text
    return response.json()["content"]


def scaled(path: Path, scale: float) -> str:
    """The text with the adapter at a scale, from the Python API."""
    llm = ikpy.LLM(lora=[(path, scale)], n_ctx=256, n_threads=1)
    return llm.generate(PROMPT, 8, temperature=0)


def test_adapter_scales(files: tuple[Path, Path]) -> None:
    """At load, by the route for all requests, and per request; caches made with other scales are not reused."""
    lora = files[0]
    wanted = {scale: scaled(lora, scale) for scale in (0.0, 1.0, -2.0)}
    assert len(set(wanted.values())) == 3
    with running(f"llama-server -m MODEL -t 1 -c 512 -np 2 --lora-scaled {lora} -2") as client:
        assert client.get("/lora-adapters").json() == [{"id": 0, "path": str(lora), "scale": -2.0}]
        for scale in (-2.0, 0.0, 1.0, 1.0, -2.0):
            assert text(client, lora=[{"id": 0, "scale": scale}], id_slot=0) == wanted[scale], f"scale {scale}"
        assert text(client) == wanted[-2.0]
        assert client.post("/lora-adapters", json=[{"id": 0, "scale": 1.0}]).json() == {"success": True}
        assert text(client) == wanted[1.0]
        assert client.post("/lora-adapters", json=[]).json() == {"success": True}
        assert text(client) == wanted[0.0], "an adapter that is not named is off"
        error = client.post("/lora-adapters", json=[{"id": 1, "scale": 1.0}])
        assert error.status_code == 400 and error.json()["error"]["message"] == "invalid adapter id"
        error = client.post("/completion", json={"prompt": PROMPT, "lora": [{"id": 3, "scale": 1}]})
        assert error.status_code == 400 and error.json()["error"]["message"] == "invalid adapter id"
        assert text(client) == wanted[0.0]
    with running(f"llama-server -m MODEL -t 1 -c 512 --lora {lora} --lora-init-without-apply") as client:
        assert text(client) == wanted[0.0]


def test_slot_files_keep_the_scales_of_their_text(files: tuple[Path, Path], tmp_path: Path) -> None:
    """A restored text serves requests of its own scales only, whatever the slot did before."""
    lora = files[0]
    body: dict[str, Any] = {"prompt": STORY, "temperature": 0, "n_predict": 4, "id_slot": 0}
    half, full = [{"id": 0, "scale": -2.0}], [{"id": 0, "scale": 1.0}]
    name = {"filename": "text"}
    with running(f"llama-server -m MODEL -t 1 -c 512 -cram 0 --lora {lora} --slot-save-path x", tmp_path) as client:
        wanted = client.post("/completion", json={**body, "lora": half}).json()["content"]
        plain = client.post("/completion", json={**body, "lora": full}).json()["content"]
        assert client.post("/completion", json={**body, "lora": half}).json()["content"] == wanted != plain
        saved = client.post("/slots/0?action=save", json=name)
        assert saved.status_code == 200, saved.text
        for scales, answer, is_kept in ((full, plain, False), (half, wanted, True)):
            client.post("/completion", json={**body, "lora": full})
            assert client.post("/slots/0?action=restore", json=name).status_code == 200
            found = client.post("/completion", json={**body, "lora": scales}).json()
            assert found["content"] == answer
            assert (found["timings"]["prompt_n"] == 1) == is_kept
    with running("llama-server -m MODEL -t 1 -c 512 --slot-save-path x", tmp_path) as client:
        assert client.post("/slots/0?action=restore", json=name).status_code == 400, "the adapter is not there"


def test_a_text_is_saved_before_a_request_with_other_scales_takes_its_slot(files: tuple[Path, Path]) -> None:
    body: dict[str, Any] = {"prompt": STORY, "temperature": 0, "n_predict": 4}
    own = [{"id": 0, "scale": -2.0}]
    with running(f"llama-server -m MODEL -t 1 -c 512 -np 1 --lora {files[0]}") as client:
        first = client.post("/completion", json=body).json()
        other = client.post("/completion", json={**body, "lora": own}).json()
        again = client.post("/completion", json=body).json()
        assert again["content"] == first["content"] != other["content"]
        assert other["timings"]["prompt_n"] == first["timings"]["prompt_n"] > 10, "nothing of the other text serves"
        assert again["timings"]["prompt_n"] == 1, "the text came back from memory"
        for more, wanted in (({"lora": own}, other), ({}, first)) * 2:
            found = client.post("/completion", json={**body, **more}).json()
            assert (found["content"], found["timings"]["prompt_n"]) == (wanted["content"], 1)
        client.post("/lora-adapters", json=own)
        found = client.post("/completion", json=body).json()
        assert (found["content"], found["timings"]["prompt_n"]) == (other["content"], 1), "texts stay with their scales"


def test_a_request_takes_a_slot_whose_text_serves_its_scales(files: tuple[Path, Path]) -> None:
    """Not the one with the same text of other scales, which would be lost."""
    body: dict[str, Any] = {"prompt": STORY, "temperature": 0, "n_predict": 4}
    own = [{"id": 0, "scale": -2.0}]
    with running(f"llama-server -m MODEL -t 1 -c 512 -np 2 -cram 0 --lora {files[0]}") as client:
        slots = [client.post("/completion", json={**body, **more}).json() for more in ({}, {"lora": own}) * 2]
        assert slots[0]["id_slot"] == slots[2]["id_slot"] != slots[1]["id_slot"] == slots[3]["id_slot"]
        assert [slot["timings"]["prompt_n"] for slot in slots[2:]] == [1, 1]


def test_requests_name_control_vectors_in_the_slot_folder_only(files: tuple[Path, Path], tmp_path: Path) -> None:
    _, vector = files
    folder = tmp_path / "slots"
    folder.mkdir()
    shutil.copy(vector, folder / "mood.gguf")
    outside = tmp_path / "outside.gguf"
    shutil.copy(vector, outside)
    with running("llama-server -m MODEL -t 1 -c 512 --slot-save-path slots/", folder) as client:
        inside = str(folder / "mood.gguf")
        for path in (str(outside), inside, "../outside.gguf", "./mood.gguf", "slots/mood.gguf", "/dev/null"):
            answer = client.post("/control-vectors/load", json={"path": path})
            assert answer.status_code == 400 and "only files in" in answer.json()["error"]
        assert client.post("/control-vectors/load", json={"path": "mood.gguf"}).json()["success"]
    with running("llama-server -m MODEL -t 1 -c 512") as client:
        assert client.post("/control-vectors/load", json={"path": str(vector)}).status_code == 400


def test_control_vectors_load_scale_and_unload(files: tuple[Path, Path]) -> None:
    vector = files[1]
    with running(f"llama-server -m MODEL -t 1 -c 512 --control-vector-scaled {vector} 0.5") as client:
        steered = text(client)
        assert client.post("/control-vectors/load", json={"path": str(vector)}).json()["success"]
        assert text(client) != steered
    with running("llama-server -m MODEL -t 1 -c 512 --slot-save-path slots/", vector.parent) as client:
        plain = text(client)
        assert plain != steered
        answer = client.post("/control-vectors/load", json={"path": vector.name, "scale": 0.25}).json()
        shown = {"id": 0, "path": vector.name, "scale": 0.25, "layer_start": -1, "layer_end": -1}
        assert answer == {"success": True, "control_vectors": [shown]}
        assert client.post("/control-vectors/apply", json=[{"id": 0, "scale": 0.5}]).json() == {"success": True}
        assert client.get("/control-vectors").json() == [{**shown, "scale": 0.5}]
        assert text(client) == steered
        assert client.post("/control-vectors/apply", json=[{"id": 7, "scale": 1}]).status_code == 400
        assert client.post("/control-vectors/unload", json={"id": 0}).json() == {"success": True}
        assert client.get("/control-vectors").json() == [] and text(client) == plain
        assert client.post("/control-vectors/unload", json={"id": 0}).status_code == 400


def test_nothing_of_a_text_made_with_other_vectors_is_gone_on_from(files: tuple[Path, Path]) -> None:
    """The vectors change while its slot is at work."""
    vector = files[1]
    body = {"prompt": "The old man looked at the sea and", "n_predict": 60, "temperature": 0, "ignore_eos": True}
    server = start_server("llama-server -m MODEL -t 1 -c 1024 -np 2 --slot-save-path slots/", vector.parent)
    client = TestClient(server.app)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, "/completion", json={**body, "n_predict": 400, "id_slot": 0})
        slot = server.engine.slots[0]
        while not slot.n_decoded:
            time.sleep(0.001)
        assert client.post("/control-vectors/load", json={"path": vector.name}).json()["success"]
        assert slot.is_stale, "the answer is still being written"
        assert answer.result().status_code == 200
        for i in range(2):
            found = client.post("/completion", json={**body, "id_slot": i}).json()
            assert found["timings"]["prompt_n"] == found["tokens_evaluated"] or i == 1
            fresh = client.post("/completion", json={**body, "id_slot": i, "cache_prompt": False}).json()
            assert found["content"] == fresh["content"]
    server.engine.stop(10)


def test_adapters_that_no_product_uses_are_refused(tmp_path: Path) -> None:
    model = loaded(BUNDLED).model
    pairs = {"output_norm": (np.ones((2, model.hparams.n_embd)), np.ones((1, 2)))}
    adapter = LoraAdapter.load(write_adapter(tmp_path / "lora.gguf", model.hparams.arch, pairs, 1.0), model)
    message = "'output_norm.weight' has no matrix product to act on with -mla 3; merge it into the model"
    with pytest.raises(ikpy.errors.UsageError, match=message):
        ikpy.Context(model, ikpy.ContextParams(n_ctx=256, n_threads=1, adapters=(adapter,)))
