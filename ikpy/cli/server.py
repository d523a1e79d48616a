"""`ikpy server`: the HTTP server."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from ikpy.cli.banner import build_lines
from ikpy.cli.checks import need_files
from ikpy.cli.drafters import changes_for_drafts, needs_of_drafts, speculation
from ikpy.cli.listeners import UNIX_ENDING, close, listen, port_of
from ikpy.cli.log_streams import beside
from ikpy.cli.logs import print_log
from ikpy.cli.params import CommonParams
from ikpy.cli.session import Session, load
from ikpy.cli.start import WORKER, start
from ikpy.errors import OutOfMemoryError, UsageError
from ikpy.server.router import NO_MEMORY
from ikpy.signals.termination import hangups_passed_over

if TYPE_CHECKING:
    import socket

    from ikpy.engine.params import ContextParams
    from ikpy.server.build import Server
    from ikpy.server.keys import KeyRing
    from ikpy.server.log import ServerLog
    from ikpy.server.serve import Reception
    from ikpy.server.settings import ServerSettings

LEAST_SLOT = 16
"""Tokens."""


def run(arguments: Sequence[str]) -> int:
    """Serve until a signal ends it; returns the exit status."""
    params = start("server", arguments, "HTTP server with the APIs of llama.cpp, OpenAI, Anthropic and Ollama.")
    if params is None:
        return 0
    if os.environ.get(WORKER):
        serve_one_model(params)
    check(params)
    print_log(params, build_lines())
    hosts = [] if params.model.dry_run else params.server.hosts
    listeners = listen(hosts, params.server.port, shared=params.server.reuse_port)
    log = standard_log(params)
    try:
        with hangups_passed_over():  # keys are read when the model is there, and again at hangups from then on
            return run_on(listeners, params, arguments, log)
    finally:
        log.finish()
        close(listeners, hosts)


def run_on(listeners: Sequence[socket.socket], params: CommonParams, arguments: Sequence[str], log: ServerLog) -> int:
    """Serve on bound sockets; without any, end when the plan of a dry run is printed."""
    log_start(params, log)
    if is_router(params):
        from ikpy.cli.router import run_router

        return run_router(params, arguments, listeners, log)
    if not listeners:
        load_server(params, log)  # a dry run ends with the context
        return 0
    from ikpy.server.serve import Reception

    options = params.server
    with Reception(
        listeners,
        prefix=options.api_prefix,
        drain_seconds=options.drain_seconds,
        timeout=options.timeout,
        ssl_key_file=options.ssl_key_file,
        ssl_cert_file=options.ssl_cert_file,
    ) as reception:
        try:
            server = load_server(params, log)
        except (MemoryError, OutOfMemoryError) as error:
            if not os.environ.get(WORKER):
                raise
            from ikpy.cli import report

            report(error, ["server", *arguments], verbose=False)
            return NO_MEMORY
        return serve_until_signal(server, reception, params, log, listeners)


def standard_log(params: CommonParams) -> ServerLog:
    """The log of a server, also in the file of --log-file; an empty one with --log-disable."""
    from ikpy.server.log import ServerLog

    if params.log.disable:
        return ServerLog()
    style = params.server.log_format
    return ServerLog.standard(style, beside(sys.stdout, plain=style == "json"), shows_timings=params.log.timings)


def load_server(params: CommonParams, log: ServerLog) -> Server:
    """The model with everything that serves it."""
    server = make_server(load(params, **changes_for_drafts(params)), log)
    log.event("main", "model loaded")
    return server


def serve_until_signal(
    server: Server, reception: Reception, params: CommonParams, log: ServerLog, listeners: Sequence[socket.socket]
) -> int:
    """Answer requests; returns the exit status."""
    from ikpy.server.serve import end_with_parent, serve

    log_listening(params, log, listeners)
    if os.environ.get(WORKER):
        end_with_parent()
    drain_seconds = params.server.drain_seconds
    serve(server, reception, drain_seconds=drain_seconds, reload=lambda: reload_keys(params, server.front.keys, log))
    server.engine.finish_drafts()
    return 0


def log_listening(params: CommonParams, log: ServerLog, listeners: Sequence[socket.socket]) -> None:
    """Log where the server listens, with the end of its first key."""
    from ikpy.server.keys import key_end, read_keys

    options = params.server
    names = list(read_keys(options.api_keys, options.api_key_files))
    port, hosts = str(port_of(listeners)), ",".join(options.hosts)
    if os.environ.get(WORKER):
        log.event("main", "HTTP server listening", port=port, hostname=hosts)
        return
    keys = {"api_key": f"api_key: {key_end(names[0])}"} if names else {}
    log.event("main", "HTTP server listening", **keys, port=port, hostname=hosts, url=page_address(params, port))


def page_address(params: CommonParams, port: str) -> str:
    """What to open in a browser on this machine; empty if only Unix sockets are listened on."""
    options = params.server
    host = next((host for host in options.hosts if not host.endswith(UNIX_ENDING)), None)
    if host is None:
        return ""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if options.ssl_key_file else "http"
    return f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{port}{options.api_prefix}/"


def reload_keys(params: CommonParams, ring: KeyRing, log: ServerLog) -> None:
    """Read the key files again; the old keys stay if that fails."""
    from ikpy.server.keys import read_keys

    try:
        found = read_keys(params.server.api_keys, params.server.api_key_files)
    except UsageError as error:
        log.failure("reload", "keys not reloaded", error=str(error))
        return
    ring.replace(found)
    log.event("reload", "keys reloaded", n_keys=len(found))


def serve_one_model(params: CommonParams) -> None:
    """Leave to the router what a configuration file says about it; it finds the port in the log."""
    params.log.disable = False
    params.server.ssl_key_file = params.server.ssl_cert_file = params.server.path = None


def is_router(params: CommonParams) -> bool:
    """Whether this process hands requests on to those of models."""
    sleeps = params.server.sleep_idle_seconds > 0 and not params.model.dry_run
    return (has_models(params) or sleeps) and not os.environ.get(WORKER)


def has_models(params: CommonParams) -> bool:
    """Whether the command line asks for several models."""
    return params.server.models_dir is not None or params.server.models_preset is not None


def check(params: CommonParams) -> None:
    """Refuse what cannot work before the model is loaded."""
    from ikpy.server.keys import read_keys

    server = params.server
    if is_router(params) and server.path:
        raise UsageError("--path is not served by a router (--models-dir, --models-preset, --sleep-idle-seconds)")
    if is_router(params) and has_models(params):
        given = "--models-preset" if server.models_dir is None else "--models-dir"
        if params.model.path or params.model.hf_repo or params.model.url:
            raise UsageError(f"{given} and a single model (-m, -hf, -mu) exclude each other")
        if server.models_dir is not None and not Path(server.models_dir).is_dir():
            raise UsageError(f"--models-dir {server.models_dir}: no such directory")
        if params.model.dry_run:
            raise UsageError(f"--dry-run plans one model: give it with -m instead of {given}")
    if server.slot_autosave and not server.slot_save_path:
        raise UsageError("--slot-autosave needs --slot-save-path")
    if bool(server.ssl_key_file) != bool(server.ssl_cert_file):
        raise UsageError("HTTPS needs both --ssl-key-file and --ssl-cert-file")
    need_files("--ssl-key-file", [server.ssl_key_file] if server.ssl_key_file else [])
    need_files("--ssl-cert-file", [server.ssl_cert_file] if server.ssl_cert_file else [])
    read_keys(server.api_keys, server.api_key_files)  # raises UsageError
    check_slots(params.context_params())
    if server.path and not Path(server.path).is_dir():
        raise UsageError(f"--path {server.path}: no such directory")
    if server.slot_save_path:
        try:
            Path(server.slot_save_path).mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=server.slot_save_path):  # the rights alone do not tell whether files can be made
                pass
        except OSError as error:
            raise UsageError(f"--slot-save-path {server.slot_save_path}: {error.strerror}") from None


def check_slots(context: ContextParams) -> None:
    """UsageError if the slots of a context of given size would be too small."""
    n_ctx = -(-context.n_ctx // context.cell_multiple) * context.cell_multiple
    if 0 < n_ctx // context.n_seq_max < LEAST_SLOT or 0 < n_ctx < context.n_seq_max:
        n_slots = context.n_seq_max
        raise UsageError(f"a context of {n_ctx} tokens is too small for {n_slots} slots: raise -c or lower -np")


def log_start(params: CommonParams, log: ServerLog) -> None:
    """Log build and system."""
    from ikpy.machine.threads import hardware_threads
    from ikpy.tools.cpu_features import feature_flags
    from ikpy.tools.machine import build_commit, build_number

    flags = "".join(f"{name} = {int(value)} | " for name, value in feature_flags().items())
    log.event("main", "build info", build=build_number(), commit=build_commit())
    log.event(
        "main", "system info", n_threads=params.n_threads, n_threads_batch=params.context.n_threads_batch or -1,
        total_threads=hardware_threads(), system_info=flags,
    )  # fmt: skip


def make_server(session: Session, log: ServerLog) -> Server:
    """Context, engine and application for a loaded model."""
    from ikpy.server.build import build_server

    params = session.params
    settings = server_settings(params, session.path, session.model.hparams.pooling)
    if session.model.arch.is_encoder and not settings.embeddings:
        raise UsageError(f"a model of architecture '{session.model.hparams.arch}' embeds texts only: add --embeddings")
    if session.model.arch.decoder_start is not None and settings.embeddings:
        raise UsageError(
            f"--embeddings: a model of architecture '{session.model.hparams.arch}' writes texts; convert its encoder "
            "alone (t5encoder), or use ikpy.LLM.embed"
        )
    if settings.pooling == "rank" and session.model.arch.classifier is None:
        raise UsageError("--pooling rank needs a model with a classification head (tensors cls, cls.output)")
    n_slots = settings.n_slots
    context = session.new_context(n_seq_max=n_slots, **needs_of_drafts(session))
    check_slots(replace(context.params, n_ctx=context.n_ctx))
    drafters = speculation(session, context, n_slots)
    return build_server(
        settings, session.model, session.vocab, context, log, drafters, session.directions, session.media
    )


def origins(text: str | None) -> tuple[str, ...] | None:
    """Origins of --cors; None if it is not given."""
    return None if text is None else tuple(text.replace(",", " ").split())


def server_settings(params: CommonParams, path: str, model_pooling: str | None = None) -> ServerSettings:
    """Settings of the server from the command line; ``model_pooling`` is what the model's file wants."""
    from ikpy.server.keys import read_keys
    from ikpy.server.settings import ServerSettings

    server, prompt, sampling = params.server, params.prompt, params.sampling
    return ServerSettings(
        alias=params.model.alias or path,
        model_path=path,
        n_slots=params.context.n_parallel,
        n_predict=prompt.n_predict,
        n_keep=prompt.n_keep,
        stop=tuple(prompt.reverse_prompts),
        banned_strings=tuple(server.banned_strings),
        banned_n=server.banned_n,
        special=prompt.special,
        sampling=sampling,
        default_samplers=not {"--samplers", "--sampling-seq"} & set(params.given),
        slot_prompt_similarity=server.slot_prompt_similarity,
        cont_batching=server.cont_batching,
        context_shift=server.context_shift,
        timeout=server.timeout,
        cache_prompt=server.cache_prompt,
        queue_limit=server.queue_limit,
        max_token_delay=server.max_token_delay / 1e3,
        ping_interval=max(0, server.sse_ping_interval),
        cache_reuse=server.cache_reuse,
        cache_ram=-1 if server.cache_ram < 0 else server.cache_ram << 20,
        cache_ram_similarity=server.cache_ram_similarity,
        cache_ram_n_min=server.cache_ram_n_min,
        ctx_checkpoints=server.ctx_checkpoints,
        ctx_checkpoints_interval=server.ctx_checkpoints_interval,
        ctx_checkpoints_tolerance=server.ctx_checkpoints_tolerance,
        api_keys=read_keys(server.api_keys, server.api_key_files),
        api_prefix=server.api_prefix,
        change_props=server.props,
        cors=origins(server.cors),
        control_vectors=tuple(path for path, _ in params.model.control_vectors),
        metrics=server.metrics,
        slots=server.slots,
        slot_save_path=server.slot_save_path,
        slot_autosave=server.slot_autosave,
        webui=server.webui != "none",
        static_path=server.path,
        embeddings=params.context.embeddings,
        pooling=params.context.pooling or model_pooling or "none",
        chat_template=params.prompt.chat_template,
        chat_template_kwargs=prompt.chat_template_kwargs,
        reasoning_format=server.reasoning_format,
        reasoning=server.reasoning,
        reasoning_effort=server.reasoning_effort,
        reasoning_budget=server.reasoning_budget,
        reasoning_budget_message=server.reasoning_budget_message,
        prefill_assistant=server.prefill_assistant,
        parallel_tool_calls=server.parallel_tool_calls,
        skip_chat_parsing=server.skip_chat_parsing,
        spm_infill=server.spm_infill,
        media_path=params.media.folder,
        downloads=not params.model.offline,
    )
