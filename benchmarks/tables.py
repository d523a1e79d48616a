"""Turns the JSON of benchmarks.report into the tables of a page (docs/performance-*.md), and into a plot.

    python -m benchmarks.tables docs/performance-amx.json [MORE.json] docs/performance-amx.md [--plot PICTURE.png]

The text between the two marker lines of the Markdown file is replaced; what stands around it stays.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.ceiling import LABELS
from benchmarks.compare import dot_ceiling
from benchmarks.shapes import SHAPES

BEGIN, END = "<!-- benchmarks.tables: begin -->", "<!-- benchmarks.tables: end -->"
Data = dict[str, Any]


def table(headings: list[str], rows: list[list[str]], text_columns: int = 1) -> list[str]:
    """A Markdown table; columns after the first ones are aligned right."""
    aligned = ["---"] * text_columns + ["---:"] * (len(headings) - text_columns)
    return [f"| {' | '.join(row)} |" for row in (headings, aligned, *rows)] + [""]


def median(values: list[float] | None) -> float | None:
    return statistics.median(values) if values else None


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def ratio(values: dict[str, float | None]) -> float | None:
    """ikpy against the fastest other engine."""
    others = [v for name, v in values.items() if name != "ikpy" and v]
    own = values.get("ikpy")
    return own / max(others) if own and others else None


def medians(data: Data, entry: Data, test: str) -> dict[str, float | None]:
    return {name: median(entry["samples"][test].get(name)) for name in data["engines"]}


def share(data: Data, type_name: str, entry: Data, test: str) -> float | None:
    """ikpy's part of the ceiling that bounds the test: arithmetic for prompts, read bandwidth for generation."""
    own = medians(data, entry, test)["ikpy"]
    ceilings = data["ceilings"].get(str(entry["threads"]))
    if own is None or ceilings is None:
        return None
    if test == "pp":
        return own * entry["macs"] * 2e-9 / dot_ceiling(type_name, ceilings)
    return own * entry["bytes"] * 1e-9 / ceilings["read"]


def speed_rows(data: Data, label: str, type_name: str, entry: Data) -> list[list[str]]:
    """One row per test."""
    settings, rows = data["settings"], []
    for test in ("pp", "tg"):
        long_prompt = entry.get("prompt")
        if (entry["depth"] and test == "pp") or (long_prompt and test == "tg"):
            continue
        values = medians(data, entry, test)
        name = f"pp{long_prompt or settings['prompt']}" if test == "pp" else f"tg{settings['generate']}"
        name += f" @ {entry['depth']}" if entry["depth"] else ""
        factor, part = ratio(values), share(data, type_name, entry, test)
        cells = [number(values[engine]) for engine in data["engines"]]
        ends = ["-" if factor is None else f"{factor:.2f}", "-" if part is None or entry["depth"] else f"{part:.0%}"]
        rows.append([label, name, *cells, *ends])
    return rows


def speed_headings(data: Data, first: str) -> list[str]:
    return [first, "test", *data["engines"], "ikpy / best peer", "share of ceiling"]


def machine_lines(data: Data) -> list[str]:
    """The machine and its ceilings."""
    m, s = data["machine"], data["settings"]
    vocab = f", vocabulary of {s['vocab']}" if s.get("vocab") else ""
    clock = " of processor time" if s.get("cpu_time") else ""
    lines = [
        f"{m['cpu']}, {m['cores']} cores, {m['memory_gib']} GiB, {m['threads']} threads; ikpy {m['ikpy']}, "
        f"tier {m['tier']}{' with tiles' if m['tiles'] else ''}, {m['compiler']}; {m['date']}, "
        f"load {m['load']:.1f} at the start. Models cut to {s['layers'] or 'all'} layers{vocab}, "
        f"{'read into memory' if s['no_mmap'] else 'mapped'}; tokens/s{clock}, medians of {s['repeats']} rounds.",
        "",
    ]
    kinds = [kind for kind in LABELS if any(c.get(kind) for c in data["ceilings"].values())]
    rows = [[n, *(f"{c[kind]:.0f}" for kind in kinds)] for n, c in data["ceilings"].items()]
    return lines + table(["threads", *(LABELS[kind] for kind in kinds)], rows)


def type_lines(data: Data) -> list[str]:
    rows = [row for name, entry in data["types"].items() for row in speed_rows(data, name, name, entry)]
    return ["### Weight types (shape of Llama 3.2 1B)", "", *table(speed_headings(data, "type"), rows, 2)]


def shape_lines(data: Data) -> list[str]:
    rows = []
    for shape, entries in data["shapes"].items():
        for entry in entries:
            rows += speed_rows(data, shape, "q8_0", entry)
    return ["### Model shapes", "", *table(speed_headings(data, "shape"), rows, 2)]


def thread_lines(data: Data) -> list[str]:
    rows = []
    for entries in data["threads"].values():
        first = medians(data, entries[0], "tg")["ikpy"], medians(data, entries[0], "pp")["ikpy"]
        for entry in entries:
            tg, pp = medians(data, entry, "tg")["ikpy"], medians(data, entry, "pp")["ikpy"]
            scaled = [f"{new / old:.2f}" if new and old else "-" for new, old in zip((tg, pp), first, strict=True)]
            rows.append([str(entry["threads"]), number(pp), scaled[1], number(tg), scaled[0]])
    headings = ["threads", "prompt", "x of 1 thread", "generation", "x of 1 thread"]
    return ["### Threads (q4_K)", "", *table(headings, rows)]


