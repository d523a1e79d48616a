"""Sets up speculative decoding: drafters by name, draft model, lookup caches, corpus."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ikpy.backends.cuda.api import DeviceMemoryError
from ikpy.engine.assistant_draft import AssistantDraft
from ikpy.engine.block_draft import BlockDraft, MarkovDraft
from ikpy.engine.cache_reader import CacheReader
from ikpy.engine.context import Context
from ikpy.engine.draft_placement import draft_model_params
from ikpy.engine.head_draft import HeadDraft
from ikpy.engine.model import Model
from ikpy.engine.model_draft import ModelDraft
from ikpy.engine.ngram_cache import CacheDraft, EarlierTexts, NgramCache
from ikpy.engine.ngram_draft import NgramMapKey, NgramMapValues, NgramMod, NgramPool, NgramSimple
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.reading_draft import ReadingDraft
from ikpy.engine.reading_layer import cache_reading_layers, reading_layer
from ikpy.engine.speculative import LAYER_READING_TYPES, Drafter, Speculation, SpeculativeParams
from ikpy.engine.suffix_draft import SuffixAutomaton, SuffixDraft
from ikpy.errors import UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.graph.placement import PlacementParams
from ikpy.models import silent
from ikpy.models.dflash import MARKOV, DFlash
from ikpy.models.layer_reading import LayerReading
from ikpy.models.prediction import has_heads_alone
from ikpy.vocab import Vocab

Maker = Callable[[int], Drafter]
ASSISTANT = "gemma4-assistant"
OWN_KINDS = {"eagle3": "eagle3", "dflash": "dflash", ASSISTANT: "mtp"}
"""Drafters by architectures of their files that have nothing else."""
LEAST_BATCH = 64
"""Tokens of a batch of a drafter of blocks, whatever -ub says: a block is one batch."""
MAX_SIZE_DIFFERENCE = 128
MAX_KEPT_STATES = 16
"""Copies of a sequence's recurrent states at most: each is as large as the states, 75 MB for Qwen3-Next 80B."""


@dataclass
class DraftFiles:
    """Files drafters read: draft model, corpus of the suffix drafts, statistics of the n-gram cache.

    model_params: how the draft model is loaded; None: as `draft_model_params` says.
    """

    model: str | os.PathLike[str] | None = None
    suffix_corpus: str | None = None
    lookup_static: str | None = None
    lookup_dynamic: str | None = None
    model_params: ModelParams | None = None


def make_speculation(
    params: SpeculativeParams,
    vocab: Vocab,
    files: DraftFiles | None = None,
    *,
    draft_params: ContextParams | None = None,
    model: Model | None = None,
    context: Context | None = None,
    log: Callable[[str], None] | None = None,
) -> Speculation | None:
    """Drafters for the sequences of a context, None if nothing drafts.

    ``model``: the one whose prediction head may draft ("mtp"), or that of a draft file which has heads alone; its
    context must keep token_states. ``context``: that one, for draft files whose layers read its caches. A draft model
    is asked last unless ``params.types`` places it. ``draft_params.n_seq_max`` is the number of sequences of the draft
    model's and of the head's context, ``draft_params.media`` the pictures of the model's own, which heads see; that one
    must keep `kept_states`. Raises UsageError for files that cannot be used.
    """
    files = files or DraftFiles()
    types = [name for name in params.types if name != "none"]
    kind = _check_kind(types, files.model)
    if kind == "draft" and "draft" not in types:
        types.append("draft")
    made = _Makers(params, vocab, files, kind, draft_params or ContextParams(), model, context, log or silent)
    makers = [made.maker(name) for name in types]
    media = draft_params.media if draft_params else None
    return Speculation(params, makers, media, made.models, made.contexts) if makers else None


