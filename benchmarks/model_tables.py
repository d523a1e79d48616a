"""Writes the measured tables of docs/models.md (MLA modes, cache types, expert reduction) and docs/zoo.md.

    python -m benchmarks.model_tables mla|cache|ser|zoo [--gqa MODEL.gguf] [--threads N] [--tokens N]

Each table stands between two comment lines of the page and is replaced as a whole. Perplexities are over the demo text
(second halves of chunks of 512 tokens); their differences between rows matter, not their size.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ikpy
from benchmarks.quality import perplexity, text_tokens
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.quants import registry

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"zoo": ROOT / "docs" / "zoo.md"}
TEXT = ROOT / "ikpy" / "assets" / "demo-text.txt"
CHUNK = 512
DEPTHS = (0, 4096, 16384)
N_STEPS = 20
CACHE_TYPES = registry.CACHE_TYPES[1:]  # f32 is what they are compared with
Row = Sequence[object]


def replace_table(name: str, lines: Sequence[str]) -> None:
    """Puts lines between the marks of a table in the page."""
    page = PAGES.get(name, ROOT / "docs" / "models.md")
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    head, rest = text.split(begin)
    page.write_text(head + begin + "\n".join(lines) + "\n" + end + rest.split(end, 1)[1], encoding="utf-8")


def markdown(header: Row, rows: Sequence[Row]) -> list[str]:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]


# latent attention


def mla_rows(args: argparse.Namespace) -> Iterator[Row]:
    """Mode, flash attention, cache type, PPL, bytes per token computed and allocated, t/s at several depths."""
    model = Model.load(ikpy.default_model_path())
    tokens = text_tokens(model, TEXT, args.tokens)
    for mla in range(4):
        for flash, types in ((True, CACHE_TYPES), (False, ("f16", "q8_0"))):
            for kind in types:
                settings = _cache_settings(kind, mla, flash) | {"n_threads": args.threads}
                ppl = perplexity(model, tokens, CHUNK, **settings)
                speeds, computed, allocated = generation_speeds(model, settings)
                yield mla, "on" if flash else "off", kind, f"{ppl:.3f}", computed, allocated, *speeds


def _cache_settings(kind: str, mla: int, flash: bool) -> dict[str, Any]:
    """A V cache of the same type where there is one and it may be quantized."""
    type_v = kind if mla == 0 and flash else "f16"
    return {"mla": mla, "flash_attn": flash, "type_k": kind, "type_v": type_v}


def generation_speeds(model: Model, settings: dict[str, Any]) -> tuple[list[str], int, int]:
    """Tokens per second at the depths, and bytes per cached token: by the formula and as allocated.

    Deep cells are taken without being computed: generation reads them all the same.
    """
    context = Context(model, ContextParams(**({"n_ctx": DEPTHS[-1] + 256, "n_ubatch": 128} | settings)))
    speeds = []
    for depth in DEPTHS:
        context.kv.clear()
        if depth:
            context.kv.place(Batch.single(range(depth)))
        context.decode(Batch.single([1], depth))
        best = min(_step_seconds(context, depth + i) for i in range(1, 1 + N_STEPS))
        speeds.append(f"{1 / best:.0f}")
    return speeds, formula_bytes(model, settings), context.kv.allocated_bytes // context.n_ctx


def _step_seconds(context: Context, position: int) -> float:
    began = time.perf_counter()
    context.decode(Batch.single([1], position))
    return time.perf_counter() - began


def formula_bytes(model: Model, settings: dict[str, Any]) -> int:
    """Bytes of a cached token by the sizes of rows."""
    hp, kind = model.hparams, registry.by_name(settings["type_k"])
    heads, rank, n_rot = hp.n_head[0], hp.extra["kv_lora_rank"], hp.n_rot
    if settings["mla"] == 0:
        value = registry.by_name(settings["type_v"]).row_nbytes(hp.n_embd_head_v)
        return hp.n_layer * heads * (kind.row_nbytes(hp.n_embd_head_k) + value)
    if kind.row_extra_bytes:
        return hp.n_layer * (kind.row_nbytes(rank) + kind.row_nbytes(n_rot))
    return hp.n_layer * kind.row_nbytes(rank + n_rot)


def mla_table(args: argparse.Namespace) -> list[str]:
    header = ["mode", "FA", "cache", "PPL", "bytes/token computed", "allocated", *(f"t/s at {d}" for d in DEPTHS)]
    return markdown(header, list(mla_rows(args)))


# cache types


def cache_table(args: argparse.Namespace) -> list[str]:
    """PPL per cache type, plain and with Hadamard transforms, for latents and for grouped heads."""
    latent = Model.load(ikpy.default_model_path())
    grouped = Model.load(args.gqa)
    tokens = {id(m): text_tokens(m, TEXT, args.tokens) for m in (latent, grouped)}

    def ppl(model: Model, kind: str, **more: Any) -> float:
        return perplexity(model, tokens[id(model)], CHUNK, n_threads=args.threads, type_k=kind, **more)

    base = ppl(latent, "f32"), ppl(grouped, "f32", type_v="f32")
    rows = []
    for kind in CACHE_TYPES:
        cells = [ppl(latent, kind) / base[0], ppl(grouped, kind, type_v=kind) / base[1]]
        if kind not in ("f16", "bf16"):
            cells.insert(1, ppl(latent, kind, k_hadamard=True) / base[0])
            cells.append(ppl(grouped, kind, type_v=kind, k_hadamard=True, v_hadamard=True) / base[1])
            texts = [f"{100 * (cell - 1):+.3f} %" for cell in cells]
        else:
            texts = [f"{100 * (cells[0] - 1):+.3f} %", "", f"{100 * (cells[1] - 1):+.3f} %", ""]
        rows.append([kind, *texts])
    return markdown(["cache", "latents", "with `-khad`", "K and V of heads", "with `-khad -vhad`"], rows)


# expert reduction


def ser_table(args: argparse.Namespace) -> list[str]:
    """PPL while -ser keeps more and more of eight experts, at two chunk lengths."""
    overrides = {"deepseek2.expert_used_count": 8}
    model = Model.load(ikpy.default_model_path(), ModelParams(kv_overrides=overrides))
    tokens = text_tokens(model, TEXT, args.tokens)
    settings = [(k, 1.0) for k in range(1, 9)] + [(1, 0.2), (1, 0.4), (1, 0.6), (1, 0.8)]
    rows = []
    for k, t in settings:
        values = [
            perplexity(model, tokens, chunk, n_threads=args.threads, smart_expert_reduction=(k, t))
            for chunk in (CHUNK, 1024)
        ]
        rows.append([f"`-ser {k},{t:g}`", *(f"{value:.3f}" for value in values)])
    off = [perplexity(model, tokens, chunk, n_threads=args.threads) for chunk in (CHUNK, 1024)]
    rows.append(["off", *(f"{value:.3f}" for value in off)])
    return markdown(["setting", "PPL, chunks of 512", "PPL, chunks of 1024"], rows)


# zoo


def zoo_table(args: argparse.Namespace) -> list[str]:
    """Distance of logits to the float64 evaluation of every captured model in every setting."""
    try:
        from tests.cpu.models import test_zoo as zoo
    except ModuleNotFoundError as error:
        raise SystemExit(f"the table zoo needs the recorded models of a checkout's tests: {error}") from None

    rows = []
    for case in zoo.CASES:
        name, key = case.values
        path = zoo._model_path(name)
        setting = zoo.MANIFEST[name]["settings"][key]
        if path is None or setting["smart_expert_reduction"]:
            continue
        golden = np.load(path.with_suffix(".npz"))
        where, truth = zoo._truth(golden, setting)
        ours = zoo._logits(path, setting, golden[setting["sequence"]])[where]
        reference = zoo._reference_distance(zoo.MANIFEST[name], setting)
        if {setting["cache_k"], setting["cache_v"]} == {"f16"}:
            tolerance = f"{max(2 * reference['max_abs'], 0.012):.4f} (max)"
        else:
            tolerance = f"{max(3 * reference['kl_mean'], 1e-4):.1e} (KLD)"
        error = np.abs(ours - truth).max()
        rows.append([f"`{name}`", key, f"{error:.4f}", f"{zoo._kl(truth, ours).mean():.1e}", tolerance])
    return markdown(["model", "setting", "max abs diff", "mean KLD", "tolerance"], rows)


TABLES: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "mla": mla_table,
    "cache": cache_table,
    "ser": ser_table,
    "zoo": zoo_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--gqa", help="model with grouped heads; needed for the table of cache types")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    if args.table == "cache" and args.gqa is None:
        parser.error("the table of cache types needs --gqa MODEL.gguf")
    replace_table(args.table, TABLES[args.table](args))


if __name__ == "__main__":
    main()
