"""Drafters of speculative decoding that the command line asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ikpy.cli.params import CommonParams

if TYPE_CHECKING:
    from ikpy.cli.session import Session
    from ikpy.engine.context import Context
    from ikpy.engine.speculative import Speculation, SpeculativeParams


def speculation(session: Session, context: Context, n_seq: int = 1) -> Speculation | None:
    """Drafters of the command line for ``n_seq`` sequences of a context, None without any."""
    options = session.params.speculative
    if options.model_draft is None and not options.types:
        return None
    from ikpy.tools.speculation import DraftFiles, make_speculation

    files = DraftFiles(options.model_draft, options.suffix_corpus, options.lookup_static, options.lookup_dynamic)
    n_threads = options.n_threads or session.params.n_threads
    changes: dict[str, Any] = {
        "n_ctx": options.n_ctx or session.params.context.n_ctx,
        "n_seq_max": n_seq,
        "n_threads": n_threads,
        "n_threads_batch": options.n_threads_batch or options.n_threads or session.params.n_threads_batch,
        "embeddings": False,
    }
    changes |= dict.fromkeys(("type_k_first", "type_k_last", "type_v_first", "type_v_last"))
    if options.model_draft is not None:
        changes |= {"type_indexer": "f16", "sparse_top_k": -1}
    changes |= {name: value for name in ("type_k", "type_v") if (value := getattr(options, name)) is not None}
    settings = speculative_params(session.params)
    if settings.n_min > settings.n_max:
        session.log([f"warning: no drafts: --draft-min {settings.n_min} is above --draft-max {settings.n_max}"])
    media = session.media.store if session.media is not None else None
    found = make_speculation(
        settings,
        session.vocab,
        files,
        draft_params=replace(session.params.context_params(**changes), media=media),
        model=session.model,
        context=context,
        log=lambda line: session.log([line]),
    )
    if found is not None:
        session.log([f"main: speculative decoding: {', '.join(d.name for d in found.speculator().drafters)}"])
    return found


def changes_for_drafts(params: CommonParams) -> dict[str, Any]:
    """Parameters of a context whose tokens are drafted: states that a drafter reads, those of recurrent layers that are
    kept."""
    settings = speculative_params(params)
    if params.speculative.model_draft is None and not set(settings.types) - {"none"}:
        return {}
    from ikpy.engine.speculative import READING_TYPES
    from ikpy.tools.speculation import kept_states

    return {"token_states": not READING_TYPES.isdisjoint(settings.types), "n_kept_states": kept_states(settings)}


def needs_of_drafts(session: Session) -> dict[str, Any]:
    """The same for a model. UsageError if it has no prediction layers that are to draft."""
    changes = changes_for_drafts(session.params)
    if changes.get("token_states"):
        from ikpy.tools.speculation import prepare_model

        types = speculative_params(session.params).types
        prepare_model(types, session.params.speculative.model_draft, session.model)
    return changes


def speculative_params(params: CommonParams) -> SpeculativeParams:
    """Settings of the drafters; those behind a type hold for all, as the last use of an option does."""
    from ikpy.cli.drafter_values import to_draft_settings
    from ikpy.engine.speculative import SpeculativeParams

    values = dict(params.speculative.settings)
    types = []
    for entry in params.speculative.types:
        name, _, settings = entry.partition(":")
        types.append(name)
        if settings:
            values |= dict(to_draft_settings(settings, lambda _: None))
    return SpeculativeParams(types=tuple(types), **values)
