"""Putting a server together: engine, front and application."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ikpy.server.app import make_app
from ikpy.server.front import Front
from ikpy.server.log import ServerLog
from ikpy.server.scheduler import Engine
from ikpy.server.settings import ServerSettings
from ikpy.vocab.templates import ChatTemplate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from starlette.types import ASGIApp

    from ikpy.engine.context import Context
    from ikpy.engine.model import Model
    from ikpy.engine.speculative import Speculation
    from ikpy.tools.media_tokens import MediaReader
    from ikpy.vocab import Vocab


@dataclass
class Server:
    """A server ready to be run: the ASGI application and the engine behind it."""

    app: ASGIApp
    engine: Engine
    front: Front


def build_server(
    settings: ServerSettings,
    model: Model,
    vocab: Vocab,
    context: Context,
    log: ServerLog | None = None,
    speculation: Speculation | None = None,
    directions: NDArray[np.float32] | None = None,
    media: MediaReader | None = None,
) -> Server:
    """Server over a context whose n_seq_max is at least ``settings.n_slots``; the engine thread is not started.

    ``directions``: control vectors float32 [n_layer, n_embd] that the context already adds. ``media``: reads those
    of requests, into the store of the context, or texts for the model's encoder.
    """
    log = log or ServerLog()
    template = chat_template(settings, model, vocab)
    engine = Engine(context, vocab, settings, log, speculation, directions, media)
    pictures = None if media is None or media.store.holds_texts else media
    front = Front(engine, model, vocab, settings, template, tool_template(settings, model, vocab), pictures)
    return Server(make_app(front, log), engine, front)


def chat_template(settings: ServerSettings, model: Model, vocab: Vocab) -> ChatTemplate:
    """The template of the settings or of the model. Raises an IkpyError for one that cannot be used."""
    if settings.chat_template is None:
        return ChatTemplate.from_metadata(model.metadata, vocab)
    bos, eos = vocab.special_text(vocab.bos), vocab.special_text(vocab.eos)
    return ChatTemplate.from_argument(settings.chat_template, bos, eos)


def tool_template(settings: ServerSettings, model: Model, vocab: Vocab) -> ChatTemplate | None:
    """The model's template for requests with tools, if it has one of its own (Command R7B)."""
    return None if settings.chat_template else ChatTemplate.for_tools(model.metadata, vocab)
