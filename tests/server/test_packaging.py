"""The files of packaging/: the unit, the example configuration and the Dockerfile name only what there is."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import ikpy
from ikpy.cli.config import option_arguments, tomllib
from ikpy.cli.parser import parse
from tests.server.harness import MODELS
from tests.server.live import PATIENCE, address_of

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
CONFIG = PACKAGING / "server.toml"
UNIT = PACKAGING / "ikpy-server.service"
DOCKERFILE = PACKAGING / "Dockerfile"


def instructions(name: str) -> list[str]:
    """What stands behind a word at the beginning of the Dockerfile's lines."""
    return re.findall(rf"^{name} (.*)$", DOCKERFILE.read_text(), re.MULTILINE)


def test_the_example_configuration_is_accepted() -> None:
    params = parse(["--config", str(CONFIG)], "server", {})
    assert (params.server.models_max, params.context.n_parallel, params.server.log_format) == (2, 4, "json")
    assert params.warnings == []


def test_the_instructions_make_the_folder_of_models() -> None:
    folder = tomllib.loads(CONFIG.read_text())["server"]["models-dir"]
    made = re.findall(r"^# +install -d (.*?)(?: {2,}.*)?$", UNIT.read_text(), re.MULTILINE)
    assert folder in made[0].split()


def test_every_option_that_is_commented_out_is_accepted_too() -> None:
    commented = re.findall(r"^# ([a-z-]+ = .*)$", CONFIG.read_text(), re.MULTILINE)
    assert len(commented) >= 3
    for line in commented:
        ((key, value),) = tomllib.loads(line).items()
        assert parse(option_arguments("", "server", key, value), "server", {}).warnings == [], line


def test_the_unit_starts_a_known_command() -> None:
    unit = UNIT.read_text()
    program, *arguments = shlex.split(re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)[0])
    assert Path(program).name == "ikpy" and arguments[0] == "server"
    parse([str(CONFIG) if word == "/etc/ikpy/server.toml" else word for word in arguments[1:]], "server", {})
    assert re.search(r"^ExecReload=/bin/kill -HUP \$MAINPID$", unit, re.MULTILINE)
    stop = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    from ikpy.cli.params import ServerOptions

    assert int(stop[0]) >= 2 * ServerOptions().drain_seconds, (
        "requests of the router and of a model's process are waited for"
    )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    for name, text, complaint in (
        ("good", UNIT.read_text(), False),
        ("bad", UNIT.read_text().replace("LockPersonality", "LockPersonalitx"), True),
    ):
        unit = tmp_path / f"{name}.service"
        unit.write_text(text.replace("/opt/ikpy/bin/ikpy", "/bin/true"))
        line = ["systemd-analyze", "verify", "--man=no", str(unit)]
        result = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE, check=False)
        said = [line for line in result.stderr.splitlines() if name in line]
        assert bool(said) == complaint, result.stderr
        assert result.returncode == 0 or complaint


def test_the_dockerfile_starts_a_known_command() -> None:
    program, tool, *arguments = json.loads(instructions("ENTRYPOINT")[-1])
    assert (program, tool) == ("ikpy", "server")
    port = parse([*arguments, "-m", "/models/model.gguf"], "server", {}).server.port
    assert instructions("EXPOSE") == [str(port)]
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert program in project["scripts"]
    lowest = tuple(map(int, re.findall(r"\d+", project["requires-python"])))
    for image in instructions("FROM"):
        version = re.match(r"python:(\d+)\.(\d+)-", image)
        assert version and tuple(map(int, version.groups())) >= lowest


def test_a_server_of_the_example_passes_the_health_check(tmp_path: Path) -> None:
    """Started as the unit does, with the variables of its EnvironmentFile, and asked as the container does."""
    (tmp_path / "puppet.gguf").symlink_to(MODELS["PUPPET"])
    own = {"LLAMA_ARG_MODELS_DIR": str(tmp_path), "LLAMA_ARG_PORT": "0", "LLAMA_ARG_CTX_SIZE": "1024"}
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | own
    line = [sys.executable, "-m", "ikpy", "server", "--config", str(CONFIG)]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(line, env=environment, text=True, stdout=log, stderr=log)
        try:
            address = address_of(server)
            check = json.loads(instructions("HEALTHCHECK")[-1].partition("CMD ")[2])
            assert check[0] == "python"
            code = check[2].replace("http://127.0.0.1:8080", address)
            subprocess.run([sys.executable, check[1], code], timeout=PATIENCE, check=True)
            body = {"model": "puppet", "prompt": "x", "n_predict": 2}
            answer = httpx.post(f"{address}/completion", json=body, timeout=PATIENCE)
            assert answer.json()["tokens_predicted"] == 2
        finally:
            server.terminate()
            status = server.wait(PATIENCE)
    assert status == 0
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith('{"tid"')]
    assert any(json.loads(line)["msg"] == "model loaded" for line in lines), "log-format json"


def test_the_package_holds_what_a_server_needs() -> None:
    """Files that are no Python modules must be named in pyproject.toml to get into the wheel."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]
    package = Path(ikpy.__file__).parent
    listed = {
        path
        for name, globs in patterns.items()
        for glob in globs
        for path in (package.parent / name.replace(".", "/").replace("*", "")).glob(glob)
    }
    for folder in ("server/web", "assets"):
        needed = [
            path for path in (package / folder).rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
        ]
        assert needed
        missing = [path.name for path in needed if path not in listed]
        assert not missing, f"{missing} of {folder} are not in package-data"
