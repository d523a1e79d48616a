"""Times ikpy and its peers in alternation on synthetic models of real shapes.

    python -m benchmarks.compare --shape llama-1b --layers 8 --types q4_0,q8_0 [--peers ikpy,ik,xllama] [--repeats 3]

Every round runs each engine once (A B C A B C ...); the table shows medians, the ratio to the fastest peer, and the
share of this machine's own ceilings, measured in the same run: int8 (or bf16, fp32) dot products for prompts, read
bandwidth for generation. Markdown goes to stdout, JSON with all samples and the machine to --json FILE.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.ceiling import measure
from benchmarks.peers import PEERS, Peer
from benchmarks.synthetic import write_model
from ikpy import GGUFFile
from ikpy._native import core, tier
from ikpy.threads import physical_cores


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
    if type_name == "bf16":
        return ceilings["bf16"] or ceilings["fp32"]
    return ceilings["int8"]


def run_model(path: str, peers: list[str], a: argparse.Namespace) -> tuple[dict[str, dict[str, list[float]]], float]:
    """Samples in tokens/s (test -> peer -> values), and the median read bandwidth measured between them in GB/s."""
    n_ctx = a.prompt + a.depth + a.generate + 64
    engines: list[Peer] = [PEERS[name](path, n_ctx, a.threads) for name in peers]
    reads: list[float] = []
    samples: dict[str, dict[str, list[float]]] = {
        "pp": {e.name: [] for e in engines},
        "tg": {e.name: [] for e in engines},
    }
    for repeat in range(a.repeats + 1):
        for engine in engines:
            pp = a.prompt / engine.prompt(a.prompt)
            reads.append(core.ceiling("read", a.threads))
            tg = a.generate / engine.generate(a.generate, a.depth)
            if repeat:  # the first round warms caches and page tables
                samples["pp"][engine.name].append(pp)
                samples["tg"][engine.name].append(tg)
    for engine in engines:
        engine.close()
    return samples, statistics.median(reads)


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


def cpu_name() -> str:
    """Model name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--types", default="q4_0,q8_0,q4_K,iq4_k,bf16")
    parser.add_argument("--attn")
    parser.add_argument("--peers", default="ikpy,ik,xllama")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    a = parser.parse_args()
    peers = a.peers.split(",")
    names = [PEERS[p].name for p in peers]
    print(f"{cpu_name()}, {a.threads} threads, ikpy tier {tier}; shape {a.shape}, layers {a.layers or 'all'}\n")
    print(f"| type | test | {' | '.join(names)} | ikpy / best peer | share of ceiling |")
    print("|---|---|" + "---:|" * (len(names) + 2))
    report: dict = {"cpu": cpu_name(), "threads": a.threads, "tier": tier, "shape": a.shape, "models": {}}
    for type_name in a.types.split(","):
        path = str(Path(a.folder) / f"ikpy-{a.shape}-{a.layers or 'all'}-{type_name}.gguf")
        write_model(a.shape, type_name, path, layers=a.layers, attn=a.attn)
        ceilings = measure(a.threads)
        samples, ceilings["read"] = run_model(path, [p for p in peers if PEERS[p].runs(type_name)], a)
        print("\n".join(table_rows(type_name, path, names, samples, ceilings, a)), flush=True)
        report["models"][type_name] = {"samples": samples, "ceilings": ceilings}
        Path(path).unlink()
    if a.json:
        a.json.write_text(json.dumps(report, indent=1))
        print(f"\nsamples in {a.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
