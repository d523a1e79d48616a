"""Runs the whole performance report and writes it as JSON, piece by piece, until done or out of time.

    python -m benchmarks.report [--minutes M] [--json REPORT.json] [--peers ikpy,ik] [--peer-bin llama-bench]
    python -m benchmarks.tables REPORT.json PAGE.md [--plot PICTURE.png]

Sections, in this order: every weight type (prompt, generation), model shapes (also generation at depth), thread
scaling, small batches, sweep over the context length, attention at depth per cache type. Engines alternate within a
section. Where they are asked for (--sections depths), prompts and generation at depths per cache type are compared
too, with q4_0 weights; K and V may differ ("q8_KV:f16": the PyPI build of ik_llama.cpp ends where V is q8_KV, and with
q5_0 and q5_1). Ceilings are sampled before, between and after the pieces; the best sample counts. The JSON is rewritten
after every piece, so a run that ends early keeps what it has. The column of ik_llama.cpp stays empty for deepseek-lite:
it refuses fewer than 27 layers, and the PyPI build crashes on all of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.ceiling import Ceilings
from benchmarks.compare import Samples, active_work, alternate, alternate_batches, alternate_depths
from benchmarks.peers import DEEP_PEERS, N_UBATCH, PEERS, Clock, DeepPeer, Ikpy, Loading, open_peers
from benchmarks.shapes import SHAPES
from benchmarks.synthetic import write_model
from ikpy import __version__
from ikpy._native import core, tier
from ikpy.machine.threads import physical_cores
from ikpy.quants import by_name, registry
from ikpy.tools.machine import compiler, cpu_name

ALL_TYPES = (
    *("q4_0", "q4_1", "q5_0", "q5_1", "q6_0", "q8_0", "iq4_nl", "iq4_xs", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K"),
    *("iq2_k", "iq3_k", "iq4_k", "iq5_k", "iq6_k", "iq2_ks", "iq3_ks", "iq4_ks", "iq5_ks", "iq4_kss", "iq2_kl"),
    *("iq1_kt", "iq2_kt", "iq3_kt", "iq4_kt", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"),
    *("f16", "bf16", "mxfp4", "q8_KV", "iq1_bn", "iq2_bn"),
    *("q4_0_r8", "q5_0_r4", "q6_0_r4", "q8_0_r8", "iq4_nl_r4", "iq4_xs_r8", "q2_k_r4", "q3_k_r4", "q4_k_r4"),
    *("q5_k_r4", "q6_k_r4", "iq2_k_r4", "iq3_k_r4", "iq4_k_r4", "iq5_k_r4", "iq4_ks_r4", "iq5_ks_r4", "iq1_s_r4"),
    *("iq1_m_r4", "iq2_xxs_r4", "iq2_xs_r4", "iq2_s_r4", "iq3_xxs_r4", "iq3_s_r4", "iq2_bn_r4", "bf16_r16"),
)


class ShapeModel(NamedTuple):
    """A model of the section shapes: its type, those of attention matrices and experts."""

    shape: str
    type: str
    attn: str | None = None
    experts: str | None = None


SHAPE_MODELS = (
    ShapeModel("llama-1b", "q4_K"),
    ShapeModel("llama-8b", "q4_K"),
    ShapeModel("qwen3-30b-a3b", "q4_K"),
    ShapeModel("deepseek-lite", "q8_0", "q8_0", "iq4_nl"),
)
CACHE_TYPES = registry.CACHE_TYPES[1:]  # without f32
BATCHES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32)

Piece = tuple[str, str, Callable[[], Any]]


def machine(threads: int) -> dict[str, Any]:
    """What the numbers depend on."""
    frequency = psutil.cpu_freq()
    return {
        "cpu": cpu_name(),
        "cores": physical_cores(),
        "threads": threads,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "mhz": round(frequency.current) if frequency else None,
        "load": psutil.getloadavg()[0],
        "tier": tier,
        "tiles": core.has_tiles(),
        "compiler": compiler(),
        "ikpy": __version__,
        "date": time.strftime("%Y-%m-%d"),
    }


class Report:
    """The pieces of a report and their results."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.a = a
        self.peers: list[str] = a.peers.split(",")
        self.ceilings = Ceilings([1, a.threads])
        names = [PEERS[p].name for p in self.peers] + [Path(p).name for p in a.peer_bin]
        self.data: dict[str, Any] = {"machine": machine(a.threads), "engines": names, "settings": self.settings()}
        if a.add and a.json.exists():
            found = json.loads(a.json.read_text())
            self.data |= {section: found[section] for section in ALL_SECTIONS.split(",") if section in found}
            self.ceilings.add(found["ceiling_samples"])

    def settings(self) -> dict[str, Any]:
        """Numbers that the tables name."""
        return {
            key: getattr(self.a, key)
            for key in ("prompt", "generate", "depth", "repeats", "layers", "vocab", "threads", "no_mmap", "cpu_time")
        }

    def model(self, shape: str, type_name: str) -> Path:
        """A synthetic model; the caller removes it."""
        return self.shape_model(ShapeModel(shape, type_name))

    def shape_model(self, model: ShapeModel) -> Path:
        """A synthetic model; the caller removes it."""
        path = Path(self.a.folder) / f"ikpy-report-{model.shape}-{model.type}.gguf"
        types = {"attn": model.attn, "experts": model.experts}
        write_model(model.shape, model.type, str(path), layers=self.a.layers, vocab=self.a.vocab, **types)
        return path

    def compared(
        self, path: Path, type_name: str, *, depth: int = 0, threads: int | None = None, prompt: int | None = None
    ) -> dict[str, Any]:
        """Samples of all engines on a model, and the work that a token takes.

        prompt: evaluated as one micro-batch and timed with a single generated token; by default the usual tests.
        """
        a, n = self.a, threads or self.a.threads
        n_prompt, n_generate = (prompt, 1) if prompt else (a.prompt, a.generate)
        macs, bytes_read = active_work(str(path))
        n_ctx, n_ubatch = n_prompt + depth + n_generate + 64, max(prompt or 0, N_UBATCH)
        engines = open_peers(self.peers, a.peer_bin, type_name, str(path), n_ctx, n, n_ubatch)
        try:
            samples = alternate(engines, n_prompt, n_generate, depth, a.repeats)
        finally:
            for engine in engines:
                engine.close()
        work = {"macs": macs, "bytes": bytes_read, "depth": depth, "threads": n}
        return {"samples": samples, **work, **({"prompt": prompt} if prompt else {})}

    # pieces

    def weight_type(self, name: str) -> dict[str, Any]:
        path = self.model("llama-1b", name)
        try:
            return self.compared(path, name)
        finally:
            path.unlink()

    def shape(self, model: ShapeModel) -> list[dict[str, Any]]:
        path = self.shape_model(model)
        try:
            usual = [self.compared(path, model.type, depth=depth) for depth in (0, self.a.depth)]
            return [*usual, self.compared(path, model.type, prompt=self.a.long_prompt)]
        finally:
            path.unlink()

    def threads(self) -> list[dict[str, Any]]:
        path = self.model("llama-1b", "q4_K")
        try:
            counts = sorted({1, *(2**i for i in range(1, 8) if 2**i < self.a.threads), self.a.threads})
            return [self.compared(path, "q4_K", threads=n) for n in counts]
        finally:
            path.unlink()

    def small_batches(self, type_name: str) -> dict[str, dict[str, list[float]]]:
        """Engine -> batch size -> tokens/s."""
        path = self.model("llama-1b", type_name)
        engines = open_peers(self.peers, [], type_name, str(path), 256, self.a.threads)
        try:
            return alternate_batches(engines, self.a.batch_sizes, self.a.repeats)
        finally:
            for engine in engines:
                engine.close()
            path.unlink()

    def deep(self, shape: str, cache_type: str) -> dict[str, Samples]:
        """Depth -> test -> engine -> tokens/s of the engines whose caches can be filled step by step."""
        a, path, step = self.a, self.model(shape, "q4_0"), N_UBATCH
        n_ctx = a.depths[-1] + len(a.depths) * (step + a.generate)
        engines: list[DeepPeer] = []
        try:
            for peer in self.peers:
                if peer in DEEP_PEERS:
                    engines.append(DEEP_PEERS[peer](str(path), n_ctx, a.threads, step, cache_type))
            return alternate_depths(engines, a.depths, step, a.generate, a.repeats)
        finally:
            for engine in engines:
                engine.close()
            path.unlink()

    def sweep(self) -> list[dict[str, float]]:
        """Rows of prompt and generation speed at growing depth."""
        path = self.model("llama-1b", "q4_K")
        engine = Ikpy(str(path), self.a.sweep + 64, self.a.threads)
        rows = []
        try:
            for depth in range(0, self.a.sweep - self.a.prompt + 1, self.a.prompt):
                tg = self.a.generate / engine.continue_tokens(self.a.generate, depth)
                rows.append({"depth": depth, "tg": tg, "pp": self.a.prompt / engine.extend(self.a.prompt, depth)})
        finally:
            engine.close()
            path.unlink()
        return rows

    def attention(self, cache_type: str) -> dict[str, float]:
        """Bytes/s at which generation reads the cache: the time a token takes longer at depth than without cache."""
        shape = SHAPES["llama-1b"]
        path = self.model("llama-1b", "q4_K")
        engine = Ikpy(str(path), self.a.attention_depth + self.a.generate + 64, self.a.threads, cache_type=cache_type)
        try:
            shallow, deep = [], []
            for depth in range(0, self.a.attention_depth, 512):
                engine.extend(min(512, self.a.attention_depth - depth), depth)
            for _ in range(self.a.repeats + 1):
                deep.append(engine.continue_tokens(self.a.generate, self.a.attention_depth))
            engine.context.kv.clear()
            for _ in range(self.a.repeats + 1):
                shallow.append(engine.continue_tokens(self.a.generate, 0))
        finally:
            engine.close()
            path.unlink()
        layers = self.a.layers or shape.layers
        row = by_name(cache_type).row_nbytes(shape.heads_kv * shape.head_size)
        read = 2.0 * row * layers * self.a.attention_depth
        seconds = (min(deep) - min(shallow)) / self.a.generate
        return {"bytes": read, "seconds": seconds, "depth": self.a.attention_depth}

    # running

    def pieces(self) -> Iterator[Piece]:
        """Section, name and work of every piece."""
        a = self.a
        for name in a.types.split(","):
            yield "types", name, lambda name=name: self.weight_type(name)
        chosen = a.shapes.split(",")
        for model in SHAPE_MODELS:
            if model.shape in chosen:
                yield "shapes", model.shape, lambda model=model: self.shape(model)
        yield "threads", "llama-1b", self.threads
        for name in a.batch_types.split(","):
            yield "batches", name, lambda name=name: self.small_batches(name)
        yield "sweep", "llama-1b", self.sweep
        for name in a.cache_types.split(","):
            yield "attention", name, lambda name=name: self.attention(name)
        for shape in a.deep_shapes.split(","):
            for name in a.cache_types.split(","):
                yield "depths", f"{shape} {name}", lambda shape=shape, name=name: self.deep(shape, name)

    def save(self) -> None:
        self.data["ceilings"] = {str(n): best for n, best in self.ceilings.best.items()}
        self.data["ceiling_samples"] = {str(n): samples for n, samples in self.ceilings.samples.items()}
        self.a.json.write_text(json.dumps(self.data, indent=1, default=float) + "\n")

    def run(self) -> None:
        """All pieces of the chosen sections, or those that start before the time is up."""
        end = time.monotonic() + 60 * self.a.minutes
        sections = self.a.sections.split(",")
        skipped: list[str] = []
        self.ceilings.sample()
        for section, name, work in self.pieces():
            if section not in sections:
                continue
            if time.monotonic() > end:
                skipped.append(f"{section} {name}")
                continue
            print(f"{section}: {name}", flush=True)
            self.data.setdefault(section, {})[name] = work()
            self.ceilings.sample()
            self.save()
        self.data["skipped"] = skipped
        self.save()
        if skipped:
            print(f"out of time; not measured: {', '.join(skipped)}")


