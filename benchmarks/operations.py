"""Where the time of a prompt goes: milliseconds per kind of operation, and the rates of dense and experts' products.

python -m benchmarks.operations [--shapes llama-1b,qwen3-30b-a3b] [--tokens 512,2048] [--layers 2] [--experts iq2_xxs]
    [--repack]

One micro-batch of every shape (random weights, small vocabulary), every operation timed; the fastest of `rounds` whole
runs, alternating between the shapes. "Products" are those with weights. All tokens have logits, as the last layer would
else be left out for all but one. The last but one column compares a shape's rate of products with that of the first
shape at as many tokens: the efficiency of mixtures of experts against a dense model, attention left out of both.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from benchmarks.report import SHAPE_MODELS, ShapeModel
from benchmarks.synthetic import write_model
from ikpy import Batch, Context, ContextParams, Model, ModelParams

VOCABULARY = 4352
DENSE = ("mul_mat", "mul_mat_up_gate")
EXPERTS = ("mul_mat_id", "mul_mat_id_up_gate")


def multiply_adds(model: Model) -> tuple[float, float]:
    """Multiply-adds per token with dense weights and with those of the experts that a token uses."""
    dense = experts = 0.0
    share = model.hparams.n_expert_used / max(1, model.hparams.n_expert)
    for tensor in model.gguf.tensors.values():
        if tensor.name == "token_embd.weight" or len(tensor.shape) < 2:
            continue
        size = float(tensor.element_count)
        if "_exps." in tensor.name:
            experts += size * share
        else:
            dense += size
    return dense, experts


def context_of(path: Path, n_tokens: int, threads: int, repack: bool = False) -> Context:
    """A context that has evaluated one prompt of n_tokens. repack: rows are interleaved."""
    params = ContextParams(n_ctx=n_tokens, n_batch=n_tokens, n_ubatch=n_tokens, n_threads=threads)
    context = Context(Model.load(str(path), ModelParams(use_mmap=False, repack=repack)), params)
    context.decode(Batch.single([i % VOCABULARY for i in range(n_tokens)], 0, 0, "all"))
    return context


def seconds_by_kind(context: Context, n_tokens: int) -> Counter[str]:
    """Time of one run of the prompt's plan."""
    found: Counter[str] = Counter()
    for kind, seconds in context.profile(n_tokens, n_tokens):
        found[kind] += seconds
    return found


def rates(model: Model, n_tokens: int, seconds: Mapping[str, float]) -> tuple[float, float, float]:
    """1e9 operations/s of dense products, of experts' and of both; 0.0 where there are none."""
    work = [2e-9 * n_tokens * n for n in multiply_adds(model)]
    spent = [sum(seconds.get(kind, 0.0) for kind in kinds) for kinds in (DENSE, EXPERTS)]
    dense, experts = (w / s if s > 0 else 0.0 for w, s in zip(work, spent, strict=True))
    return dense, experts, sum(work) / sum(spent)


def fastest(contexts: list[Context], n_tokens: int, rounds: int) -> list[Counter[str]]:
    """The fastest run of every context; they take turns."""
    best: list[Counter[str]] = [Counter() for _ in contexts]
    for _ in range(rounds):
        for i, context in enumerate(contexts):
            seconds = seconds_by_kind(context, n_tokens)
            if not best[i] or seconds.total() < best[i].total():
                best[i] = seconds
    return best


def table(n_tokens: int, names: list[str], models: list[Model], runs: list[Counter[str]]) -> str:
    """Rows of the shapes: rates of products and what they and the slowest other kinds take."""
    lines = [
        f"{n_tokens} tokens",
        "",
        "| shape | ms | products | dense Gop/s | experts Gop/s | both | of the first | other kinds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    first = 0.0
    for name, model, seconds in zip(names, models, runs, strict=True):
        dense, experts, both = rates(model, n_tokens, seconds)
        first = first or both
        total = seconds.total()
        products = sum(seconds.get(kind, 0.0) for kind in DENSE + EXPERTS)
        others = [(kind, s) for kind, s in seconds.most_common() if kind not in DENSE + EXPERTS][:4]
        shares = ", ".join(f"{kind} {s / total:.0%}" for kind, s in others)
        lines.append(
            f"| {name} | {1e3 * total:.1f} | {products / total:.0%} | {dense:.0f} | {experts:.0f} | {both:.0f} "
            f"| {both / first:.2f} | {shares} |"
        )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(model.shape for model in SHAPE_MODELS))
    parser.add_argument("--tokens", default="512,2048")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--experts", help="type of the experts, instead of the shape's own")
    parser.add_argument("--repack", action="store_true", help="every shape a second time, its rows interleaved (-rtr)")
    args = parser.parse_args()
    known = [model.shape for model in SHAPE_MODELS]
    unknown = set(args.shapes.split(",")) - set(known)
    if unknown:
        parser.error(f"unknown shape {', '.join(sorted(unknown))} (known: {', '.join(known)})")
    return args


def written(model: ShapeModel, layers: int, folder: str) -> Path:
    """A file of the shape."""
    path = Path(folder) / f"{model.shape}.gguf"
    write_model(
        model.shape,
        model.type,
        str(path),
        layers=layers,
        attn=model.attn,
        experts=model.experts,
        vocab=VOCABULARY,
    )
    return path


def main() -> None:
    args = arguments()
    chosen = [model for name in args.shapes.split(",") for model in SHAPE_MODELS if model.shape == name]
    if args.experts:
        chosen = [model._replace(experts=args.experts) for model in chosen]
    forms = [(model, repack) for model in chosen for repack in ((False, True) if args.repack else (False,))]
    names = [model.shape + " -rtr" * repack for model, repack in forms]
    with tempfile.TemporaryDirectory() as folder:
        paths = {model.shape: written(model, args.layers, folder) for model in chosen}
        for n_tokens in map(int, args.tokens.split(",")):
            contexts = [context_of(paths[model.shape], n_tokens, args.threads, repack) for model, repack in forms]
            runs = fastest(contexts, n_tokens, args.rounds)
            print(table(n_tokens, names, [context.model for context in contexts], runs), flush=True)
            print()


if __name__ == "__main__":
    main()
