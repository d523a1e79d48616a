"""From a batch to the inputs of its micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from ikpy._native.tables import Taken
from ikpy.engine.batch import Batch
from ikpy.engine.encoded_texts import EncodedTexts, TextBatch
from ikpy.engine.inputs import BatchInputs
from ikpy.engine.kv_cache import KVCache
from ikpy.engine.media import MediaStore
from ikpy.engine.media_batch import MediaBatch
from ikpy.engine.model import Model
from ikpy.engine.plans import Shape
from ikpy.engine.settings import media_width
from ikpy.errors import UsageError

MAX_POSITION = 1 << 31


@dataclass
class MicroBatch:
    """A part of a batch, which begins at index `start` of it. media: of the whole batch, if it has pictures; texts: the
    same of a model with an encoder."""

    batch: Batch
    start: int
    media: MediaBatch | None
    texts: TextBatch | None = None

    @property
    def part(self) -> slice:
        """Where it is in the batch."""
        return slice(self.start, self.start + len(self.batch))

    def write(self, inputs: BatchInputs, taken: Taken) -> Shape:
        """Sets its inputs, in the cells it took."""
        n_outputs = inputs.write(self.batch, taken)
        has_rows = self.media is not None and bool(self.media.is_row[self.part].any())
        if self.texts is not None:
            has_rows = bool(self.texts.is_text[self.start])
            inputs.write_texts(self.texts, self.part)
        if self.media is not None:
            inputs.write_media(self.media, self.part, has_rows=has_rows)
        return Shape(len(self.batch), n_outputs, has_rows)


class MicroBatches:
    """Checks batches for a model and cuts them into micro-batches of at most n_ubatch tokens.

    sees_all: all tokens of a batch see each other.
    """

    def __init__(self, model: Model, kv: KVCache, media: MediaStore | None, *, n_ubatch: int, sees_all: bool) -> None:
        self.n_vocab = model.hparams.n_vocab
        self.n_positions = model.arch.max_position or MAX_POSITION
        self._is_table = model.arch.max_position is not None
        self._kv = kv
        self._media = media
        self._row_width = media_width(model, media)
        windows = {model.arch.window(il) for il in range(model.hparams.n_layer)}
        self._sees_rows = any(map(model.arch.rows_see_each_other, windows))
        self._counts_pictures = model.arch.counts_pictures
        self._n_ubatch = n_ubatch
        self._sees_all = sees_all

    def of(self, batch: Batch) -> list[MicroBatch]:
        """The micro-batches of a batch.

        Raises UsageError for one that cannot be evaluated, ResourceError if rows of its pictures are not kept, and what
        `KVCache.pieces` does.
        """
        if isinstance(self._media, EncodedTexts):
            return self._of_texts(batch)
        media = self._pictures(batch)
        pieces = self._kv.pieces(batch, self._n_ubatch)
        if media is not None:
            pieces = media.pieces(pieces, self._n_ubatch)
        found, start = [], 0
        for piece in pieces:
            found.append(MicroBatch(piece, start, media))
            start += len(piece)
        return found

    def _of_texts(self, batch: Batch) -> list[MicroBatch]:
        """The micro-batches of a batch for a model with an encoder."""
        texts = TextBatch(batch, self.n_vocab)
        for seq in {seq for ids in texts.texts for seq in ids}:
            if self._kv.seq_pos_max(seq) >= 0:
                raise UsageError(f"sequence {seq} holds a text already: the encoder reads one at the beginning only")
        self._kv.pieces(batch, len(batch))  # there is room for all
        bounds = texts.bounds(self._n_ubatch)
        starts = [0, *bounds[:-1]]
        return [MicroBatch(piece, start, None, texts) for piece, start in zip(batch.cut(bounds), starts, strict=True)]

    def check(self, batch: Batch) -> None:
        """UsageError for a batch that cannot be evaluated, whatever the cache holds."""
        n_ids = self._media.end if self._media else self.n_vocab
        if batch.first_invalid(n_ids, self.n_positions) >= 0:
            self._refuse(batch, n_ids)
        if len(batch) == 0:
            raise UsageError("an empty batch cannot be decoded")
        if self._sees_all and len(batch) > self._n_ubatch:
            raise UsageError(
                f"{len(batch)} tokens that see each other must fit one micro-batch of {self._n_ubatch}: "
                "raise n_ubatch (-ub)"
            )

    def _refuse(self, batch: Batch, n_ids: int) -> NoReturn:
        """Says what is wrong with the first token that cannot be evaluated."""
        i = batch.first_invalid(n_ids, self.n_positions)
        token, position = int(batch.tokens[i]), int(batch.pos[i])
        if not 0 <= token < n_ids:
            raise UsageError(f"token {token} at index {i} of the batch is outside the vocabulary of {self.n_vocab}")
        if position < 0:
            raise UsageError(f"position {position} of the batch is below 0")
        known = f": the model has embeddings for {self.n_positions} positions" if self._is_table else ""
        raise UsageError(f"position {position} is too large{known}")

    def _pictures(self, batch: Batch) -> MediaBatch | None:
        """What is known of the rows of pictures in a batch, if it has some."""
        if self._media is None or batch.first_invalid(self.n_vocab, self.n_positions) < 0:
            return None
        return MediaBatch(
            batch, self._media, self._row_width, sees_each_other=self._sees_rows, counts=self._counts_pictures
        )