SECTIONS = "types,shapes,threads,batches,sweep,attention"
ALL_SECTIONS = f"{SECTIONS},depths"


def numbers(text: str) -> list[int]:
    """Ascending numbers from a list with commas."""
    return sorted({int(word) for word in text.split(",")})


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120, help="no piece starts after this time")
    parser.add_argument("--json", type=Path, default=Path("docs/performance-amx.json"))
    parser.add_argument("--add", action="store_true", help="keep the pieces and ceilings that the JSON file has")
    parser.add_argument("--sections", default=SECTIONS)
    parser.add_argument("--types", default=",".join(ALL_TYPES))
    parser.add_argument("--shapes", default=",".join(model.shape for model in SHAPE_MODELS))
    parser.add_argument("--layers", type=int, default=4, help="layers per model; 0: all of the shape")
    parser.add_argument("--vocab", type=int, default=0, help="size of the vocabulary; 0: that of the shape")
    parser.add_argument("--peers", default="ikpy,ik")
    parser.add_argument("--peer-bin", action="append", default=[], help="llama-bench executable; may be repeated")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--long-prompt", type=int, default=2048, help="the shapes' prompt in one micro-batch")
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4096, help="cached tokens of the shapes' second test")
    parser.add_argument("--sweep", type=int, default=16384, help="longest context of the sweep")
    parser.add_argument("--attention-depth", type=int, default=8192)
    parser.add_argument("--batch-types", default="q4_K", help="weight types of the section batches")
    parser.add_argument("--batch-sizes", type=numbers, default=list(BATCHES))
    parser.add_argument("--deep-shapes", default="llama-1b", help="model shapes of the section depths")
    parser.add_argument("--depths", type=numbers, default=[0, 4096, 8192], help="cached tokens of the section depths")
    parser.add_argument("--cache-types", default=",".join(CACHE_TYPES), help="of the sections attention and depths")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--cpu-time", action="store_true", help="processor time of one thread, for busy machines")
    parser.add_argument("--no-mmap", action="store_true", help="read models into memory")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="for the models, one at a time")
    return parser.parse_args(words)


def main() -> None:
    a = arguments()
    if a.cpu_time:
        a.threads, Clock.now = 1, time.process_time
    Loading.use_mmap = not a.no_mmap
    Report(a).run()


if __name__ == "__main__":
    main()