@dataclass
class _Makers:
    """Makes what makes drafters; arguments as of `make_speculation`. kind: of the draft file.

    models, contexts: those of draft files, and all that drafters use.
    """

    params: SpeculativeParams
    vocab: Vocab
    files: DraftFiles
    kind: str
    draft_params: ContextParams
    model: Model | None
    context: Context | None
    log: Callable[[str], None]
    models: list[Model] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)

    def maker(self, name: str) -> Maker:
        """Of the drafters of a type."""
        if name == "mtp":
            return self._of_an_assistant() if self._is_assistant() else self._of_heads()
        if name in LAYER_READING_TYPES:
            return self._of_reading_layers()
        if name == "draft":
            return self._of_a_model()
        if name == "ngram-mod":
            pool = NgramPool(self.params.size_n)
            return lambda _: NgramMod(pool)
        if name == "ngram-cache":
            return _cache_maker(self.files, self.vocab.n_tokens)
        if name == "suffix":
            corpus = None if self.files.suffix_corpus is None else _corpus(self.files.suffix_corpus, self.vocab)
            return lambda _: SuffixDraft(self.params, corpus)
        plain = {"ngram-simple": NgramSimple, "ngram-map-k": NgramMapKey, "ngram-map-k4v": NgramMapValues}
        if name not in plain:
            self.params.check()
        return lambda _: plain[name](self.params)

    def _of_heads(self) -> Maker:
        if self.model is None:
            raise UsageError("--spec-type mtp needs the model itself")
        source = self._model_of_heads(self.model) if self.kind == "mtp" else self.model
        own = replace(self.draft_params, embeddings=True, token_states=False, n_kept_states=0, adapters=())
        contexts = [self._context(head, own) for head in source.prediction_heads()]
        n_ctx = contexts[0].n_ctx // own.n_seq_max
        return lambda seq_id: HeadDraft(*contexts, p_min=self.params.p_min, n_ctx=n_ctx, seq_id=seq_id)

    def _model_of_heads(self, model: Model) -> Model:
        """A file of prediction layers alone, which must be those of the model."""
        path, on_cpu = self.files.model, PlacementParams(n_gpu_layers=0)
        assert path is not None
        found = Model.load(path, ModelParams(header_only=model.params.header_only, placement=on_cpu), log=self.log)
        ours, theirs = ((m.hparams.arch, m.arch.state_size) for m in (model, found))
        if ours != theirs:
            (arch, width), (own_arch, own_width) = theirs, ours
            raise UsageError(
                f"'{path}': prediction layers of {arch} with states of {width}; the model is {own_arch} with "
                f"{own_width}"
            )
        common_vocabulary(self.vocab, Vocab.from_metadata(found.gguf.metadata))
        self.models.append(found)
        return found

    def _is_assistant(self) -> bool:
        return architecture_of(self.files.model) == ASSISTANT

    def _of_an_assistant(self) -> Maker:
        if self.context is None or self.files.model is None:
            raise UsageError(f"'{self.files.model}' reads caches of a model: it needs the context of that one")
        layers = cache_reading_layers(self.context.model, self.files.model)
        common_vocabulary(self.vocab, Vocab.from_metadata(layers.gguf.metadata))
        self.models.append(layers)
        reader = CacheReader(layers, self.context, self.draft_params.n_threads, self.log)
        return lambda seq_id: AssistantDraft(reader, p_min=self.params.p_min, seq_id=seq_id)

    def _of_reading_layers(self) -> Maker:
        if self.model is None or self.files.model is None:
            raise UsageError("drafters that read layers of a model need the model itself and a file: give one with -md")
        layers = reading_layer(self.model, self.files.model, self.files.model_params, log=self.log)
        arch = layers.arch
        assert isinstance(arch, LayerReading)
        common_vocabulary(self.vocab, Vocab.from_metadata(layers.gguf.metadata))
        self.models.append(layers)
        own = replace(self.draft_params, embeddings=True, token_states=False, n_kept_states=0, adapters=(), media=None)
        if isinstance(arch, DFlash):
            # All tokens of a batch see each other; a block must not drop what its tokens see through a window.
            n_batch = max(own.n_ubatch or own.n_batch, LEAST_BATCH, arch.n_block)
            reads_rows = bool(arch.markov or arch.selector)
            own = replace(own, embeddings=reads_rows, n_batch=n_batch, n_ubatch=n_batch, swa_full=True)
        context = self._context(layers, own)
        n_ctx, p_min = context.n_ctx // own.n_seq_max, self.params.p_min
        if isinstance(arch, DFlash):
            kind = MarkovDraft if arch.markov else BlockDraft
            return lambda seq_id: kind(context, p_min=p_min, n_ctx=n_ctx, seq_id=seq_id)
        return lambda seq_id: ReadingDraft(context, arch.target_tokens, p_min=p_min, n_ctx=n_ctx, seq_id=seq_id)

    def _of_a_model(self) -> Maker:
        if self.files.model is None:
            raise UsageError("--spec-type draft needs a draft model: give one with -md")
        beside = self.model.params if self.model else ModelParams()
        params = self.files.model_params or draft_model_params(beside, undivided=False)
        model = Model.load(self.files.model, params, log=self.log)
        n_vocab = common_vocabulary(self.vocab, Vocab.from_metadata(model.gguf.metadata))
        self.models.append(model)
        context = self._context(model, replace(self.draft_params, media=None))
        n_ctx = context.n_ctx // self.draft_params.n_seq_max
        return lambda seq_id: ModelDraft(context, p_min=self.params.p_min, n_vocab=n_vocab, n_ctx=n_ctx, seq_id=seq_id)

    def _context(self, model: Model, params: ContextParams) -> Context:
        try:
            context = Context(model, params, log=self.log)
        except DeviceMemoryError as error:
            raise DeviceMemoryError(f"the drafter: {error}; for drafters -ngld, -devd, -cd") from error
        self.contexts.append(context)
        return context


