"""Intact files of every kind that commands read, and the command lines that read them."""

from __future__ import annotations

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np

from ikpy.cli import main
from ikpy.engine.ngram_cache import NgramCache
from ikpy.gguf.types import GGUFValueType as T
from ikpy.gguf.writer import GGUFWriter
from tests.cpu.convert.seeded_checkpoints import write
from tests.cpu.convert.seeded_kinds import KINDS
from tests.cpu.quantize.imatrices import legacy, trailer
from tests.shared import DATA

TEXT = "The old man went to the sea and took his boat. He rowed for a day and slept in the sun. "
CHECKPOINTS = sorted(folder.name for folder in (DATA / "convert").iterdir())


class Originals:
    """Intact files in a folder, made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.model = self._converted("llama")
        self.sentencepiece = self._converted("llama-spm")
        self.text = folder / "text.txt"
        self.text.write_text(TEXT * 12)

    def _converted(self, name: str) -> Path:
        path = self.folder / f"{name}.gguf"
        self.run(path, "convert", str(DATA / "convert" / name), "--outfile", str(path))
        return path

    def run(self, result: Path, *arguments: str) -> Path:
        """A file that a command line writes, once."""
        if not result.exists() and main(list(arguments)):
            raise RuntimeError(f"{arguments} fails")
        return result

    def of_any_kind(self, random: Random) -> Path:
        """A model of one of all architectures, converted once."""
        kind = random.choice([*CHECKPOINTS, *KINDS])
        if isinstance(kind, str):
            return self._converted(kind)
        path = self.folder / f"{kind.name}.gguf"
        if path.exists():
            return path
        with TemporaryDirectory(dir=self.folder) as folder:
            return self.run(path, "convert", str(write(kind, Path(folder) / "checkpoint")), "--outfile", str(path))

    def parts(self) -> Path:
        """A folder with a model in three parts."""
        folder = self.folder / "parts"
        folder.mkdir(exist_ok=True)
        first = folder / "m-00001-of-00003.gguf"
        self.run(first, "gguf", "split", str(self.model), str(folder / "m"), "--split-max-tensors", "9")
        return folder

    def adapter(self) -> Path:
        """LoRA pairs of two tensors of rank 2."""
        path = self.folder / "adapter.gguf"
        with GGUFWriter(path) as out:
            for key, text in (("general.type", "adapter"), ("general.architecture", "llama"), ("adapter.type", "lora")):
                out.add(key, T.STRING, text)
            out.add("adapter.lora.alpha", T.FLOAT32, 2.0)
            names = [f"blk.{i}.attn_output.weight.lora_{part}" for i in (0, 1) for part in "ab"]
            for name in names:
                out.add_tensor(name, (64, 2) if name.endswith("a") else (2, 64), 0)
            for name in names:
                out.write(name, np.full(128, 0.01, np.float32))
        return path

    def control_vector(self) -> Path:
        """A direction for one layer."""
        path = self.folder / "control.gguf"
        with GGUFWriter(path) as out:
            out.add("general.architecture", T.STRING, "controlvector")
            out.add("controlvector.layer_count", T.INT32, 1)
            out.add_tensor("direction.1", (64,), 0)
            out.write("direction.1", np.full(64, 0.01, np.float32))
        return path

    def imatrix(self, suffix: str) -> Path:
        """An importance matrix of two tensors in one of the two forms, dat or gguf."""
        dat = self.folder / "imatrix.dat"
        rows = [1.0 + i for i in range(64)]
        entries = ("blk.0.ffn_up.weight", 7, rows), ("blk.1.ffn_up.weight", 7, rows)
        dat.write_bytes(legacy(*entries, trailer=trailer(7, b"x.txt")))
        if suffix == "dat":
            return dat
        return self.run(
            self.folder / "imatrix.gguf", "imatrix", "--in-file", str(dat), "-o", str(dat.with_suffix(".gguf"))
        )

    def prompt_cache(self) -> Path:
        """A state of a few tokens."""
        path = self.folder / "state"
        return self.run(path, *self.generate(self.model), "--prompt-cache", str(path))

    def lookup_cache(self) -> Path:
        """Statistics of a few n-grams."""
        path = self.folder / "lookup"
        cache = NgramCache()
        cache.learn([5, 6, 7, 5, 6, 7, 8, 5, 6, 9] * 3, 0)
        cache.save(path)
        return path

    def logits(self) -> Path:
        """A base file of KL divergence."""
        path = self.folder / "base"
        return self.run(path, *self.perplexity(), "--kl-divergence-base", str(path))

    def generate(self, model: Path) -> list[str]:
        """A command line that writes two tokens."""
        return ["cli", "-m", str(model), "-p", "The sea, the sea", "-n", "2", "-c", "64", "-t", "1", "--seed", "1",
                "-no-cnv", "--no-warmup"]  # fmt: skip

    def perplexity(self, *extra: str) -> list[str]:
        """A command line over the text."""
        return [
            "perplexity",
            "-m",
            str(self.model),
            "-f",
            str(self.text),
            "-c",
            "32",
            "-t",
            "1",
            "--chunks",
            "2",
            *extra,
        ]
