"""Drafters of speculative decoding that the command line asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ikpy.cli.logs import memory_log, print_log
from ikpy.cli.params import CommonParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from ikpy.cli.session import Session
    from ikpy.engine.context import Context
    from ikpy.engine.model import Model
    from ikpy.engine.params import ContextParams, ModelParams
    from ikpy.engine.speculative import Speculation, SpeculativeParams
    from ikpy.gguf.reader import GGUFFile
    from ikpy.tools.speculation import DraftFiles
    from ikpy.vocab import Vocab


def speculation(session: Session, context: Context, n_seq: int = 1) -> Speculation | None:
    """Drafters of the command line for ``n_seq`` sequences of a context, None without any."""
    options = session.params.speculative
    if options.model_draft is None and not options.types:
        return None
    from ikpy.tools.speculation import make_speculation

    settings = speculative_params(session.params)
    if settings.n_min > settings.n_max:
        session.log([f"warning: no drafts: --draft-min {settings.n_min} is above --draft-max {settings.n_max}"])
    media = session.media.store if session.media is not None else None
    found = make_speculation(
        settings,
        session.vocab,
        draft_files(session.params, session.draft_params),
        draft_params=replace(context_of_drafts(session.params, n_seq), media=media),
        model=session.model,
        context=context,
        log=lambda line: session.log([line]),
    )
    if found is not None:
        for own in found.contexts:
            session.log(memory_log(own))
        session.log([f"main: speculative decoding: {', '.join(d.name for d in found.speculator().drafters)}"])
    return found


def draft_files(params: CommonParams, model_params: ModelParams | None) -> DraftFiles:
    """Files of the command line that drafters read. ``model_params``: how a draft model is loaded."""
    from ikpy.tools.speculation import DraftFiles

    options = params.speculative
    return DraftFiles(
        options.model_draft, options.suffix_corpus, options.lookup_static, options.lookup_dynamic, model_params
    )


def context_of_drafts(params: CommonParams, n_seq: int) -> ContextParams:
    """Parameters of the contexts of drafters for ``n_seq`` sequences."""
    from ikpy.engine.params import DRAFT_THREAD_SETS

    options = params.speculative
    changes: dict[str, Any] = {
        "n_ctx": options.n_ctx or params.context.n_ctx,
        "n_seq_max": n_seq,
        "n_threads": options.n_threads or params.n_threads,
        "n_threads_batch": options.n_threads_batch or options.n_threads or params.n_threads_batch,
        "thread_sets": DRAFT_THREAD_SETS,
        "embeddings": False,
    }
    changes |= dict.fromkeys(("type_k_first", "type_k_last", "type_v_first", "type_v_last"))
    if options.model_draft is not None:
        changes |= {"type_indexer": "f16", "sparse_top_k": -1}
    changes |= {name: value for name in ("type_k", "type_v") if (value := getattr(options, name)) is not None}
    return params.context_params(**changes)


def draft_model_params(params: CommonParams, model_params: ModelParams) -> ModelParams | None:
    """How the draft model of the command line is loaded beside a model; None without one.

    UsageError for devices that do not exist.
    """
    options = params.speculative
    if options.model_draft is None:
        return None
    from ikpy.engine import draft_placement
    from ikpy.tools.speculation import kind_of_drafter

    kind = kind_of_drafter(options.model_draft)
    if kind == "mtp":
        given = [name for name in ("-ngld", "-devd", "-otd", "-cmoed", "-ncmoed") if name in params.given]
        if given:
            print_log(
                params, [f"warning: no effect: {', '.join(given)} (drafters of --spec-type {kind} run on the CPU)"]
            )
        return None
    wanted = draft_placement.DraftPlacement(
        options.n_gpu_layers, options.devices, tuple(options.tensor_overrides), options.n_cpu_moe
    )
    return draft_placement.draft_model_params(model_params, wanted, undivided=kind != "draft")


def bytes_of_drafter(
    params: CommonParams, file: GGUFFile, vocab: Vocab, model_params: ModelParams, draft_params: ModelParams
) -> dict[str, int]:
    """What the draft model takes of devices, by their names, planned from the headers of the files."""
    from ikpy.backends.cuda.devices import wanted_devices
    from ikpy.engine.memory import drafter_bytes
    from ikpy.engine.model import Model
    from ikpy.graph.placement import CPU, PlacementParams
    from ikpy.tools.speculation import kind_of_drafter, make_speculation

    if not wanted_devices(draft_params.placement, draft_params.devices):
        return {}
    on_cpu = replace(model_params, header_only=True, use_mlock=False, placement=PlacementParams(n_gpu_layers=0))
    files = draft_files(params, replace(draft_params, header_only=True))
    settings = replace(speculative_params(params), types=(kind_of_drafter(files.model),))
    contexts = context_of_drafts(params, params.context.n_parallel if params.tool == "server" else 1)
    planned = make_speculation(settings, vocab, files, draft_params=contexts, model=Model.load(file, on_cpu))
    assert planned is not None
    return {device: nbytes for device, nbytes in drafter_bytes(planned).items() if device != CPU}


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
        tell_of_drafts(session.params, session.model, session.draft_params, lambda line: session.log([line]))
    return changes


def tell_of_drafts(
    params: CommonParams, model: Model, draft_params: ModelParams | None, log: Callable[[str], None] | None = None
) -> None:
    """Tells a model which states drafters read, if they do. UsageError if it has none."""
    from ikpy.tools.speculation import prepare_model

    prepare_model(speculative_params(params).types, draft_files(params, draft_params), model, log)


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
