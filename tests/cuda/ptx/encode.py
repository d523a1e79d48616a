"""Kernels as numbers for the machine: forms of instructions, operands as numbers of registers or constants.

Registers have 32 bits (predicates and 16-bit types too) or 64 bits and are numbered in two banks; constants are
numbered -1, -2, ... The forms are those that the C++ files of this folder add.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tests.cuda.ptx.parser import Instruction, Kernel, PtxError, Variable, split_operands, type_bytes

# As in machine.hpp.
SPECIAL = [f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
SPECIAL += ["%laneid", "%warpid", "%lanemask_eq", "%lanemask_lt"]
SPACES = {"generic": 0, "global": 1, "const": 1, "shared": 2, "local": 3, "param": 4}
SHUFFLES = {"up": 0, "down": 1, "bfly": 2, "idx": 3}
VOTES = {"ballot": 0, "any": 1, "all": 2}
WIDE = {"b64", "u64", "s64", "f64"}
_ADDRESS = re.compile(r"\[\s*([^\]+]+?)\s*(?:\+\s*(-?\w+))?\s*\]")
_INTEGER = re.compile(r"-?(0x[0-9A-Fa-f]+|\d+)U?")

# Shared addresses begin behind what sm_90 keeps for itself (1024 bytes), as badly aligned as the hardware may have it.
SHARED_START = 1024 + 16


@dataclass
class Code:
    """A kernel for the machine. rows: op, guard, negated, first operand, operands, extra, more, accumulators.

    origins: of each row; parameters: offset and bytes; shared_bytes: of static variables, dynamic ones behind at
    dynamic_start.
    """

    rows: list[list[int]] = field(default_factory=list)
    operands: list[int] = field(default_factory=lambda: [0])
    constants: list[int] = field(default_factory=list)
    wide_constants: list[int] = field(default_factory=list)
    origins: list[Instruction] = field(default_factory=list)
    parameters: list[tuple[int, int]] = field(default_factory=list)
    registers: int = 0
    wide_registers: int = 0
    shared_bytes: int = 0
    dynamic_start: int = 0
    local_bytes: int = 0

    def arrays(self) -> list[np.ndarray]:
        """For the machine: instructions, operands and constants."""
        return [
            np.array(self.rows, np.int32),
            np.array(self.operands, np.int32),
            np.array(self.constants, np.uint32),
            np.array(self.wide_constants, np.uint64),
        ]


@dataclass(frozen=True)
class Machine:
    """What the C++ side knows: index of a form by its name (-1: none), kinds of products by their suffix."""

    form: Callable[[str], int]
    mma_kind: Callable[[str], int]
    wgmma_kind: Callable[[str], int]


def encode(kernel: Kernel, module_variables: dict[str, Variable], addresses: dict[str, int], machine: Machine) -> Code:
    """addresses: of the module's variables in global and constant memory. Raises PtxError for unknown instructions."""
    return _Encoder(kernel, module_variables, addresses, machine).run()


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


