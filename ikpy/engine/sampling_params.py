"""Parameters of the choice of tokens and names of the samplers (options.md#sampling).

Apart from the samplers themselves, so that the command line can read them without loading numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from ikpy.errors import UsageError

RANDOM_SEED = 0xFFFFFFFF

SAMPLER_NAMES: dict[str, tuple[str, ...]] = {
    "d": ("dry",),
    "k": ("top_k", "top-k"),
    "f": ("tfs_z", "tfs-z", "tfs"),
    "y": ("typical_p", "typical-p", "typical"),
    "p": ("top_p", "top-p", "nucleus"),
    "m": ("min_p", "min-p"),
    "x": ("xtc",),
    "n": ("top_n_sigma", "top-n-sigma"),
    "t": ("temperature", "temp"),
    "w": ("adaptive_p", "adaptive-p"),
}
DEFAULT_SAMPLERS = tuple(names[0] for names in SAMPLER_NAMES.values())


def sampler_sequence(names: Iterable[str]) -> tuple[str, ...]:
    """Canonical sampler names in order; unknown names are skipped."""
    known = {name: names[0] for names in SAMPLER_NAMES.values() for name in names}
    return tuple(known[name] for name in names if name in known)


def sampler_sequence_from_letters(letters: str) -> tuple[str, ...]:
    """Canonical sampler names of a letter string such as ``dkfypmxntw``; unknown letters are skipped."""
    return tuple(SAMPLER_NAMES[letter][0] for letter in letters if letter in SAMPLER_NAMES)


@dataclass
class SamplingParams:
    """Parameters of a sampler chain, named as in the completion API; neutral values switch a sampler off."""

    seed: int = RANDOM_SEED
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    tfs_z: float = 1.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalize_nl: bool = False
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    adaptive_updt_w_cur: bool = False
    min_keep: int = 0
    ignore_eos: bool = False
    logit_bias: Sequence[tuple[int, float]] = ()
    grammar: str = ""
    json_schema: str | None = None
    regex: str | None = None

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar restricts the tokens."""
        return bool(self.grammar) or self.json_schema is not None or self.regex is not None

    @property
    def has_penalties(self) -> bool:
        """Whether tokens lose by having been there, DRY aside."""
        return self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    def check(self) -> None:
        """Raises UsageError for values without a meaning."""
        for field in fields(self):
            if getattr(self, field.name) != getattr(self, field.name):
                raise UsageError(f"{field.name} must be a number, not nan")
        if self.repeat_last_n < -1 or self.dry_penalty_last_n < -1:
            raise UsageError("repeat_last_n and dry_penalty_last_n must be -1 (context size), 0 (off) or a length")
        if self.mirostat not in (0, 1, 2):
            raise UsageError(f"mirostat must be 0, 1 or 2, not {self.mirostat}")
        if self.dry_base < 0:
            raise UsageError(f"dry_base must not be negative, but it is {self.dry_base:g}")
        if self.repeat_penalty <= 0:
            raise UsageError(f"repeat_penalty must be positive, not {self.repeat_penalty}")

    def describe(self) -> str:
        """The parameters and the sampler order as the command-line tools print them."""
        order = " -> ".join(["CFG", "Penalties", *self._active_order()])
        return (
            "sampling: \n"
            f"\trepeat_last_n = {self.repeat_last_n}, repeat_penalty = {self.repeat_penalty:.3f}, "
            f"frequency_penalty = {self.frequency_penalty:.3f}, "
            f"presence_penalty = {self.presence_penalty:.3f}\n"
            f"\ttop_k = {self.top_k}, tfs_z = {self.tfs_z:.3f}, top_p = {self.top_p:.3f}, "
            f"min_p = {self.min_p:.3f}, typical_p = {self.typical_p:.3f}, temp = {self.temperature:.3f}\n"
            f"\tmirostat = {self.mirostat}, mirostat_lr = {self.mirostat_eta:.3f}, "
            f"mirostat_ent = {self.mirostat_tau:.3f}\n"
            f"\txtc_probability = {self.xtc_probability:.3f}, xtc_threshold = {self.xtc_threshold:.3f}, "
            f"top_n_sigma = {self.top_n_sigma:.3f}\n"
            f"\tadaptive_target = {self.adaptive_target:.2f}, adaptive_decay = {self.adaptive_decay:.2f}\n"
            f"sampling order: \n{order} "
        )

    def _active_order(self) -> Sequence[str]:
        return ("mirostat",) if self.mirostat else self.samplers
