"""What families of drafters that read layers of another model share: that model, and the tokens that they guess."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families import family
from ikpy.convert.families.base import Family
from ikpy.errors import FileFormatError
from ikpy.models.layer_reading import MAPPING

_CHOICE = "t2d"
"""Tensor that says of every token of the target whether the drafter guesses it."""


class LayerDrafter(Family):
    """What the target has is not in the file: which are its vocabulary, and often the token embedding."""

    needs_embedding = False
    writes_texts = False
    reads_target = True
    own_tensors: ClassVar[frozenset[str]] = frozenset({MAPPING, _CHOICE})

    target: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # Copied from the target; the drafter's output matrix is its own.
        config.values["tie_word_embeddings"] = None
        self._choice: dict[str, np.ndarray] = {}

    def take_target(self, target: Config, checkpoint: Checkpoint) -> None:
        """Tells the drafter for which model it is."""
        self.target = target
        width = self.config.integer("target_hidden_size", default=self.target_size)
        if width != self.target_size:
            raise FileFormatError(
                f"{self.config.path}: the drafter reads states of {width} numbers, those of {target.path.parent} have "
                f"{self.target_size}; give the model that it was made for"
            )
        n_vocab = self.config.integer("target_vocab_size", "vocab_size", default=self.n_vocab)
        if n_vocab not in (self.n_vocab, self._n_guessed):
            raise FileFormatError(
                f"{self.config.path}: the drafter is for a vocabulary of {n_vocab} tokens, {target.path.parent} has "
                f"{self.n_vocab}; give the model that it was made for"
            )
        own = self.config.integer("hidden_size")
        lacking = [name for name in ("embed_tokens", "lm_head") if not _has(checkpoint, f"{name}.weight")]
        if own != self.target_size and lacking:
            raise FileFormatError(
                f"{checkpoint.folder}: {lacking[0]} is missing, and that of the model has {self.target_size} columns "
                f"instead of {own}"
            )
        self.usual_pre = family(target).usual_pre
        self._read_choice(checkpoint)

    @property
    def target_size(self) -> int:
        """Numbers of a state of the target."""
        return self.target.integer("hidden_size")

    @property
    def n_vocab(self) -> int:
        """Tokens of the target."""
        return self.target.integer("vocab_size")

    @property
    def _n_guessed(self) -> int:
        """Tokens that the drafter may guess: rows of its output matrix."""
        return self.config.integer("draft_vocab_size", default=self.n_vocab)

    def extra_tensors(self) -> dict[str, np.ndarray]:
        return super().extra_tensors() | self._choice

    def _read_choice(self, checkpoint: Checkpoint) -> None:
        """Tokens i64 of the target for the rows of the output matrix, stored as what they are above the row."""
        folder, n_vocab = checkpoint.folder, self.n_vocab
        names = {name.removeprefix("model."): name for name in checkpoint.tensors}
        n_rows = self._n_guessed
        if MAPPING not in names:
            if n_rows != n_vocab:
                raise FileFormatError(f"{folder}: {MAPPING} (tokens of the {n_rows} guesses) is missing")
            return
        stored = checkpoint.raw(names[MAPPING])
        if stored.dtype.kind != "i" or stored.shape != (n_rows,):
            raise FileFormatError(f"{folder}: '{names[MAPPING]}' must be {n_rows} integers")
        tokens = stored.astype(np.int64) + np.arange(n_rows)
        if tokens.min(initial=0) < 0 or tokens.max(initial=0) >= n_vocab or len(np.unique(tokens)) != n_rows:
            raise FileFormatError(f"{folder}: '{names[MAPPING]}' does not name {n_rows} of the {n_vocab} tokens")
        if _CHOICE in names:
            chosen = np.flatnonzero(checkpoint.raw(names[_CHOICE]))
            if not np.array_equal(chosen, np.sort(tokens)):
                raise FileFormatError(f"{folder}: '{names[MAPPING]}' and '{names[_CHOICE]}' name other tokens")
        self._choice = {MAPPING: tokens}


def _has(checkpoint: Checkpoint, name: str) -> bool:
    """Whether there is a tensor of this name, which may stand in a model."""
    return name in checkpoint.tensors or f"model.{name}" in checkpoint.tensors
