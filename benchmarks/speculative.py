"""Speed of greedy generation with and without drafts, in alternation in one process, on text that repeats.

    python -m benchmarks.speculative [-m MODEL.gguf] [-t THREADS] [-n TOKENS] [--repeats N] [--draft-max N]

The prompt is one sentence several times over. Prints tokens per second, the ratio to plain decoding (median over the
repeats) and the acceptance rate per drafter; ends with an error if a text differs from the plain one.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice

import numpy as np

import ikpy
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.engine.sampling import Sampler, SamplingParams
from ikpy.engine.speculative import Speculation, SpeculativeParams
from ikpy.tools.generation import GrowingSequence
from ikpy.tools.speculation import kept_states, make_speculation
from ikpy.vocab import Vocab

SENTENCE = "The powers of the powers of the park, and the parks of the same. "
TYPES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache", "suffix")


def generate(
    context: Context, prompt: list[int], n: int, speculation: Speculation | None
) -> tuple[list[int], float, str]:
    """n tokens, the seconds they took without the prompt, and the acceptance rate."""
    context.kv.clear()
    speculator = speculation.speculator() if speculation else None
    sequence = GrowingSequence(context, speculator=speculator)
    logits = sequence.feed(prompt)
    sampler = Sampler(SamplingParams(temperature=0.0), context.model.hparams.n_vocab)
    began = time.perf_counter()
    tokens = list(islice(sequence.generate(sampler, logits, frozenset()), n))
    return tokens, time.perf_counter() - began, speculator.lines()[0] if speculator else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default=str(ikpy.default_model_path()))
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-n", "--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--draft-max", type=int, default=16)
    a = parser.parse_args()
    model = Model.load(a.model)
    vocab = Vocab.from_metadata(model.gguf.metadata)
    n_kept = kept_states(SpeculativeParams(n_max=a.draft_max))
    context = Context(model, ContextParams(n_ctx=1024, n_threads=a.threads, n_kept_states=n_kept))
    prompt = vocab.tokenize(SENTENCE * 4, add_special=True)
    for name in TYPES:
        params = SpeculativeParams(types=(name,), n_max=a.draft_max, size_n=4, p_min=0.3)
        ratios, rates, line = [], [], ""
        for _ in range(a.repeats):
            plain, seconds, _ = generate(context, prompt, a.tokens, None)
            found, drafted, line = generate(context, prompt, a.tokens, make_speculation(params, vocab))
            if found != plain:
                raise SystemExit(f"{name}: the text differs from plain decoding")
            ratios.append(seconds / drafted)
            rates.append((a.tokens / seconds, a.tokens / drafted))
        before, after = np.median(rates, axis=0)
        print(f"{name:14} {before:8.1f} t/s -> {after:8.1f} t/s, ratio {np.median(ratios):.2f}, {line}")


if __name__ == "__main__":
    main()