class _Encoder:
    def __init__(
        self, kernel: Kernel, module_variables: dict[str, Variable], addresses: dict[str, int], machine: Machine
    ) -> None:
        self.kernel, self.machine = kernel, machine
        self.code = Code()
        self.symbols = dict(addresses)
        self._layout(module_variables)
        self.bank: dict[str, tuple[bool, int]] = {name: (False, i) for i, name in enumerate(SPECIAL)}
        counts = [len(SPECIAL), 0]
        for name, type_ in [*kernel.registers.items(), ("_", "b32"), ("_wide", "b64")]:
            wide = type_ in WIDE
            self.bank[name] = wide, counts[wide]
            counts[wide] += 1
        self.code.registers, self.code.wide_registers = counts
        self._constants: dict[tuple[bool, int], int] = {}
        self._operands: list[int] = []
        self._named: set[int] = set()

    def _layout(self, module_variables: dict[str, Variable]) -> None:
        end = 0
        for parameter in self.kernel.parameters:
            start = _align(end, parameter.alignment)
            self.symbols[parameter.name] = start
            self.code.parameters.append((start, parameter.size))
            end = start + parameter.size
        words = {
            word for i in self.kernel.instructions for o in i.operands for word in re.findall(r"[A-Za-z_$][\w$]*", o)
        }
        used = [v for name, v in {**module_variables, **self.kernel.variables}.items() if name in words]
        ends = {"shared": SHARED_START, "local": 0}
        for variable in used:
            if variable.space in ends and variable.size:
                start = _align(ends[variable.space], variable.alignment)
                self.symbols[variable.name] = start
                ends[variable.space] = start + variable.size
        self.code.shared_bytes, self.code.local_bytes = ends["shared"], _align(ends["local"], 16)
        dynamic = [v for v in used if v.space == "shared" and not v.size]
        self.code.dynamic_start = _align(ends["shared"], max((v.alignment for v in dynamic), default=1))
        self.symbols.update(dict.fromkeys((v.name for v in dynamic), self.code.dynamic_start))

    def run(self) -> Code:
        instructions = self.kernel.instructions
        self._named = self._product_registers(instructions)
        starts = []
        for instruction in instructions:
            starts.append(len(self.code.rows))
            try:
                self._instruction(instruction)
            except (PtxError, KeyError, ValueError) as error:
                raise PtxError(f"{self.kernel.name}, line {instruction.line}: {instruction}: {error}") from error
        starts.append(len(self.code.rows))
        branch = self._form("bra")
        for row in self.code.rows:
            if row[0] == branch:
                row[5] = starts[row[5]]
        return self.code

    def _product_registers(self, instructions: Sequence[Instruction]) -> set[int]:
        found = set()
        for i in instructions:
            if i.mnemonic.startswith("wgmma.mma_async"):
                for group in i.operands[:2]:
                    if group.startswith("{"):
                        found.update(self.bank[name][1] for name in split_operands(group[1:-1]))
        return found

    # operands

    def _form(self, name: str) -> int:
        found = self.machine.form(name)
        if found < 0:
            raise PtxError(f"the machine has no form {name}")
        return found

    def _constant(self, value: int, wide: bool) -> int:
        value %= 1 << (64 if wide else 32)
        if (wide, value) not in self._constants:
            values = self.code.wide_constants if wide else self.code.constants
            values.append(value)
            self._constants[wide, value] = -len(values)
        return self._constants[wide, value]

    def number(self, text: str) -> int:
        """An integer, the bits of a float, or the address of a variable."""
        if text[:2] in ("0f", "0F", "0d", "0D"):
            return int(text[2:], 16)
        if _INTEGER.fullmatch(text):
            return int(text.rstrip("U"), 0)
        name, _, offset = text.partition("+")
        if name in self.symbols:
            return self.symbols[name] + int(offset or 0)
        raise PtxError(f"unknown operand {text}")

    def operand(self, text: str, wide: bool) -> int:
        """Number of a register or constant of 64 (wide) or 32 bits."""
        if text == "_":
            return self.bank["_wide" if wide else "_"][1]
        if text in self.bank:
            is_wide, index = self.bank[text]
            if is_wide != wide:
                raise PtxError(f"{text} has not {64 if wide else 32} bits")
            return index
        return self._constant(self.number(text), wide)

    def is_wide(self, text: str) -> bool:
        return text in self.bank and self.bank[text][0]

    def address(self, text: str) -> list[int]:
        """Register, whether that has 64 bits, offset."""
        match = _ADDRESS.fullmatch(text)
        if not match:
            raise PtxError(f"no address: {text}")
        base, offset = match[1], int(match[2] or "0", 0)
        if base in self.bank:
            wide, index = self.bank[base]
            return [index, int(wide), offset]
        return [self._constant(self.number(base) + offset, True), 1, 0]

    def emit(self, form: str, operands: Sequence[int], i: Instruction, *, extra: int = 0, more: int = 0) -> None:
        """Appends an instruction of the machine."""
        guard, negated = -1, 0
        if i.guard:
            negated = int(i.guard.startswith("!"))
            guard = self.operand(i.guard.lstrip("!"), False)
        accumulators = self._touched(i) if self._named else 0
        first = len(self.code.operands)
        self.code.operands += operands
        self.code.rows.append([self._form(form), guard, negated, first, len(operands), extra, more, accumulators])
        self.code.origins.append(i)

    def _touched(self, i: Instruction) -> int:
        """Place of a list of registers that asynchronous products name, 0 for none."""
        if i.mnemonic.startswith("wgmma"):
            return 0
        names = {name for operand in i.operands for name in re.findall(r"[%$\w@.]+", operand)}
        used = {self.bank[name][1] for name in names if name in self.bank and not self.bank[name][0]} & self._named
        if not used:
            return 0
        place = len(self.code.operands)
        self.code.operands += [len(used), *sorted(used)]
        return place

    # instructions

    def _instruction(self, i: Instruction) -> None:
        parts = i.mnemonic.split(".")
        if i.mnemonic in _BY_MNEMONIC:
            _BY_MNEMONIC[i.mnemonic](self, i, parts)
            return
        for prefix, method in _BY_PREFIX:
            if i.mnemonic.startswith(prefix):
                method(self, i, parts)
                return
        self._lanewise(i, parts)

    def _lanewise(self, i: Instruction, parts: list[str]) -> None:
        name, types = parts[0], [p for p in parts if re.fullmatch(r"[busf]\d+(x2)?|bf16(x2)?|pred", p)]
        type_ = types[-1]
        wide = type_ in WIDE
        n_sources = len(i.operands) - 1
        sources, result = [wide] * n_sources, types[0] in WIDE
        if name in ("mov", "selp", "setp") and not (name == "setp" and not type_.startswith("b")) and type_ != "pred":
            type_ = ("u" if name == "setp" else "b") + type_[1:]
        form = ".".join([*parts[:-1], type_])
        if name in ("shl", "shr"):
            sources[1] = False
        elif name == "selp":
            sources[2] = False
        elif name == "setp":
            result = False
        elif name == "bfi":
            sources[2:] = [False, False]
        elif "wide" in parts:
            result = type_ in ("u32", "s32")
            sources[2:] = [result] * (n_sources - 2)
        elif name in ("popc", "clz", "bfind"):
            result = False
        if name == "cvt" and not wide and self.is_wide(i.operands[1]):
            # Sources may be wider than the type; `_` holds what of them counts.
            self.emit("low.b64", [self.operand("_", False), self.operand(i.operands[1], True)], i)
            i = replace(i, operands=(i.operands[0], "_"))
        operands = [self.operand(i.operands[0], result)]
        operands += [self.operand(text, w) for text, w in zip(i.operands[1:], sources, strict=True)]
        self.emit(form, operands, i)

    def _move(self, i: Instruction, parts: list[str]) -> None:
        to, from_ = i.operands
        wide = parts[1] == "b64"
        if to.startswith("{"):
            for half, name in zip(("low", "high"), split_operands(to[1:-1]), strict=True):
                self.emit(f"{half}.{parts[1]}", [self.operand(name, False), self.operand(from_, wide)], i)
        elif from_.startswith("{"):
            halves = [self.operand(name, False) for name in split_operands(from_[1:-1])]
            self.emit(f"pack.{parts[1]}", [self.operand(to, wide), *halves], i)
        else:
            self._lanewise(i, parts)

    def _memory(self, i: Instruction, parts: list[str]) -> None:
        load = parts[0] == "ld"
        spaces = [p.partition("::")[0] for p in parts[1:-1] if p.partition("::")[0] in SPACES]
        where, values = (i.operands[1], i.operands[0]) if load else i.operands
        names = split_operands(values[1:-1]) if values.startswith("{") else (values,)
        bits = 8 * type_bytes(parts[-1])
        wide = bits == 64 or any(map(self.is_wide, names))
        operands = self.address(where) + [self.operand(name, wide) for name in names]
        if load:
            narrow = any(self.kernel.registers.get(name, "").endswith("16") for name in names)
            sign = "s" if parts[-1][0] == "s" and bits < 64 else "u"
            form = f"ld.{sign}{bits}.r{64 if wide else 16 if narrow else 32}"
        else:
            form = f"st.{bits}.r{64 if wide else 32}"
        self.emit(form, operands, i, extra=SPACES[spaces[0] if spaces else "generic"], more=len(names))

    def _atomic(self, i: Instruction, parts: list[str]) -> None:
        wide = parts[-1] in WIDE
        texts = i.operands if parts[0] == "atom" else ("_", *i.operands)
        (operation,) = {"add", "min", "max", "exch", "or"} & set(parts)
        spaces = [p for p in parts if p in SPACES]
        operands = [*self.address(texts[1]), self.operand(texts[0], wide), self.operand(texts[2], wide)]
        form = f"atom.{operation}.{parts[-1].replace('b', 'u')}"
        self.emit(form, operands, i, extra=SPACES[spaces[0] if spaces else "generic"])

    def _branch(self, i: Instruction, parts: list[str]) -> None:
        self.emit("bra", [], i, extra=self.kernel.labels[i.operands[0]])

    def _exit(self, i: Instruction, parts: list[str]) -> None:
        self.emit("exit", [], i)

    def _nothing(self, i: Instruction, parts: list[str]) -> None:
        self.emit("nothing", [], i)

    def _address_of(self, i: Instruction, parts: list[str]) -> None:
        space = next(p for p in parts if p in SPACES)
        form = "same" if space in ("global", "const") else "to.window" if parts[1] == "to" else space
        self.emit(f"cvta.{form}", [self.operand(text, True) for text in i.operands], i)

    def _shuffle(self, i: Instruction, parts: list[str]) -> None:
        result, _, predicate = i.operands[0].partition("|")
        texts = [result, predicate or "_", *i.operands[1:]]
        self.emit("shfl.sync", [self.operand(text, False) for text in texts], i, extra=SHUFFLES[parts[2]])

    def _vote(self, i: Instruction, parts: list[str]) -> None:
        self.emit("vote.sync", [self.operand(text, False) for text in i.operands], i, extra=VOTES[parts[2]])

    def _barrier(self, i: Instruction, parts: list[str]) -> None:
        texts = (*i.operands, "0")[:2]
        self.emit("bar.sync", [self.operand(text, False) for text in texts], i)

    def _warp_barrier(self, i: Instruction, parts: list[str]) -> None:
        self.emit("bar.warp.sync", [self.operand(i.operands[0], False)], i)

    def _mma(self, i: Instruction, parts: list[str]) -> None:
        names = [name for group in i.operands for name in split_operands(group[1:-1])]
        kind = self.machine.mma_kind(".".join(parts[3:]))
        self.emit("mma.sync", [self.operand(name, False) for name in names], i, extra=kind)

    def _load_matrix(self, i: Instruction, parts: list[str]) -> None:
        if parts[3] != "m8n8":
            raise PtxError("other matrices than m8n8")
        names = split_operands(i.operands[0][1:-1])
        operands = self.address(i.operands[1]) + [self.operand(name, False) for name in names]
        self.emit("ldmatrix", operands, i, extra=int("trans" in parts), more=len(names))

    def _copy_async(self, i: Instruction, parts: list[str]) -> None:
        to, from_, size, *valid = i.operands
        operands = [*self.address(to), *self.address(from_), self.operand((valid or [size])[0], False)]
        self.emit("cp.async", operands, i, extra=int(size))

    def _copy_bulk(self, i: Instruction, parts: list[str]) -> None:
        if parts[3:5] != ["shared::cluster", "global"] or parts[5:] != ["mbarrier::complete_tx::bytes"]:
            raise PtxError("another direction than from global to shared memory")
        to, from_, size, barrier = i.operands
        operands = [*self.address(to), *self.address(from_), self.operand(size, False), *self.address(barrier)]
        self.emit("cp.async.bulk", operands, i)

    def _copy_wait(self, i: Instruction, parts: list[str]) -> None:
        self.emit(".".join(parts[:3]), [], i, extra=int(i.operands[0]) if i.operands else 0)

    def _barrier_object(self, i: Instruction, parts: list[str]) -> None:
        if parts[1] == "try_wait":
            if parts[2] != "parity":
                raise PtxError("without .parity")
            result, where, parity = i.operands[:3]
            operands = [*self.address(where), self.operand(parity, False), self.operand(result, False)]
            self.emit("mbarrier.try_wait", operands, i)
            return
        texts = list(i.operands)
        if parts[1] == "arrive":
            if texts.pop(0) != "_":
                raise PtxError("the state that it returns is not kept")
            if len(texts) == 1:
                texts.append("1")
        form = "mbarrier.arrive.expect_tx" if "expect_tx" in parts else f"mbarrier.{parts[1]}"
        self.emit(form, [*self.address(texts[0]), self.operand(texts[1], False)], i)

    def _fence_async(self, i: Instruction, parts: list[str]) -> None:
        self.emit("fence.proxy.async", [], i)

    def _wgmma(self, i: Instruction, parts: list[str]) -> None:
        if parts[1] != "mma_async":
            self.emit(".".join(parts[:2]), [], i, extra=int(i.operands[0]) if i.operands else 0)
            return
        kind = self.machine.wgmma_kind(".".join(parts[4:]))
        sums, a, b, *rest = i.operands
        operands = [self.operand(name, False) for name in split_operands(sums[1:-1])]
        fragments = split_operands(a[1:-1]) if a.startswith("{") else ()
        operands += [self.operand(name, False) for name in fragments] or [self.operand(a, True)]
        operands += [self.operand(b, True), *(self.operand(text, False) for text in rest)]
        self.emit("wgmma.mma_async", operands, i, extra=kind, more=len(fragments))


