"""`ikpy server --models-dir`: the process that starts one server per model."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ikpy.cli.options import by_name
from ikpy.cli.params import CommonParams
from ikpy.cli.parser import Parser
from ikpy.cli.server import DRAIN_SECONDS, log_listening, origins, reload_keys

if TYPE_CHECKING:
    from ikpy.server.log import ServerLog
    from ikpy.server.router.catalog import ModelFile
    from ikpy.server.router.worker import Worker

OWN = (
    "--models-dir --models-max --models-ttl --models-memory --host --port -m --alias --api-key --api-key-file "
    "--cors --ssl-key-file --ssl-cert-file --path --webui --no-webui --log-disable"
).split()
"""Options of the router itself, which the processes of models do not get."""


def worker_arguments(arguments: Sequence[str]) -> tuple[list[str], set[str]]:
    """Arguments that all models share, and the environment variables of the others."""
    names = by_name("S")
    own = {names[name].names for name in OWN}
    parser = Parser("server", {})
    kept = [word for row, words in parser.uses(arguments) if row.names not in own for word in words]
    return kept, {variable for name in OWN for variable in parser.variables(names[name])}


def run_router(params: CommonParams, arguments: Sequence[str], listener: socket.socket, log: ServerLog) -> int:
    """Serve the models of a folder until a signal; returns the exit status."""
    from ikpy.server.keys import KeyRing, read_keys
    from ikpy.server.router.app import make_router
    from ikpy.server.router.pool import Limits, Pool
    from ikpy.server.router.worker import Worker, worker_environment
    from ikpy.server.serve import HttpServer, http_config
    from ikpy.server.settings import ServerSettings

    options = params.server
    shared, removed = worker_arguments(arguments)
    environment = worker_environment(removed)

    def make_worker(model: ModelFile) -> Worker:
        own = ["-m", str(model.path), "--alias", model.name, "--host", "127.0.0.1", "--port", "0", "--no-webui"]
        return Worker(model, [*shared, *own], environment, log, float(options.timeout))

    limits = Limits(options.models_max, float(options.models_ttl), options.models_memory << 20)
    pool = Pool(Path(options.models_dir or ""), limits, make_worker)
    settings = ServerSettings(timeout=options.timeout, webui=options.webui != "none", cors=origins(options.cors))
    ring = KeyRing(read_keys(options.api_keys, options.api_key_files))
    config = http_config(
        make_router(pool, settings, ring, log),
        timeout=settings.timeout,
        drain_seconds=DRAIN_SECONDS,
        ssl_key_file=options.ssl_key_file,
        ssl_cert_file=options.ssl_cert_file,
    )
    log.event("main", "models found", models=sorted(pool.catalog()))
    log_listening(params, log, listener)
    try:
        HttpServer(config, lambda: reload_keys(params, ring, log)).run(sockets=[listener])
    finally:
        listener.close()
    return 0
