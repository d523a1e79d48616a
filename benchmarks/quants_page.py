"""Writes the measured tables of docs/quants.md between its markers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ikpy.quants import registry

START, END = "<!-- tables written by benchmarks/quantize.py -->", "<!-- end of the tables -->"


def ratio(pair: list[float] | None) -> str:
    """ours / reference, or a dash."""
    if not pair or len(pair) < 2:
        return "–"
    return f"{pair[0] / pair[1]:.3f}" if pair[1] > 0 else "1.000"


def encode_table(types: dict[str, Any]) -> list[str]:
    """Errors and speed of every type."""
    lines = [
        "| type | bpw | error, Gaussian | ours/ref | no imatrix "
        "| error, real | ours/ref | no imatrix | rows/s | ours/ref |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, entry in types.items():
        if not (e := entry.get("encode")):
            continue
        cells = [f"`{name}`", f"{registry.by_name(name).bits_per_weight:g}"]
        for data in ("gaussian", "real"):
            weighted = e[f"{data} imatrix"]
            cells += [f"{weighted[0]:.5f}", ratio(weighted), ratio(e[data])]
        cells += [f"{e['rows/s'][0]:.0f}", f"{e['rows/s'][0] / e['rows/s'][1]:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def model_table(types: dict[str, Any], model: str, base: float) -> list[str]:
    """Perplexity and divergence of a model in every type, and their sums."""
    lines = [
        f"### {model} (F16: {base:.3f})",
        "",
        "| type | PPL ours | PPL ref | KLD ours | KLD ref | KLD ours/ref |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    logs, better, total = [], 0, 0
    sums = [0.0, 0.0, 0.0, 0.0]
    for name, entry in types.items():
        scores = entry.get("models", {}).get(model, {})
        if "ours" not in scores or "reference" not in scores:
            continue
        o, r = scores["ours"], scores["reference"]
        lines.append(
            f"| `{name}` | {o['ppl']:.3f} | {r['ppl']:.3f} | {o['kld']:.5f} ± {o['kld_error']:.5f} "
            f"| {r['kld']:.5f} ± {r['kld_error']:.5f} | {o['kld'] / r['kld']:.3f} |"
        )
        logs.append(math.log(o["kld"] / r["kld"]))
        better += o["kld"] < r["kld"]
        total += 1
        for i, value in enumerate((o["ppl"], r["ppl"], o["kld"], r["kld"])):
            sums[i] += value
    if total:
        lines.append(
            f"| mean | {sums[0] / total:.3f} | {sums[1] / total:.3f} | {sums[2] / total:.5f} | {sums[3] / total:.5f} "
            f"| {math.exp(sum(logs) / total):.3f} (geometric); lower for {better} of {total} |"
        )
    return [*lines, ""]


def write_page(results: dict[str, Any], page: Path) -> None:
    """Replaces what lies between the markers of the page."""
    types = results["types"]
    lines = ["## Encoders", "", *encode_table(types), "", "## Models", ""]
    for model, base in results.get("base", {}).items():
        lines += model_table(types, model, base)
    before, _, rest = page.read_text().partition(START)
    after = rest.partition(END)[2]
    page.write_text(before + START + "\n\n" + "\n".join(lines).rstrip() + "\n\n" + END + after)
