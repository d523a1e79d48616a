"""A process that behaves towards the router like that of a model: `python model_stub.py FOLDER FAILURE`.

POST /echo tells its id, and headers and body of the request. A request whose body names a type (`"dies"`) gets the
beginning of an answer of that type, and the process ends. /wait makes the file `waiting` in the folder and answers
when there is a file `release`; `ending` says that the process was told to end. After /fail it answers as one whose
engine has ended, with the JSON text FAILURE; /busy and /refuse are answered with 503, with and without Retry-After.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER, FAILURE = Path(sys.argv[1]), sys.argv[2]


class Handler(BaseHTTPRequestHandler):
    """One request."""

    has_failed = False

    def do_GET(self) -> None:
        """Health, and what a router remembers."""
        self._answer(503 if self.has_failed else 200, FAILURE if self.has_failed else "{}")

    def do_POST(self) -> None:
        """What tests ask for."""
        body = self.rfile.read(int(self.headers["content-length"])).decode("utf-8", "replace")
        if self.path == "/fail":
            Handler.has_failed = True
        elif self.has_failed:
            return self._answer(503, FAILURE)
        if self.path in ("/busy", "/refuse"):
            return self._answer(503, "{}", {"Retry-After": "1"} if self.path == "/busy" else {})
        if '"dies"' in body:
            self._die(json.loads(body)["dies"])
        if self.path == "/wait":
            (FOLDER / "waiting").touch()
            while not (FOLDER / "release").exists():
                time.sleep(0.01)
        headers = {name.lower(): value for name, value in self.headers.items()}
        return self._answer(200, json.dumps({"pid": os.getpid(), "headers": headers, "body": body}))

    def _answer(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _die(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"{}\n\n")
        self.wfile.flush()
        os._exit(1)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


class Server(ThreadingHTTPServer):
    """Lets running requests end when it is closed."""

    daemon_threads = False


def end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> None:
    server = Server(("127.0.0.1", 0), Handler)

    def end(*_: object) -> None:
        (FOLDER / "ending").touch()
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, end)
    threading.Thread(target=end_with_parent, daemon=True).start()
    print(f'HTTP server listening port="{server.server_port}"', flush=True)
    server.serve_forever()
    server.server_close()


if __name__ == "__main__":
    main()
