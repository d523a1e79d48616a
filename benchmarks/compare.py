"""Times ikpy and its peers in alternation on synthetic models of real shapes.

    python -m benchmarks.compare --shape llama-1b --layers 8 --types q4_0,q8_0 [--peers ikpy,ik,xllama] [--repeats 3]

Every round runs each engine once (A B C A B C ...); the table shows medians, the ratio to the fastest peer, and the
share of this machine's own ceilings, measured in the same run: dot products for prompts (the tile unit's bf16 rate on
CPUs that have one), read bandwidth for generation. --peer-bin adds a llama-bench executable. Markdown goes to stdout,
JSON with all samples to --json FILE. benchmarks.report runs everything and makes the tables of docs/performance-*.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.ceiling import Ceilings
from benchmarks.peers import PEERS, DeepPeer, Loading, Peer, open_peers
from benchmarks.synthetic import write_model
from ikpy import GGUFFile
from ikpy._native import tier
from ikpy.machine.threads import physical_cores
from ikpy.tools.machine import cpu_name

Samples = dict[str, dict[str, list[float]]]


def active_work(path: str) -> tuple[float, float]:
    """Multiply-adds per prompt token in the layers, and bytes read per generated token (all experts used counted)."""
    with GGUFFile.open(path) as gguf:
        arch = gguf.metadata["general.architecture"]
        experts = gguf.get(f"{arch}.expert_count", 0)
        share = gguf.get(f"{arch}.expert_used_count", 0) / experts if experts else 1.0
        macs = bytes_read = 0.0
        for info in gguf.tensors.values():
            used = share if "_exps" in info.name else 1.0
            if info.name.startswith("blk.") and len([n for n in info.shape if n > 1]) > 1:
                macs += info.element_count * used
            if info.name != "token_embd.weight" or "output.weight" not in gguf.tensors:
                bytes_read += info.nbytes * used
    return macs, bytes_read


def dot_ceiling(type_name: str, ceilings: dict[str, float]) -> float:
    """The arithmetic ceiling that bounds prompts of a weight type, in 1e9 operations/s."""
    if type_name in ("f32", "f16"):
        return ceilings["fp32"]
    tiles = ceilings["amx_bf16"]
    return tiles or (ceilings["bf16"] or ceilings["fp32"] if type_name == "bf16" else ceilings["int8"])


def alternate(engines: list[Peer], prompt: int, generate: int, depth: int, repeats: int) -> Samples:
    """Tokens/s (test -> peer -> values) of engines that take turns; a first round warms caches and page tables."""
    samples: Samples = {test: {e.name: [] for e in engines} for test in ("pp", "tg")}
    for repeat in range(repeats + 1):
        for engine in engines:
            pp = prompt / engine.prompt(prompt)
            tg = generate / engine.generate(generate, depth)
            if repeat:
                samples["pp"][engine.name].append(pp)
                samples["tg"][engine.name].append(tg)
    return samples


def alternate_batches(engines: list[Peer], sizes: Iterable[int], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Tokens/s (peer -> batch size -> values) of prompts of few tokens; the first of the rounds does not count."""
    rates: dict[str, dict[str, list[float]]] = {e.name: {} for e in engines}
    for repeat in range(repeats + 1):
        for n in sizes:
            for engine in engines:
                rate = n / engine.prompt(n)
                if repeat:
                    rates[engine.name].setdefault(str(n), []).append(rate)
    return rates


def alternate_depths(
    engines: list[DeepPeer], depths: Iterable[int], step: int, generate: int, repeats: int
) -> dict[str, Samples]:
    """Tokens/s (depth -> test -> peer -> values) of step tokens at once and of generate single ones behind depth.

    depths ascend from 0. All engines fill their caches in the same steps.
    """
    found: dict[str, Samples] = {str(d): {test: {e.name: [] for e in engines} for test in ("pp", "tg")} for d in depths}
    for engine in engines:
        engine.prompt(step)
    for _ in range(repeats):
        at = 0
        for depth, samples in found.items():
            while at < int(depth):
                n = min(step, int(depth) - at)
                for engine in engines:
                    engine.extend(n, at)
                at += n
            for engine in engines:
                seconds = engine.extend(step, at) if at else engine.prompt(step)
                samples["pp"][engine.name].append(step / seconds)
                seconds = sum(engine.extend(1, at + step + i) for i in range(generate))
                samples["tg"][engine.name].append(generate / seconds)
            at += step + generate
    return found


def table_rows(
    type_name: str, path: str, names: list[str], samples: dict, ceilings: dict[str, float], a: argparse.Namespace
) -> list[str]:
    """Markdown rows of one model."""
    macs, bytes_read = active_work(path)
    rows = []
    for test, label in (("pp", f"pp{a.prompt}"), ("tg", f"tg{a.generate}" + (f" @ d{a.depth}" if a.depth else ""))):
        medians = {name: statistics.median(values) for name, values in samples[test].items()}
        ours = medians.get("ikpy", 0.0)
        others = [v for name, v in medians.items() if name != "ikpy"]
        if test == "pp":
            share = ours * macs * 2 / 1e9 / dot_ceiling(type_name, ceilings)
        else:
            share = ours * bytes_read / 1e9 / ceilings["read"]
        ratio = f"{ours / max(others):.2f}" if others else ""
        cells = " | ".join(f"{medians[name]:.1f}" if name in medians else "-" for name in names)
        rows.append(f"| {type_name} | {label} | {cells} | {ratio} | {100 * share:.0f} % |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--types", default="q4_0,q8_0,q4_K,iq4_k,bf16")
    parser.add_argument("--attn")
    parser.add_argument("--peers", default="ikpy,ik,xllama")
    parser.add_argument("--peer-bin", action="append", default=[], help="llama-bench executable; may be repeated")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--no-mmap", action="store_true", help="read models into memory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    a = parser.parse_args()
    Loading.use_mmap = not a.no_mmap
    peers = a.peers.split(",")
    names = [PEERS[p].name for p in peers] + [Path(p).name for p in a.peer_bin]
    found = Ceilings([a.threads])
    print(f"{cpu_name()}, {a.threads} threads, ikpy tier {tier}; shape {a.shape}, layers {a.layers or 'all'}\n")
    print(f"| type | test | {' | '.join(names)} | ikpy / best peer | share of ceiling |")
    print("|---|---|" + "---:|" * (len(names) + 2))
    report: dict = {"cpu": cpu_name(), "threads": a.threads, "tier": tier, "shape": a.shape, "models": {}}
    for type_name in a.types.split(","):
        path = str(Path(a.folder) / f"ikpy-{a.shape}-{a.layers or 'all'}-{type_name}.gguf")
        write_model(a.shape, type_name, path, layers=a.layers, attn=a.attn)
        found.sample()
        engines = open_peers(peers, a.peer_bin, type_name, path, a.prompt + a.depth + a.generate + 64, a.threads)
        samples = alternate(engines, a.prompt, a.generate, a.depth, a.repeats)
        for engine in engines:
            engine.close()
        found.sample()
        ceilings = dict(found.best[a.threads])
        print("\n".join(table_rows(type_name, path, names, samples, ceilings, a)), flush=True)
        report["models"][type_name] = {"samples": samples, "ceilings": ceilings}
        Path(path).unlink()
    if a.json:
        a.json.write_text(json.dumps(report, indent=1))
        print(f"\nsamples in {a.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
