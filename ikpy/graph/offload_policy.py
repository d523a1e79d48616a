"""Which operations may run on a device where their weights lie in host memory: -op, -nopo."""

from __future__ import annotations

from collections.abc import Sequence

MATMUL, EXPERT_MATMUL = "MUL_MAT", "MUL_MAT_ID"
FUSED_MATMUL, FUSED_EXPERTS = "FUSED_UP_GATE", "MOE_FUSED_UP_GATE"
POLICY_OPS = {
    26: MATMUL,
    27: EXPERT_MATMUL,
    28: EXPERT_MATMUL,
    29: FUSED_EXPERTS,
    30: FUSED_MATMUL,
    31: FUSED_EXPERTS,
}
N_OPERATIONS = 111  # numbers from here on mean all operations, like negative ones


def offload_policy(pairs: Sequence[tuple[int, bool]]) -> dict[str, bool]:
    """Whether large batches of an operation on CPU weights may run on a device, from -op pairs; absent = yes.

    The numbers of the operations changed once. 26, 27, 29 have the older meaning (products, products of experts, fused
    experts), 28, 30 and 31 the newer one; 27 is the newer plain product where 28, 30 or 31 appear as well. The older 26
    is of fused up and gate products too, which were two plain ones then.
    """
    newer = _has_newer_numbers(pairs)
    policy: dict[str, bool] = {}
    for op, on in pairs:
        if _means_all(op):
            policy |= dict.fromkeys((MATMUL, EXPERT_MATMUL, FUSED_MATMUL, FUSED_EXPERTS), on)
        elif op == 27 and newer:
            policy[MATMUL] = on
        elif op == 26:
            policy |= dict.fromkeys((MATMUL, FUSED_MATMUL), on)
        elif op in POLICY_OPS:
            policy[POLICY_OPS[op]] = on
    return policy


def _has_newer_numbers(pairs: Sequence[tuple[int, bool]]) -> bool:
    return any(op in (28, 30, 31) for op, _ in pairs)


def _means_all(op: int) -> bool:
    return not 0 <= op < N_OPERATIONS


def policy_lines(pairs: Sequence[tuple[int, bool]]) -> list[str]:
    """One line per pair, in the known wording; numbers without a meaning here are named by number."""
    newer = _has_newer_numbers(pairs)
    lines = []
    for op, on in pairs:
        name = MATMUL if op == 27 and newer else POLICY_OPS.get(op, str(op))
        what = "all ops" if _means_all(op) else f"op {name}"
        lines.append(f"{'X' * 21} Setting offload policy for {what} to {'ON' if on else 'OFF'}")
    return lines
