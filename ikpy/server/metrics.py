"""Counters of the engine and their Prometheus text."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

HELP = {
    "prompt_tokens_total": ("counter", "Number of prompt tokens processed."),
    "prompt_seconds_total": ("counter", "Prompt process time"),
    "tokens_predicted_total": ("counter", "Number of generation tokens processed."),
    "tokens_predicted_seconds_total": ("counter", "Predict process time"),
    "prompt_tokens_seconds": ("gauge", "Average prompt throughput in tokens/s."),
    "predicted_tokens_seconds": ("gauge", "Average generation throughput in tokens/s."),
    "kv_cache_usage_ratio": ("gauge", "KV-cache usage. 1 means 100 percent usage."),
    "kv_cache_tokens": ("gauge", "KV-cache tokens."),
    "requests_processing": ("gauge", "Number of request processing."),
    "requests_deferred": ("gauge", "Number of request deferred."),
    "prompt_tokens_cached_total": ("counter", "Prompt tokens that were not evaluated again."),
    "n_decode_total": ("counter", "Batches evaluated."),
    "n_tokens_max": ("counter", "Tokens of the longest text of a slot so far."),
    "n_busy_slots_per_decode": ("gauge", "Slots in a batch, on average."),
    "spec_decode_num_drafts_total": ("counter", "Drafts judged."),
    "spec_decode_num_draft_tokens_total": ("counter", "Drafted tokens."),
    "spec_decode_num_accepted_tokens_total": ("counter", "Drafted tokens that held."),
}


RECENT_DELAYS = 4096
QUANTILES = (0.5, 0.99, 1.0)


@dataclass
class Totals:
    """Tokens and seconds of prompt evaluation and generation."""

    prompt_n: int = 0
    prompt_s: float = 0.0
    predicted_n: int = 0
    predicted_s: float = 0.0

    def minus(self, other: Totals) -> Totals:
        """Difference to an earlier state."""
        return Totals(
            self.prompt_n - other.prompt_n,
            self.prompt_s - other.prompt_s,
            self.predicted_n - other.predicted_n,
            self.predicted_s - other.predicted_s,
        )


@dataclass
class Batches:
    """What batches had since the start: ``n_busy`` slots in ``n`` batches, the longest text of a slot in tokens, tokens
    of prompts that were there already, drafts and their tokens."""

    n: int = 0
    n_busy: int = 0
    n_longest: int = 0
    n_cached: int = 0
    n_drafts: int = 0
    n_drafted: int = 0
    n_accepted: int = 0

    def values(self) -> dict[str, float]:
        """By name in the Prometheus text."""
        return {
            "prompt_tokens_cached_total": self.n_cached,
            "n_decode_total": self.n,
            "n_tokens_max": self.n_longest,
            "n_busy_slots_per_decode": self.n_busy / self.n if self.n else 0,
            "spec_decode_num_drafts_total": self.n_drafts,
            "spec_decode_num_draft_tokens_total": self.n_drafted,
            "spec_decode_num_accepted_tokens_total": self.n_accepted,
        }


@dataclass
class Metrics:
    """Totals since the start and at the last scrape; seconds between the last tokens of all answers."""

    totals: Totals = field(default_factory=Totals)
    batches: Batches = field(default_factory=Batches)
    delays: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_DELAYS))
    _scraped: Totals = field(default_factory=Totals)

    def text(
        self,
        *,
        used_cells: int,
        n_ctx: int,
        processing: int,
        deferred: int,
        cached_bytes: int = 0,
        cache_hits: int = 0,
    ) -> str:
        """Prometheus text; the throughput gauges cover the time since the last call."""
        t = self.totals
        recent = t.minus(self._scraped)
        self._scraped = Totals(**vars(t))
        values: dict[str, float] = {
            "prompt_tokens_total": t.prompt_n,
            "prompt_seconds_total": round(t.prompt_s, 3),
            "tokens_predicted_total": t.predicted_n,
            "tokens_predicted_seconds_total": round(t.predicted_s, 3),
            "prompt_tokens_seconds": recent.prompt_n / recent.prompt_s if recent.prompt_s else 0,
            "predicted_tokens_seconds": recent.predicted_n / recent.predicted_s if recent.predicted_s else 0,
            "kv_cache_usage_ratio": used_cells / n_ctx,
            "kv_cache_tokens": used_cells,
            "requests_processing": processing,
            "requests_deferred": deferred,
            **self.batches.values(),
        }
        lines = []
        for name, (kind, text) in HELP.items():
            full = f"llamacpp:{name}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", f"{full} {values[name]:.10g}"]
        return "\n".join([*lines, *self._delay_lines(), *self._cache_lines(cached_bytes, cache_hits)]) + "\n"

    def _delay_lines(self) -> list[str]:
        """Quantiles of the time between two tokens of an answer."""
        if not self.delays:
            return []
        name = "ikpy:inter_token_delay_seconds"
        found = np.quantile(np.array(self.delays), QUANTILES)
        values = [f'{name}{{quantile="{q:g}"}} {value:.6g}' for q, value in zip(QUANTILES, found, strict=True)]
        return [
            f"# HELP {name} Time between two tokens of an answer.",
            f"# TYPE {name} summary",
            *values,
        ]

    @staticmethod
    def _cache_lines(nbytes: int, hits: int) -> list[str]:
        """Size and use of the prompt cache in host memory."""
        return [
            "# HELP ikpy:prompt_cache_bytes Saved texts in host memory.",
            "# TYPE ikpy:prompt_cache_bytes gauge",
            f"ikpy:prompt_cache_bytes {nbytes}",
            "# HELP ikpy:prompt_cache_hits_total Requests that used a saved text.",
            "# TYPE ikpy:prompt_cache_hits_total counter",
            f"ikpy:prompt_cache_hits_total {hits}",
        ]