def kept_states(params: SpeculativeParams) -> int:
    """States of a sequence that a context must keep for these drafts, if the model has recurrent layers: drafts are no
    longer."""
    return min(params.n_max, MAX_KEPT_STATES)


def architecture_of(path: str | os.PathLike[str] | None) -> str:
    """The architecture of a draft file; "" for no file."""
    return "" if path is None else str(GGUFFile.open(Path(path), header_only=True).get("general.architecture"))


def kind_of_drafter(path: str | os.PathLike[str] | None) -> str:
    """Which drafter a draft file is for: draft (a model), mtp (prediction layers alone, or a drafter that reads caches
    of the model), eagle3, dflash or dspark; "" for no file."""
    if path is None:
        return ""
    arch = architecture_of(path)
    gguf = GGUFFile.open(Path(path), header_only=True)
    if arch == "dflash" and MARKOV in gguf.tensors:
        return "dspark"
    return OWN_KINDS.get(arch) or ("mtp" if has_heads_alone(gguf) else "draft")


def _check_kind(types: list[str], path: str | os.PathLike[str] | None) -> str:
    """The kind of a draft file. UsageError unless the types are those that it can be for."""
    kind = kind_of_drafter(path)
    layers = "reads caches of a model" if architecture_of(path) == ASSISTANT else "has prediction layers alone"
    own = {"mtp": layers, **dict.fromkeys(LAYER_READING_TYPES, "reads what layers of a model read")}
    if kind in own and (kind not in types or "draft" in types):
        raise UsageError(f"'{path}' {own[kind]}: --spec-type {kind} drafts from it")
    for name in LAYER_READING_TYPES.intersection(types):
        if kind != name:
            raise UsageError(f"--spec-type {name} needs a drafter of that kind: give its file with -md")
        if "mtp" in types:
            raise UsageError(f"--spec-type mtp and {name} read other states of the model: name one of them")
    return kind


def prepare_model(
    types: Iterable[str], files: DraftFiles | None, model: Model, log: Callable[[str], None] | None = None
) -> bool:
    """Whether contexts of a model must keep states for these drafts; it is told which. UsageError if it has none."""
    files = files or DraftFiles()
    if not LAYER_READING_TYPES.isdisjoint(types):
        _check_kind(list(types), files.model)
        assert files.model is not None
        reading_layer(model, files.model, files.model_params, log=log or silent)
        return True
    if "mtp" in types and kind_of_drafter(files.model) != "mtp":
        model.prediction_head()
    return "mtp" in types


def _corpus(path: str, vocab: Vocab) -> SuffixAutomaton:
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read suffix corpus '{path}': {error.strerror}") from None
    return SuffixAutomaton.of_texts([vocab.tokenize(text, add_special=False)])


def _cache_maker(files: DraftFiles, n_vocab: int) -> Maker:
    static = None if files.lookup_static is None else NgramCache.load(files.lookup_static, n_vocab)
    dynamic: EarlierTexts | None = None
    if files.lookup_dynamic is not None:
        exists = Path(files.lookup_dynamic).exists()
        dynamic = EarlierTexts(NgramCache.load(files.lookup_dynamic, n_vocab) if exists else NgramCache())
    return lambda _: CacheDraft(static, dynamic, files.lookup_dynamic)


def common_vocabulary(vocab: Vocab, draft: Vocab) -> int:
    """Number of tokens both vocabularies have; UsageError unless they agree in all but the last few."""
    n = min(vocab.n_tokens, draft.n_tokens)
    if abs(vocab.n_tokens - draft.n_tokens) > MAX_SIZE_DIFFERENCE:
        raise UsageError(
            f"the draft model has {draft.n_tokens} tokens, the model {vocab.n_tokens}: it needs the same vocabulary"
        )
    for token in range(n):
        if vocab.token_to_piece(token, True) != draft.token_to_piece(token, True):
            ours, theirs = vocab.token_to_piece(token, True), draft.token_to_piece(token, True)
            raise UsageError(
                f"the draft model needs the vocabulary of the model: token {token} is {ours!r} there, {theirs!r} here"
            )
    return n
