"""Engines that benchmarks.compare can time, behind one interface: prompt(n) and generate(n) return seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ikpy.quants import registry

N_UBATCH = 512  # the default of all engines


class Peer(Protocol):
    """An engine with a loaded model and an empty cache at the start of every call."""

    name: str

    def prompt(self, n_tokens: int) -> float:
        """Seconds to evaluate a prompt of n_tokens with logits of the last one."""

    def generate(self, n_tokens: int, depth: int = 0) -> float:
        """Seconds to evaluate n_tokens one by one after depth cached tokens."""

    def close(self) -> None:
        """Frees the model."""


class DeepPeer(Peer, Protocol):
    """An engine whose cache can be filled step by step."""

    def extend(self, n_tokens: int, depth: int) -> float:
        """Seconds to evaluate n_tokens at once after the depth tokens that are cached; they stay in the cache."""


def random_tokens(n: int) -> list[int]:
    """Token ids of a prompt, the same for every peer."""
    return [int(t) for t in np.random.default_rng(1).integers(300, 4000, n)]


class Clock:
    """What ikpy and ik_llama.cpp are timed with. On busy machines the processor time of one thread is steadier."""

    now = staticmethod(time.perf_counter)


class Loading:
    """How ikpy and ik_llama.cpp load models. use_mmap: False reads them into memory, ikpy into huge pages."""

    use_mmap = True


def types_of_cache(name: str) -> tuple[str, str]:
    """Types of K and V: "q8_KV:f16", or "q8_0" for both."""
    type_k, _, type_v = name.partition(":")
    return type_k, type_v or type_k


class Ikpy:
    """This project."""

    name = "ikpy"

    @staticmethod
    def runs(type_name: str) -> bool:
        """Whether the engine knows the weight type."""
        return True

    def __init__(
        self, path: str, n_ctx: int, n_threads: int, n_ubatch: int = N_UBATCH, cache_type: str = "f16"
    ) -> None:
        from ikpy import Context, ContextParams, Model, ModelParams

        type_k, type_v = types_of_cache(cache_type)
        self.model = Model.load(path, ModelParams(use_mmap=Loading.use_mmap))
        params = ContextParams(n_ctx=n_ctx, n_ubatch=n_ubatch, n_threads=n_threads, type_k=type_k, type_v=type_v)
        self.context = Context(self.model, params)

    def _decode(self, tokens: list[int], pos: int) -> None:
        from ikpy import Batch

        for start in range(0, len(tokens), self.context.n_batch):
            self.context.decode(Batch.single(tokens[start : start + self.context.n_batch], pos + start), copy=False)

    def prompt(self, n_tokens: int) -> float:
        self.context.kv.clear()
        started = Clock.now()
        self._decode(random_tokens(n_tokens), 0)
        return Clock.now() - started

    def generate(self, n_tokens: int, depth: int = 0) -> float:
        self.context.kv.clear()
        if depth:
            self._decode(random_tokens(depth), 0)
        started = Clock.now()
        for i in range(n_tokens):
            self._decode([500 + i], depth + i)
        return Clock.now() - started

    def extend(self, n_tokens: int, depth: int) -> float:
        started = Clock.now()
        self._decode(random_tokens(n_tokens), depth)
        return Clock.now() - started

    def continue_tokens(self, n_tokens: int, depth: int) -> float:
        """Seconds to evaluate n_tokens one by one after the depth tokens that are cached; the cache is cut back."""
        started = Clock.now()
        for i in range(n_tokens):
            self._decode([500 + i], depth + i)
        seconds = Clock.now() - started
        if depth:
            self.context.kv.seq_rm(0, depth, -1)
        else:
            self.context.kv.clear()
        return seconds

    def close(self) -> None:
        del self.context, self.model


class IkLlama:
    """ik_llama.cpp through the ik-llama-cpp-python package (an AVX2 build), with flash attention.

    The package leaves that out where it finds no AVX-VNNI, for which it asks py-cpuinfo, and where that is missing.
    """

    name = "ik-llama-cpp-python"

    @staticmethod
    def runs(type_name: str) -> bool:
        """Whether the engine knows the weight type: this build computes nonsense from bf16_r16."""
        return type_name.lower() != "bf16_r16"

    def __init__(
        self, path: str, n_ctx: int, n_threads: int, n_ubatch: int = N_UBATCH, cache_type: str = "f16"
    ) -> None:
        with _quiet():
            from ik_llama_cpp import IkLlama as Llama
            from ik_llama_cpp import _internals as internals
            from ik_llama_cpp import llama as package

            def params() -> Any:
                values = defaults()
                values.n_ubatch = n_ubatch
                values.type_k, values.type_v = (registry.by_name(name).id for name in types_of_cache(cache_type))
                return values

            use_mmap = Loading.use_mmap
            package._cpu_has_avx_vnni = lambda: True
            defaults = internals.C.llama_context_default_params
            internals.C.llama_context_default_params = params  # the package has no arguments for these
            try:
                self.llama: Any = Llama(path, n_ctx=n_ctx, n_threads=n_threads, use_mmap=use_mmap, verbose=False)
            finally:
                internals.C.llama_context_default_params = defaults
        self.context, self.n_ubatch = self.llama._context, n_ubatch

    def _prompt(self, tokens: list[int], pos: int = 0) -> None:
        from ik_llama_cpp._internals import make_batch_range

        for start in range(0, len(tokens), self.n_ubatch):
            batch = make_batch_range(tokens[start : start + self.n_ubatch], pos_start=pos + start)
            if self.context.decode(batch):
                raise RuntimeError("ik-llama-cpp-python failed to decode")

    def prompt(self, n_tokens: int) -> float:
        self.context.kv_cache_clear()
        started = Clock.now()
        self._prompt(random_tokens(n_tokens))
        return Clock.now() - started

    def generate(self, n_tokens: int, depth: int = 0) -> float:
        from ik_llama_cpp._internals import make_batch_single

        self.context.kv_cache_clear()
        if depth:
            self._prompt(random_tokens(depth))
        started = Clock.now()
        for i in range(n_tokens):
            if self.context.decode(make_batch_single(500 + i, depth + i)):
                raise RuntimeError("ik-llama-cpp-python failed to decode")
        return Clock.now() - started

    def extend(self, n_tokens: int, depth: int) -> float:
        started = Clock.now()
        self._prompt(random_tokens(n_tokens), depth)
        return Clock.now() - started

    def close(self) -> None:
        self.context.close()


class XLlama:
    """llama.cpp through the xllamacpp package; its server reports the timings."""

    name = "xllamacpp"

    @staticmethod
    def runs(type_name: str) -> bool:
        """Whether the engine knows the weight type: mainline's ids end at 41."""
        return registry.by_name(type_name).id <= 41

    def __init__(self, path: str, n_ctx: int, n_threads: int, n_ubatch: int = N_UBATCH) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx = n_ctx
        params.n_ubatch = n_ubatch
        params.n_parallel = 1
        params.cpuparams.n_threads = n_threads
        params.cpuparams_batch.n_threads = n_threads
        params.warmup = False
        params.verbosity = -1
        with _quiet():
            self.server: Any = xllamacpp.Server(params)

    def _timings(self, tokens: list[int], n_predict: int) -> dict[str, float]:
        request = {
            "prompt": tokens,
            "n_predict": n_predict,
            "ignore_eos": True,
            "cache_prompt": False,
            "temperature": 0,
        }
        return self.server.handle_completions(request)["timings"]

    def prompt(self, n_tokens: int) -> float:
        return self._timings(random_tokens(n_tokens), 1)["prompt_ms"] / 1e3

    def generate(self, n_tokens: int, depth: int = 0) -> float:
        timings = self._timings(random_tokens(max(depth, 1)), n_tokens)
        return timings["predicted_ms"] / 1e3 * n_tokens / timings["predicted_n"]

    def close(self) -> None:
        del self.server


