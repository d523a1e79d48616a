"""`ikpy server` with several models, or one that sleeps: the process that starts one server per model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ikpy.cli.options import by_name
from ikpy.cli.params import CommonParams
from ikpy.cli.parser import Parser
from ikpy.cli.presets import COMMON, Preset, Uses, overriding, read_presets
from ikpy.cli.server import log_listening, origins, reload_keys
from ikpy.errors import IkpyError, ResourceError, UsageError
from ikpy.gguf.model_names import projectors_in
from ikpy.server.router.catalog import ModelFile, scan, size_of

if TYPE_CHECKING:
    import socket

    from ikpy.server.log import ServerLog
    from ikpy.server.router.pool import Pool
    from ikpy.server.router.worker import Worker

OWN = (
    "--models-dir --models-preset --models-max --models-ttl --models-memory --models-autoload --no-models-autoload "
    "--sleep-idle-seconds --host --port --reuse-port -m --alias --api-key --api-key-file --api-prefix --cors "
    "--ssl-key-file --ssl-cert-file --path --webui --no-webui --log-disable --log-enable --log-file --log-append "
    "--log-new --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps --log-colors"
).split()
"""Options of the router itself, which the processes of models do not get."""


def shared_uses(arguments: Sequence[str]) -> tuple[Uses, set[str]]:
    """Options that all models share, and the environment variables that processes of models do not get: those of the
    other options, and those of no option, of which the router has warned."""
    names = by_name("S")
    own = {names[name].names for name in OWN}
    parser = Parser("server", {})
    kept = [(row, words) for row, words in parser.uses(arguments) if row.names not in own]
    removed = {variable for name in OWN for variable in parser.variables(names[name])}
    return kept, removed.union(Parser("server", os.environ).unknown_variables())


SPARE_SECONDS = 5.0
"""Seconds a process may take to end after the requests that it gave up."""


class Models:
    """The models of a folder and of presets. Raises UsageError for presets that cannot be used."""

    def __init__(
        self, folder: str | None, presets: str | None, shared: Uses, stop_seconds: float = ModelFile.stop_seconds
    ) -> None:
        names = by_name("S")
        own = [names[name].names for name in OWN if name != "-m"]
        self._folder = None if folder is None else Path(folder)
        self._presets = {} if presets is None else read_presets(presets, own)
        self._common = self._presets.pop(COMMON, Preset([]))
        self._shared = shared
        self._stop_seconds = stop_seconds
        for name, preset in self._presets.items():
            if folder is None and not preset.sources:
                raise UsageError(f"--models-preset {presets}: [{name}]: no model, hf-repo or model-url")
        self.at_start = [name for name, preset in self._presets.items() if preset.at_start]

    def catalog(self) -> dict[str, ModelFile]:
        """Models there are now."""
        files = {} if self._folder is None else scan(self._folder)
        found = {
            name: self._with_options(file, self._presets.get(name, self._common), self._own_options(file))
            for name, file in files.items()
        }
        for name, preset in self._presets.items():
            if preset.sources:
                path = Path(preset.sources["-m"]) if "-m" in preset.sources else None
                size, changed = (0, 0) if path is None else size_of(path)
                found[name] = self._with_options(ModelFile(name, path, size, changed), preset)
        return found

    def _own_options(self, file: ModelFile) -> tuple[str, ...]:
        """Options of a model that lies with its projector in a folder below the one of the models."""
        assert file.path is not None
        folder = file.path.parent
        return ("--mmproj-auto",) if folder != self._folder and projectors_in(folder) else ()

    def _with_options(self, file: ModelFile, preset: Preset, own: tuple[str, ...] = ()) -> ModelFile:
        """The model with its own options and those of a preset that the command line does not set."""
        words = own + tuple(word for _, use in overriding(preset.uses, self._shared) for word in use)
        seconds = self._stop_seconds if preset.stop_seconds is None else preset.stop_seconds
        return replace(file, arguments=words, stop_seconds=seconds)


def single_model(params: CommonParams, stop_seconds: float) -> dict[str, ModelFile]:
    """The model of the command line."""
    source = params.model
    path = None if source.path is None else Path(source.path)
    name = source.alias or source.path or source.hf_repo or source.url or "bundled"
    size, changed = (0, 0) if path is None else size_of(path)
    return {name: ModelFile(name, path, size, changed, stop_seconds=stop_seconds)}


def request_tokens(model: ModelFile, words: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """Tokens of a slot, as the header of a file and the words of its command line give them; None if they do not."""
    from ikpy.gguf.reader import GGUFFile

    if model.path is None:
        return None
    parser = Parser("server", environment)
    try:
        parser.apply_config(words)
        parser.apply_environment()
        parser.apply_arguments(words)
        with GGUFFile.open(str(model.path), header_only=True) as file:
            key = f"{file.get('general.architecture')}.context_length"
            trained = dict(parser.params.model.kv_overrides).get(key, file.get(key))
    except (IkpyError, OSError):  # said where the model is loaded
        return None
    context = parser.params.context_params()
    cells = context.n_ctx or (trained if isinstance(trained, int) else 0)
    return -(-cells // context.cell_multiple) * context.cell_multiple // context.n_seq_max or None


def make_pool(params: CommonParams, arguments: Sequence[str], log: ServerLog) -> tuple[Pool, list[str]]:
    """The models' processes, none of them started, and the names of those to start at once.

    Raises:
        IkpyError: a folder or file of models that cannot be read, or holds what models cannot take.
    """
    from ikpy.server.router.pool import Limits, Pool
    from ikpy.server.router.worker import Worker, worker_environment

    options = params.server
    shared, removed = shared_uses(arguments)
    environment = worker_environment(removed)
    is_single = options.models_dir is None and options.models_preset is None
    alias = [] if params.model.alias is None else ["--alias", params.model.alias]

    def words_of(model: ModelFile) -> list[str]:
        return [*model.arguments, *(word for _, use in shared for word in use)]

    @lru_cache(maxsize=256)
    def tokens_of(model: ModelFile) -> int | None:
        return request_tokens(model, words_of(model), environment)

    def make_worker(model: ModelFile) -> Worker:
        words = [*words_of(model), "--host", "127.0.0.1", "--port", "0", "--no-webui"]
        words += [] if model.path is None else ["-m", str(model.path)]
        words += alias if is_single else ["--alias", model.name]
        return Worker(model, words, environment, log, float(options.timeout))

    stop_seconds = options.drain_seconds + SPARE_SECONDS
    if is_single:
        only = single_model(params, stop_seconds)
        catalog, at_start = lambda: only, list(only)
    else:
        models = Models(options.models_dir, options.models_preset, shared, stop_seconds)
        catalog, at_start = models.catalog, models.at_start
    sleep = options.sleep_idle_seconds > 0
    idle = options.sleep_idle_seconds if sleep else options.models_ttl
    limits = Limits(options.models_max, float(idle), options.models_memory << 20, options.models_autoload, sleep)
    return Pool(catalog, limits, make_worker, is_single=is_single, request_tokens=tokens_of), at_start


def run_router(
    params: CommonParams, arguments: Sequence[str], listeners: Sequence[socket.socket], log: ServerLog
) -> int:
    """Serve several models, or one that sleeps when it is idle, until a signal; returns the exit status."""
    from ikpy.server.keys import KeyRing, read_keys
    from ikpy.server.router.app import make_router
    from ikpy.server.serve import HttpServer, http_config
    from ikpy.server.settings import ServerSettings

    options = params.server
    pool, at_start = make_pool(params, arguments, log)
    settings = ServerSettings(
        timeout=options.timeout,
        webui=options.webui != "none",
        cors=origins(options.cors),
        api_prefix=options.api_prefix,
    )
    ring = KeyRing(read_keys(options.api_keys, options.api_key_files))
    config = http_config(
        make_router(pool, settings, ring, log, at_start),
        timeout=settings.timeout,
        drain_seconds=options.drain_seconds,
        ssl_key_file=options.ssl_key_file,
        ssl_cert_file=options.ssl_cert_file,
    )
    log.event("main", "models found", models=sorted(pool.catalog.read()))
    log_listening(params, log, listeners)

    def reload() -> None:
        reload_keys(params, ring, log)

    def stop() -> object:
        # The models' processes let their requests end by themselves, and are told at once.
        return asyncio.ensure_future(pool.stop())

    HttpServer(config, reload, options.drain_seconds, stop, give_up_seconds=0.0).run(sockets=list(listeners))
    if pool.problem is not None:
        raise ResourceError(pool.problem)
    return 0