def beside_best(values: dict[str, float | None]) -> str:
    """ikpy's value, in brackets the ratio to the fastest other engine."""
    factor = ratio(values)
    return number(values.get("ikpy")) + ("" if factor is None else f" ({factor:.2f})")


def batch_lines(data: Data) -> list[str]:
    """A row per type; a single type has a row per size and a column per engine."""
    measured = data["batches"]
    sizes = list(next(iter(next(iter(measured.values())).values())))
    heading = "tokens/s of n tokens evaluated at once"
    if len(measured) == 1:
        name, rates = next(iter(measured.items()))
        type_name = "q4_K" if name in SHAPES else name  # older reports have the shape here
        rows = [[n, *(number(median(rates[engine].get(n))) for engine in rates)] for n in sizes]
        return [f"### Small batches ({type_name}, {heading})", "", *table(["n", *rates], rows)]
    rows = [
        [name, *(beside_best({engine: median(of.get(n)) for engine, of in rates.items()}) for n in sizes)]
        for name, rates in measured.items()
    ]
    title = f"### Small batches ({heading}; in brackets times the best peer)"
    return [title, "", *table(["type", *(f"n = {n}" for n in sizes)], rows)]


def added_time(at: Data, base: Data, test: str) -> str:
    """What attention to the cached tokens adds to the time of a token: the peer's over that of ikpy."""
    added = {}
    for engine, rates in at[test].items():
        deep, shallow = median(rates), median(base[test][engine])
        added[engine] = 1 / deep - 1 / shallow if deep and shallow else 0.0
    others = [seconds for engine, seconds in added.items() if engine != "ikpy"]
    own = added.get("ikpy", 0.0)
    return f"{min(others) / own:.2f}" if others and own > 0 else "-"


def depth_lines(data: Data) -> list[str]:
    rows = []
    for name, depths in data["depths"].items():
        base = next(iter(depths.values()))
        for depth, at in depths.items():
            cells = [beside_best({e: median(rates) for e, rates in at[test].items()}) for test in ("pp", "tg")]
            added = [added_time(at, base, test) if at is not base else "-" for test in ("pp", "tg")]
            rows.append([*name.split(), depth, cells[0], added[0], cells[1], added[1]])
    title = (
        '### Depth (tokens/s; in brackets times the best peer, "time added": of what the depth adds to a token alone)'
    )
    headings = ["shape", "cache", "depth", "prompt", "time added", "generation", "time added"]
    return [title, "", *table(headings, rows, 2)]


def sweep_lines(data: Data) -> list[str]:
    points = next(iter(data["sweep"].values()))
    rows = [[str(int(p["depth"])), number(p["pp"]), number(p["tg"])] for p in points]
    return ["### Context length (q4_K)", "", *table(["cached tokens", "prompt", "generation"], rows)]


def attention_lines(data: Data) -> list[str]:
    read = data["ceilings"][str(data["settings"]["threads"])]["read"]
    rows = []
    for name, entry in data["attention"].items():
        rate = 1e-9 * entry["bytes"] / entry["seconds"] if entry["seconds"] > 0 else None
        rows.append([name, number(rate), "-" if rate is None else f"{rate / read:.0%}"])
    depth = next(iter(data["attention"].values()))["depth"]
    title = f"### Attention of one token over {depth} cached ones"
    return [title, "", *table(["cache type", "GB/s of cache", "share of read bandwidth"], rows)]


SECTIONS = {
    "types": type_lines,
    "shapes": shape_lines,
    "threads": thread_lines,
    "batches": batch_lines,
    "sweep": sweep_lines,
    "attention": attention_lines,
    "depths": depth_lines,
}


def markdown(data: Data) -> str:
    """All tables of a report; sections that were not measured are left out."""
    lines = machine_lines(data)
    for section, make in SECTIONS.items():
        if data.get(section):
            lines += make(data)
    if data.get("skipped"):
        lines += [f"Not measured for lack of time: {', '.join(data['skipped'])}.", ""]
    return "\n".join(lines)


def insert(text: str, tables: str) -> str:
    """The document with the tables between its markers, which are appended where it has none."""
    block = f"{BEGIN}\n\n{tables}\n{END}"
    if BEGIN not in text or END not in text:
        return f"{text.rstrip()}\n\n{block}\n"
    return text[: text.index(BEGIN)] + block + text[text.index(END) + len(END) :]


def plot(data: Data, path: Path) -> None:
    """Prompt and generation speed of every weight type, one bar per engine."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    types = list(data["types"])
    figure, axes = pyplot.subplots(2, 1, figsize=(max(6, 0.3 * len(types)), 8), constrained_layout=True)
    width = 0.8 / len(data["engines"])
    for axis, test, title in zip(axes, ("pp", "tg"), ("prompt", "generation"), strict=True):
        for i, engine in enumerate(data["engines"]):
            heights = [medians(data, data["types"][name], test)[engine] or 0.0 for name in types]
            axis.bar([x + i * width for x in range(len(types))], heights, width, label=engine)
        axis.set_title(f"{title}, tokens/s")
        axis.set_xticks([x + 0.4 - width / 2 for x in range(len(types))], types, rotation=90, fontsize=7)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, nargs="+", help="reports; several runs give several groups of tables")
    parser.add_argument("document", type=Path)
    parser.add_argument("--plot", type=Path, help="PNG of the weight types; needs matplotlib (extra: bench)")
    a = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in a.json]
    text = a.document.read_text() if a.document.exists() else ""
    a.document.write_text(insert(text, "\n".join(markdown(data) for data in reports)))
    typed = next((data for data in reports if data.get("types")), None)
    if a.plot and typed:
        plot(typed, a.plot)


if __name__ == "__main__":
    main()