class LlamaBench:
    """A reference executable with the options and JSON output of llama-bench."""

    def __init__(self, executable: str, path: str, n_threads: int, n_ubatch: int = N_UBATCH) -> None:
        self.name = Path(executable).name
        sizes = ["-t", str(n_threads), "-ub", str(n_ubatch)]
        self.command = [executable, "-m", path, *sizes, "-r", "1", "-o", "json", "-fa", "1"]

    def _rate(self, *options: str) -> float:
        """Tokens/s of the last test of a run."""
        run = subprocess.run([*self.command, *options], capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(f"{' '.join(self.command)}: {run.stderr.strip().splitlines()[-1:]}")
        return float(json.loads(run.stdout)[-1]["avg_ts"])

    def prompt(self, n_tokens: int) -> float:
        return n_tokens / self._rate("-p", str(n_tokens), "-n", "0")

    def generate(self, n_tokens: int, depth: int = 0) -> float:
        where = ("-n", "0", "-gp", f"{depth},{n_tokens}") if depth else ("-n", str(n_tokens))
        return n_tokens / self._rate("-p", "0", *where)

    def close(self) -> None:
        """Nothing stays loaded between runs."""


PEERS = {"ikpy": Ikpy, "ik": IkLlama, "xllama": XLlama}
DEEP_PEERS: dict[str, type[Ikpy] | type[IkLlama]] = {"ikpy": Ikpy, "ik": IkLlama}


def open_peers(
    names: Sequence[str],
    executables: Sequence[str],
    type_name: str,
    path: str,
    n_ctx: int,
    n_threads: int,
    n_ubatch: int = N_UBATCH,
) -> list[Peer]:
    """The engines that know the weight type, each with the model loaded.

    A peer that cannot load the model is left out, with a line on stderr: its column stays empty.
    """
    peers: list[Peer] = []
    for name in names:
        if not PEERS[name].runs(type_name):
            continue
        try:
            peers.append(PEERS[name](path, n_ctx, n_threads, n_ubatch))
        except RuntimeError as error:
            if name == "ikpy":
                raise
            print(f"{name} is left out: {error}", file=sys.stderr)
    return peers + [LlamaBench(executable, path, n_threads, n_ubatch) for executable in executables]


class _quiet:
    """Sends the native log lines of a peer's load to nowhere."""

    def __enter__(self) -> None:
        self.saved = os.dup(2)
        self.null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(self.null, 2)

    def __exit__(self, *_: object) -> None:
        os.dup2(self.saved, 2)
        os.close(self.saved)
        os.close(self.null)
