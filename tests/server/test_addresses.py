"""Where a server answers: prefix of its paths, several addresses, Unix sockets; and lists of keys."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import httpx
import pytest

from ikpy.cli.listeners import close, listen, port_of
from ikpy.cli.parser import parse
from ikpy.cli.server import page_address
from ikpy.errors import ResourceError, UsageError
from tests.server.harness import running
from tests.server.live import PATIENCE, wait_for
from tests.server.test_command import process

TEXT = {"prompt": "The old man looked at", "n_predict": 4, "temperature": 0}


def test_all_routes_are_under_the_prefix() -> None:
    with running("llama-server -m MODEL -t 1 -c 512 -np 1 --api-prefix /llm/v2/ --api-key a") as client:
        for path in ("/llm/v2/", "/llm/v2/page.js", "/llm/v2/health", "/llm/v2/v1/models"):
            assert client.get(path).status_code == 200, path
        for path in ("/", "/health", "/llm/v2health", "/completion", "//health"):
            assert client.get(path).status_code == 404, path
        answer = client.get("/llm/v2?x=1", follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (307, "/llm/v2/")
        assert client.post("/llm/v2/completion", json=TEXT).status_code == 401, "a key is needed there too"
        answer = client.post("/llm/v2/completion", json=TEXT, headers={"x-api-key": "a"})
        assert answer.json()["content"] == " the room, and"


def test_files_of_a_directory_are_under_the_prefix(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "index.html").write_text("<p>sub")
    (tmp_path / "index.html").write_text("<p>top")
    with running(f"llama-server -m MODEL -t 1 -c 512 -np 1 --api-prefix /llm --path {tmp_path}") as client:
        assert client.get("/llm/").text == "<p>top"
        assert client.get("/llm/sub").text == "<p>sub", "with the redirection to the folder"
        assert client.get("/sub/").status_code == 404


@pytest.mark.parametrize("prefix", ["llm", "/a//b", "/a?b", "/a b"])
def test_bad_prefixes(prefix: str) -> None:
    with pytest.raises(UsageError, match="expected a path"):
        parse(["--api-prefix", prefix], "server", {})


def test_props_need_the_option() -> None:
    with running("llama-server -m MODEL -t 1 -c 512 -np 1") as client:
        assert client.post("/props", json={}).status_code == 501
    with running("llama-server -m MODEL -t 1 -c 512 -np 1 --props") as client:
        assert client.post("/props", json={}).json() == {"success": True}
        assert client.post("/props").json() == {"success": True}
        answer = client.post("/props", json={"temperature": 0})
        assert answer.status_code == 400 and "temperature" in answer.json()["error"]["message"]
        assert client.post("/props", json=[1]).status_code == 400


def test_lists_of_keys_and_addresses() -> None:
    params = parse(["--api-key", "a, b,", "--api-key", "c", "--host", "127.0.0.1,::1"], "server", {})
    assert params.server.api_keys == ["a", "b", "c"] and params.server.hosts == ["127.0.0.1", "::1"]
    variables = {"LLAMA_API_KEY": "d,e", "LLAMA_ARG_HOST": "0.0.0.0"}
    params = parse([], "server", variables)
    assert params.server.api_keys == ["d", "e"] and params.server.hosts == ["0.0.0.0"]
    with pytest.raises(UsageError, match="expected an address"):
        parse(["--host", ","], "server", {})


@pytest.mark.parametrize("line", ['api-key = ""', 'api-key = [","]'])
def test_no_key_does_not_open_the_server(line: str, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(line)
    for arguments, variables in ((["--config", str(file)], {}), (["--api-key", ""], {}), ([], {"LLAMA_API_KEY": " "})):
        with pytest.raises(UsageError, match="no key in it, which would open the server"):
            parse(arguments, "server", variables)


def test_one_port_for_all_addresses(tmp_path: Path) -> None:
    hosts = ["127.0.0.1", "127.0.0.2", str(tmp_path / "x.sock")]
    found = listen(hosts, 0)
    port = port_of(found)
    assert len({item.getsockname()[1] for item in found[:2]}) == 1 and port > 0
    for family, address in ((socket.AF_INET, ("127.0.0.2", port)), (socket.AF_UNIX, hosts[2])):
        with socket.socket(family) as client:
            client.connect(address)  # it waits until the model is loaded
    for host in ("127.0.0.1", hosts[2]):
        with pytest.raises(ResourceError, match="Address already in use"):
            listen([host], port)
    close(found, hosts)
    assert not os.path.exists(hosts[2])


@pytest.mark.parametrize(
    ("line", "url"),
    [
        ("", "http://127.0.0.1:81/"),
        ("--host 0.0.0.0 --api-prefix /llm", "http://127.0.0.1:81/llm/"),
        ("--host x.sock,::", "http://[::1]:81/"),
        ("--host example.org --ssl-key-file k --ssl-cert-file c", "https://example.org:81/"),
        ("--host x.sock", ""),
    ],
)
def test_the_log_has_an_address_for_browsers(line: str, url: str) -> None:
    assert page_address(parse(line.split(), "server", {}), "81") == url


def test_unix_sockets_that_are_left(tmp_path: Path) -> None:
    path = str(tmp_path / "x.sock")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    found = listen([path], 0)  # nobody listens there
    with pytest.raises(ResourceError, match=r"x\.sock \(Address already in use\)"):
        listen([path], 0)
    close(found, [path])
    Path(path).write_text("a file")
    with pytest.raises(ResourceError, match=r"x\.sock"):
        listen([path], 0)
    assert Path(path).read_text() == "a file"


def test_a_server_on_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "ikpy.sock")
    with process("-c", "256", "--host", f"127.0.0.1,{path}") as (server, address):
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=PATIENCE) as client:
            assert client.post("http://ikpy/completion", json=TEXT).json()["tokens_predicted"] == 4
        assert httpx.get(f"{address}/health", timeout=PATIENCE).status_code == 200
        server.terminate()
        server.wait(PATIENCE)
        assert wait_for(lambda: not os.path.exists(path))


@pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="a port belongs to one server")
def test_a_port_of_several_servers() -> None:
    first = listen(["127.0.0.1"], 0, shared=True)
    port = port_of(first)
    second = listen(["127.0.0.1"], port, shared=True)
    assert port_of(second) == port
    with pytest.raises(ResourceError, match="couldn't bind"):
        listen(["127.0.0.1"], port)
    close([*first, *second], [])
