"""The server with an encoder on a device: answers, too little memory, options of presets."""

from __future__ import annotations

from pathlib import Path

import pytest

from ikpy.cli.presets import read_presets
from tests.cuda.models import emulated
from tests.picture_models import data_uri, png, write_grid_projector, write_grid_text, write_projector, write_text
from tests.server.picture_requests import chat, client_of, picture, said, start, text

pytestmark = pytest.mark.usefixtures("emulation")
QUESTION = text("whatis"), picture(1), text("this")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model and projector."""
    folder = tmp_path_factory.mktemp("pictures")
    write_text(folder / "text.gguf")
    write_projector(folder / "mmproj.gguf")
    return folder


@pytest.mark.parametrize("placed", ["", "-ngl 3", "-ts 1,1", "-ot attn=CPU", "-mmdev CUDA1"])
def test_answers_are_those_of_the_cpu(placed: str, files: Path) -> None:
    with client_of(start(files, "-ngl", "0")) as client:
        truth = said(chat(client, *QUESTION))
    with emulated(2) as kernels, client_of(start(files, *placed.split())) as client:
        kernels.launched.clear()
        assert said(chat(client, *QUESTION)) == truth
        assert "layer_norm" in {node.kind for node in kernels.launched}  # only the encoder has them
        assert said(chat(client, *QUESTION)) == truth


def test_a_picture_that_does_not_fit(tmp_path: Path) -> None:
    """It is narrow, and has more patches than the largest one of usual proportions: an error of one line; others go
    on."""
    write_grid_text(tmp_path / "text.gguf")
    write_grid_projector(tmp_path / "mmproj.gguf")
    arguments = "--image-max-tokens", "20", "-np", "1", "-ub", "64"
    with emulated(1, mib=4), client_of(start(tmp_path, *arguments)) as client:
        first = said(chat(client, *QUESTION))
        narrow = {"type": "image_url", "image_url": {"url": data_uri(png(1, width=60000, height=1))}}
        body = {"messages": [{"role": "user", "content": [narrow]}], "max_tokens": 4}
        response = client.post("/v1/chat/completions", json=body)
        message = response.json()["error"]["message"]
        assert response.status_code == 400 and message.startswith("CUDA0: failed to allocate"), message
        assert "--no-mmproj-offload" in message and "\n" not in message
        assert said(chat(client, *QUESTION)) == first


def test_presets(tmp_path: Path) -> None:
    file = tmp_path / "models.ini"
    file.write_text("[a]\nmodel = a.gguf\nno-mmproj-offload = true\n[b]\nmodel = b.gguf\nmmproj-device = CUDA1\n")
    words = {
        name: [word for _, use in preset.uses for word in use] for name, preset in read_presets(str(file), {}).items()
    }
    assert "--no-mmproj-offload" in words["a"] and "CUDA1" in words["b"]
