"""Perplexity and KL divergence of one model quantized by ikpy and by the reference."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.reference_quantizer import quantize_program
from ikpy import Batch, Context, ContextParams, GGUFFile, Model
from ikpy.quants import registry
from ikpy.quants.registry import FileType, TensorType
from ikpy.tools.kl_divergence import BaseFile, BaseWriter, kl_divergence
from ikpy.vocab import Vocab

N_CTX = 512
MAKERS = ("ours", "reference")


def file_type_of(row: TensorType) -> FileType | None:
    """The file type whose default is the tensor type; None for interleaved forms of others and plain floats."""
    if row.repack_of or not row.is_quantized:
        return None
    for ftype in registry.all_ftypes():
        if ftype.selectable and ftype.base_type == row.name:
            return ftype
    return None


class ModelScorer:
    """Quantizes one F16 model to a type with both programs and evaluates the files with ikpy.

    Every matrix of the layers gets the type, embedding and output q8_0. The divergence is that from the F16 model,
    over the second half of each chunk of the text.
    """

    def __init__(self, model: Path, imatrix: Path, text: Path, n_chunks: int, folder: Path, threads: int) -> None:
        self.threads = threads
        self.model, self.imatrix, self.folder = model, imatrix, folder
        self.name = model.stem.removesuffix("-f16")
        self.n_vocab = Model.load(model).hparams.n_vocab
        self.base = folder / f"{model.stem}.logits"
        with GGUFFile.open(model) as file:
            self.vocab = Vocab.from_metadata(file.metadata)
        ids = self.vocab.tokenize(text.read_text()[: 8 * n_chunks * N_CTX])[: n_chunks * N_CTX]
        chunks = np.array(ids, np.int32).reshape(n_chunks, N_CTX)
        context = self._context(model)
        first = N_CTX // 2
        with BaseWriter(self.base, N_CTX, self.n_vocab) as writer:
            write = writer.start(chunks)
            for ids_of_chunk in chunks:
                own = ids_of_chunk.copy()
                own[0] = self.vocab.bos if self.vocab.add_bos and self.vocab.bos is not None else own[0]
                context.kv.clear()
                write(np.asarray(context.decode(Batch.single(own, logits="all")))[first:-1])
        self.base_ppl = self.score(model)["ppl"]

    def compare(self, row: TensorType, makers: Sequence[str] = MAKERS) -> dict[str, dict[str, float]] | None:
        """Scores of the files of the makers; None for types without a file type of their own."""
        ftype = file_type_of(row)
        if ftype is None:
            return None
        options = ["--pure", "--imatrix", self.imatrix, "--ignore-imatrix-rules"]
        options += ["--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0"]
        scores = {}
        for maker in makers:
            program = [sys.executable, "-m", "ikpy", "quantize"] if maker == "ours" else [quantize_program()]
            out = self.folder / f"{maker}.gguf"
            command = [*program, *options, self.model, out, ftype.name, self.threads]
            done = subprocess.run([str(part) for part in command], check=False, capture_output=True)
            if done.returncode == 0:
                scores[maker] = self.score(out)
            out.unlink(missing_ok=True)
        return scores

    def score(self, path: Path) -> dict[str, float]:
        """Perplexity, and mean divergence with its standard error."""
        found = kl_divergence(
            self._context(path),
            self.vocab,
            self.n_vocab,
            BaseFile(self.base),
            N_CTX,
            n_threads=self.threads,
            out=io.StringIO(),
            log=io.StringIO(),
        )
        return {"ppl": found.ppl.value, "kld": found.kld.value, "kld_error": found.kld.error}

    def _context(self, path: Path) -> Context:
        return Context(Model.load(path), ContextParams(n_ctx=N_CTX, n_threads=self.threads))
