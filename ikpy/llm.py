"""LLM: a model, its vocabulary and one context behind a few calls.

>>> from ikpy import LLM
>>> llm = LLM()  # the bundled tiny model
>>> llm.generate("The old man looked at", max_tokens=4, temperature=0)
' the room, and'
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ikpy.engine.adapter import LoraAdapter
from ikpy.engine.context import Context
from ikpy.engine.encoded_texts import prompt_of, texts_of, with_texts
from ikpy.engine.forks import check_threads
from ikpy.engine.model import Model, open_model
from ikpy.engine.params import ContextParams, ModelParams, fields_of
from ikpy.engine.pooling import POOLINGS, pool, token_states
from ikpy.engine.sampling import SamplingParams
from ikpy.engine.speculative import SpeculativeParams, Speculator
from ikpy.errors import UsageError
from ikpy.tools.generation import ContextFullError, GrowingSequence
from ikpy.tools.media import Media
from ikpy.tools.media_marks import Marks, divided, with_markers, with_marks
from ikpy.tools.media_tokens import ProjectorOptions, new_reader, open_beside, picture_device
from ikpy.tools.pictures import picture_from
from ikpy.tools.sampler_setup import make_sampler
from ikpy.tools.sounds import sound_from
from ikpy.tools.speculation import DraftFiles, kept_states, make_speculation, prepare_model
from ikpy.tools.stop_strings import StopFilter
from ikpy.vocab import Vocab

if TYPE_CHECKING:
    from ikpy.tools.media_tokens import MediaReader
    from ikpy.vocab.templates import ChatTemplate


class LLM:
    """A loaded model ready to generate.

    ``path``: GGUF file (first part of a split one); None = the bundled tiny-mla-moe. Further keywords are fields of
    :class:`ikpy.ModelParams` and :class:`ikpy.ContextParams`, such as ``n_ctx``, ``n_threads``, ``type_k``, ``mla``.
    ``lora``: adapter files with their scales. ``speculative``, ``draft_files``: what drafts and the files it reads,
    such as a draft model; ``speculator.lines()`` tells how it went. ``mmproj``: projector file, with which prompts may
    have pictures or sounds; ``mmproj_offload``: whether a GPU encodes them, None: if the model uses one;
    ``image_min_tokens``, ``image_max_tokens``: rows of a picture, for projectors that keep its proportions. ``log``:
    called with every line of the loader. Raises IkpyError subclasses with one line of explanation.

    Calls of several threads wait for each other: they share one context. A prompt that begins as the last one did is
    evaluated from the first difference on.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        lora: Sequence[tuple[str | os.PathLike[str], float]] = (),
        speculative: SpeculativeParams | None = None,
        draft_files: DraftFiles | None = None,
        mmproj: str | os.PathLike[str] | None = None,
        mmproj_offload: bool | None = None,
        image_min_tokens: int | None = None,
        image_max_tokens: int | None = None,
        log: Callable[[str], None] | None = None,
        **params: Any,
    ) -> None:
        from ikpy import default_model_path

        model_values = fields_of(ModelParams, params)
        context_values = fields_of(ContextParams, params)
        unknown = set(params) - set(model_values) - set(context_values)
        if unknown:
            raise UsageError(f"unknown parameter {', '.join(sorted(unknown))}; see ModelParams and ContextParams")
        model_params = ModelParams(**model_values)
        file = open_model(path or default_model_path(), model_params)
        self.vocab = Vocab.from_metadata({**file.metadata, **dict(model_params.kv_overrides)})
        told, projector = log or (lambda line: None), None
        if mmproj is not None:
            threads = ContextParams(**context_values)
            device = picture_device(model_params, mmproj_offload, told)
            n_threads = threads.n_threads_batch or threads.n_threads
            options = ProjectorOptions(n_threads, image_min_tokens, image_max_tokens, device)
            projector, model_params = open_beside(os.fspath(mmproj), file, self.vocab, model_params, options, told)
        self.model = Model.load(file, model_params, log=log)
        given = list(context_values.get("adapters", ()))
        context_values["adapters"] = [*given, *(LoraAdapter.load(name, self.model) for name, _ in lora)]
        self._adapter_scales = [1.0] * len(given) + [scale for _, scale in lora]
        if speculative and prepare_model(speculative.types, draft_files, self.model, log):
            context_values["token_states"] = True
        if speculative or draft_files:
            context_values["n_kept_states"] = kept_states(speculative or SpeculativeParams())
        self.context_params = with_texts(self.model, ContextParams(**context_values))
        self._media: MediaReader | None = None
        if projector is not None:
            self._media = new_reader(projector, self.model, self.vocab, told)
            self.context_params.media = self._media.store
        self.context = self._new_context(self.context_params, log)
        self.speculator = self._make_speculator(speculative, draft_files, log)
        self._sequence = GrowingSequence(self.context, speculator=self.speculator, media=self.context_params.media)
        self._running: Generator[int, None, None] | None = None
        """The text that is being generated, or was last."""
        self._lock = threading.RLock()

    def _new_context(self, params: ContextParams, log: Callable[[str], None] | None = None) -> Context:
        context = Context(self.model, params, log=log)
        context.adapter_scales[:] = self._adapter_scales
        return context

    def _make_speculator(
        self, params: SpeculativeParams | None, files: DraftFiles | None, log: Callable[[str], None] | None
    ) -> Speculator | None:
        if params is None and files is None:
            return None
        own = replace(self.context_params, adapters=(), n_seq_max=1, n_kept_states=0)
        params, model, context = params or SpeculativeParams(), self.model, self.context
        made = make_speculation(params, self.vocab, files, draft_params=own, model=model, context=context, log=log)
        return made.speculator() if made else None

    # text

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        *,
        images: Any = (),
        audio: Any = (),
        stop: str | Sequence[str] = (),
        **sampling: Any,
    ) -> str:
        """Continuation of ``prompt`` (text or token ids), without it.

        Ends after ``max_tokens`` (negative: no limit), at an end token, before one of the ``stop`` strings (or the only
        one), or where the context is full and the model's cache cannot be shifted.
        ``images``: a picture or a list of some, which stand where a text has the markers ``<__media__>``, or in front
        of one without any: names of files, contents of files (bytes), PIL images, arrays uint8 [height, width, 3].
        ``audio``: sounds in the same way, behind the pictures: files, contents of files, arrays of floats [n] of 16000
        samples a second.
        ``sampling``: fields of :class:`ikpy.SamplingParams`, such as ``temperature``, ``top_k``, ``seed``, ``grammar``,
        ``json_schema``.
        """
        with self._lock:
            return "".join(self.stream(prompt, max_tokens, images=images, audio=audio, stop=stop, **sampling))

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 128,
        *,
        images: Any = (),
        audio: Any = (),
        stop: str | Sequence[str] = (),
        **sampling: Any,
    ) -> Iterator[str]:
        """As :meth:`generate`, in pieces as they appear; a piece never ends inside a character.

        An LLM writes one text at a time: the next call that generates ends a stream, which raises UsageError then.
        """
        if self.model.arch.is_encoder:
            raise UsageError(
                f"a model of architecture '{self.model.hparams.arch}' embeds texts and writes none: use embed"
            )
        given = [picture_from(image) for image in _listed(images)], [sound_from(sound) for sound in _listed(audio)]
        media: list[Media] = [*given[0], *given[1]]
        tokens = self._with_media(prompt, media) if media else self._prompt_tokens(prompt)
        return self._stream_tokens(tokens, max_tokens, stop, sampling)

    def _stream_tokens(
        self, tokens: list[int], max_tokens: int, stop: str | Sequence[str], sampling: Mapping[str, Any]
    ) -> Iterator[str]:
        if not tokens:
            raise UsageError("the prompt is empty and the model wants no begin token: give a text")
        if len(tokens) >= self.context.n_ctx_seq:
            raise UsageError(
                f"the prompt has {len(tokens)} tokens, the context {self.context.n_ctx_seq}; give a larger n_ctx"
            )
        try:
            max_tokens = operator.index(max_tokens)
        except TypeError:
            raise UsageError(f"max_tokens {max_tokens!r} is no whole number") from None
        if unknown := set(sampling) - set(fields_of(SamplingParams, sampling)):
            raise UsageError(f"unknown parameter {', '.join(sorted(unknown))}; see SamplingParams")
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, Sequence) or not all(isinstance(item, str) for item in stops):
            raise UsageError(f"stop {stop!r} is neither a text nor a list of texts")
        return self._locked(self._stream(tokens, max_tokens, stops, SamplingParams(**sampling)))

    def _with_media(self, prompt: str | Sequence[int], media: Sequence[Media]) -> list[int]:
        """Token ids of a text with pictures and sounds."""
        if not isinstance(prompt, str):
            raise UsageError("pictures and sounds belong to a text, not to token ids")
        return self._tokens_of(divided(with_markers(prompt, len(media)), media))

    def _tokens_of(self, parts: Sequence[str | Media]) -> list[int]:
        """Token ids of texts and media in turn."""
        if self._media is None:
            raise UsageError("pictures and sounds need a projector: give its file as mmproj")
        with self._lock:
            tokens = self._media.tokens(parts, self.context.n_ubatch)
            self._media.refresh([part for part in parts if isinstance(part, Media)])
            return tokens

    def _prompt_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a text, with begin and end tokens, or of ids."""
        if isinstance(prompt, str):
            return self.tokenize(prompt, add_special=True, parse_special=True)
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError:
            raise UsageError("a prompt is a text or a sequence of token ids") from None
        n_vocab = self.model.hparams.n_vocab
        if strange := [token for token in tokens if not 0 <= token < n_vocab]:
            raise UsageError(f"token {strange[0]} of the prompt is outside the vocabulary of {n_vocab}")
        return tokens

    def _locked(self, pieces: Iterator[str]) -> Iterator[str]:
        """The pieces, of which each is made while no other thread uses the context."""
        while True:
            with self._lock:
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def _stream(self, tokens: list[int], max_tokens: int, stop: Sequence[str], params: SamplingParams) -> Iterator[str]:
        _check_runs(self.context)
        tokens = prompt_of(self.context, tokens)
        sampler = make_sampler(params, self.vocab, self.model.hparams.n_vocab, self.context.n_ctx)
        for token in tokens:
            if token < self.model.hparams.n_vocab:  # others stand for media
                sampler.accept(token, grammar=False)
        if max_tokens == 0:
            return
        if self._running is not None:
            self._running.close()
        self._sequence.n_keep = int(self.vocab.add_bos)
        kept = self._sequence.rewind(tokens)
        logits = self._sequence.feed(tokens[kept:])
        decoder = self.vocab.stream_decoder()
        stops = StopFilter(stop)
        self._running = running = self._sequence.generate(sampler, logits, self.vocab.eog)
        with closing(running):
            for count in itertools.count(1):
                try:
                    token = next(running)
                except ContextFullError:
                    break
                except StopIteration:
                    raise UsageError(
                        "another text was begun while this one was streamed: "
                        "finish or drop a stream first, or use two LLMs"
                    ) from None
                if token in self.vocab.eog:
                    break
                if text := stops.feed(decoder.feed(token)):
                    yield text
                if stops.stopped is not None:
                    return
                if count == max_tokens:
                    break
        if text := stops.feed(decoder.flush()) + stops.flush():
            yield text

    # chat

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template, ChatML if it has none."""
        from ikpy.vocab.templates import ChatTemplate

        return ChatTemplate.from_metadata(self.model.metadata, self.vocab)

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        max_tokens: int = 512,
        *,
        stop: str | Sequence[str] = (),
        template_variables: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> str:
        """The assistant's answer to ``messages`` (mappings with role and content; a text is one user message).

        A content may be a list of parts: ``{"type": "text", "text": ...}``, ``{"type": "image", "image": ...}`` and
        ``{"type": "audio", "audio": ...}``, pictures and sounds as :meth:`generate` takes them.
        """
        with self._lock:
            return "".join(
                self.stream_chat(messages, max_tokens, stop=stop, template_variables=template_variables, **sampling)
            )

    def stream_chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        max_tokens: int = 512,
        *,
        stop: str | Sequence[str] = (),
        template_variables: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Iterator[str]:
        """As :meth:`chat`, in pieces."""
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if not isinstance(given, Sequence) or not all(isinstance(message, Mapping) for message in given):
            raise UsageError("messages are a text, or a list of mappings with role and content")
        variables = dict(template_variables or {})
        marks: Marks[Media] = Marks()
        given = [with_marks(message, marks) for message in given]
        prompt = self.chat_template.render(given, drop_bos=self.vocab.add_bos, **variables)
        if not marks.items:
            return self.stream(prompt, max_tokens, stop=stop, **sampling)
        return self._stream_tokens(self._tokens_of(marks.parts(prompt)), max_tokens, stop, sampling)

    # embeddings

    @cached_property
    def _embedding_context(self) -> Context:
        return self._new_context(replace(self.context_params, embeddings=True))

    @property
    def pooling(self) -> str:
        """How the model wants states pooled: 'mean' unless its file says otherwise."""
        wanted = self.model.hparams.pooling
        return "mean" if wanted in (None, "none") else str(wanted)

    def embed(
        self, texts: str | Sequence[str], *, pooling: str | None = None, normalize: bool = True
    ) -> NDArray[np.float32]:
        """Embeddings float32 [number of texts, n_embd] from the last layer.

        ``pooling`` over a text's tokens: 'mean', 'cls' (first), 'last', or 'rank' (scores [number of texts, n_classes]
        of the classification head); None: as the model's file says, else 'mean'. ``normalize``: to length 1 (not for
        'rank').
        """
        pooling = pooling or self.pooling
        if pooling not in POOLINGS[1:]:
            raise UsageError(
                f"pooling '{pooling}' is not one of {', '.join(POOLINGS[1:])}; token_embeddings gives a state per token"
            )
        arch = self.model.arch
        rows = [
            pool(self.token_embeddings(text), pooling, arch.classifier, arch.projection)
            for text in ([texts] if isinstance(texts, str) else texts)
        ]
        if not rows:
            return np.empty((0, self.model.hparams.n_embd), np.float32)
        result = np.stack(rows)
        if normalize and pooling != "rank":
            result /= np.maximum(np.linalg.norm(result, axis=-1, keepdims=True), 1e-12)
        return result

    def token_embeddings(self, text: str | Sequence[int]) -> NDArray[np.float32]:
        """States of the last layer, float32 [n_tokens, n_embd], for a text (with begin and end tokens) or token ids."""
        with self._lock:
            return self._token_embeddings(text)

    def _token_embeddings(self, text: str | Sequence[int]) -> NDArray[np.float32]:
        context = self._embedding_context
        _check_runs(context)
        tokens = self.tokenize(text, add_special=True) if isinstance(text, str) else self._prompt_tokens(text)
        if not 0 < len(tokens) <= context.n_ctx_seq:
            raise UsageError(
                f"a text of {len(tokens)} tokens cannot be embedded; 1 to {context.n_ctx_seq} are possible"
            )
        return token_states(context, texts_of(context, tokens))

    # tokens

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids; ``add_special``: with the begin and end tokens the model wants; ``parse_special``: texts of
        control tokens become those tokens."""
        return self.vocab.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids; control tokens appear only with ``special``."""
        return self.vocab.detokenize(tokens, unparse_special=special)


def _check_runs(context: Context) -> None:
    """UsageError if the context has no memory (``header_only``), or threads that this process lost in a fork."""
    if context.plan_only:
        raise UsageError("only the header of the model was read: it can be measured, not run")
    check_threads(max(context.n_threads, context.n_threads_batch))


def _listed(values: Any) -> Sequence[Any]:
    """One value, or several, as several."""
    return values if isinstance(values, (list, tuple)) else [values]
