"""`ikpy server`: the HTTP server."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikpy.cli.banner import banner_lines
from ikpy.cli.common import Session, load, print_log, start
from ikpy.cli.params import CommonParams
from ikpy.errors import ResourceError, UsageError

if TYPE_CHECKING:
    from ikpy.server.build import Server
    from ikpy.server.log import ServerLog
    from ikpy.server.settings import ServerSettings

DRAIN_SECONDS = 30.0


def run(arguments: Sequence[str]) -> int:
    """Serve until a signal ends it; returns the exit status."""
    params = start("server", arguments, "HTTP server with the llama.cpp, OpenAI and Anthropic APIs.")
    if params is None:
        return 0
    check(params)
    print_log(params, banner_lines(params))
    listener = None if params.model.dry_run else listen(params.server.host, params.server.port)
    from ikpy.server.log import ServerLog

    log = ServerLog() if params.log.disable else ServerLog.standard(params.server.log_format)
    log_start(params, log)
    session = load(params)
    assert listener is not None
    server = make_server(session, log)
    log.event("main", "model loaded")
    from ikpy.server.serve import serve

    options = params.server
    keys = {"api_key": f"api_key: ****{options.api_keys[0][-4:]}"} if options.api_keys else {}
    port = str(listener.getsockname()[1])
    log.event("main", "HTTP server listening", port=port, hostname=options.host, **keys)
    serve(
        server,
        listener,
        drain_seconds=DRAIN_SECONDS,
        ssl_key_file=options.ssl_key_file,
        ssl_cert_file=options.ssl_cert_file,
    )
    return 0


def check(params: CommonParams) -> None:
    """Refuse what cannot work before the model is loaded."""
    server = params.server
    if bool(server.ssl_key_file) != bool(server.ssl_cert_file):
        raise UsageError("HTTPS needs both --ssl-key-file and --ssl-cert-file")
    if server.path and not Path(server.path).is_dir():
        raise UsageError(f"--path {server.path}: no such directory")
    if server.slot_save_path:
        try:
            Path(server.slot_save_path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--slot-save-path {server.slot_save_path}: {error.strerror}") from None


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ResourceError when the address cannot be used."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ResourceError(f"couldn't bind to server socket: hostname={host} port={port} ({reason})") from None
    return listener


def log_start(params: CommonParams, log: ServerLog) -> None:
    """Log build and system."""
    from ikpy.threads import hardware_threads
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
    settings = server_settings(params, session.path)
    n_slots = settings.n_slots
    context = session.new_context(n_seq_max=n_slots, embeddings=params.context.embeddings)
    if context.n_ctx // n_slots < 16:
        raise UsageError(f"a context of {context.n_ctx} tokens is too small for {n_slots} slots: raise -c or lower -np")
    return build_server(settings, session.model, session.vocab, context, log)


def server_settings(params: CommonParams, path: str) -> ServerSettings:
    """Settings of the server from the command line."""
    from ikpy.engine.sampling import SamplingParams
    from ikpy.server.settings import ServerSettings

    server, prompt, sampling = params.server, params.prompt, params.sampling
    values: dict[str, Any] = {f.name: getattr(sampling, f.name) for f in dataclasses.fields(sampling)}
    for name in ("logit_bias", "dry_sequence_breakers"):
        values[name] = tuple(values[name])
    return ServerSettings(
        alias=params.model.alias or path,
        model_path=path,
        n_slots=params.context.n_parallel,
        n_predict=prompt.n_predict,
        n_keep=prompt.n_keep,
        stop=tuple(prompt.reverse_prompts),
        special=prompt.special,
        sampling=SamplingParams(**values),
        default_samplers=not {"--samplers", "--sampling-seq"} & set(params.given),
        slot_prompt_similarity=server.slot_prompt_similarity,
        cont_batching=server.cont_batching,
        context_shift=server.context_shift,
        timeout=max(1, server.timeout),
        queue_limit=max(1, server.queue_limit),
        api_keys=tuple(key for key in server.api_keys if key),
        metrics=server.metrics,
        slots=server.slots,
        slot_save_path=server.slot_save_path,
        webui=server.webui != "none",
        static_path=server.path,
        embeddings=params.context.embeddings,
        pooling=params.context.pooling or "none",
        chat_template=chat_template_text(params),
        chat_template_kwargs=prompt.chat_template_kwargs,
        reasoning_format=server.reasoning_format,
        reasoning=server.reasoning,
        prefill_assistant=server.prefill_assistant,
        parallel_tool_calls=server.parallel_tool_calls,
        skip_chat_parsing=server.skip_chat_parsing,
    )


def chat_template_text(params: CommonParams) -> str | None:
    """Name or text of the chat template given on the command line."""
    prompt = params.prompt
    if prompt.chat_template is not None or not prompt.chat_template_file:
        return prompt.chat_template
    try:
        return Path(prompt.chat_template_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not valid UTF-8"
        raise UsageError(f"cannot read chat template '{prompt.chat_template_file}': {reason}") from None