_Method = Callable[[_Encoder, Instruction, list[str]], None]
_BY_MNEMONIC: dict[str, _Method] = {
    "mov.b32": _Encoder._move,
    "mov.b64": _Encoder._move,
    "bra": _Encoder._branch,
    "bra.uni": _Encoder._branch,
    "ret": _Encoder._exit,
    "exit": _Encoder._exit,
}
# The first that fits counts.
_BY_PREFIX: list[tuple[str, _Method]] = [
    ("ld.", _Encoder._memory),
    ("st.", _Encoder._memory),
    ("atom.", _Encoder._atomic),
    ("red.", _Encoder._atomic),
    ("cvta.", _Encoder._address_of),
    ("shfl.sync.", _Encoder._shuffle),
    ("vote.sync.", _Encoder._vote),
    ("bar.warp.sync", _Encoder._warp_barrier),
    ("bar.sync", _Encoder._barrier),
    ("barrier.sync", _Encoder._barrier),
    ("mma.sync.", _Encoder._mma),
    ("ldmatrix.", _Encoder._load_matrix),
    ("cp.async.bulk.", _Encoder._copy_bulk),
    ("cp.async.commit_group", _Encoder._copy_wait),
    ("cp.async.wait_", _Encoder._copy_wait),
    ("cp.async.", _Encoder._copy_async),
    ("mbarrier.", _Encoder._barrier_object),
    ("fence.proxy.async", _Encoder._fence_async),
    ("fence.", _Encoder._nothing),
    ("membar.", _Encoder._nothing),
    ("prefetch.", _Encoder._nothing),  # devices ignore those of addresses that are not there
    ("wgmma.", _Encoder._wgmma),
]
