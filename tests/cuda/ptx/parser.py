"""PTX text to kernels: instructions with their operands as written, registers and variables by name.

Source: PTX ISA, "Syntax" and "State Spaces, Types, and Variables".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path


class PtxError(RuntimeError):
    """PTX that the machine cannot run."""


@dataclass(frozen=True)
class Instruction:
    """One instruction. guard: `%p1` or `!%p1`, empty for none; source: `file:line` of the CUDA code."""

    mnemonic: str
    operands: tuple[str, ...]
    guard: str
    line: int
    source: str

    def __str__(self) -> str:
        return f"{self.mnemonic} {', '.join(self.operands)}".strip()


@dataclass(frozen=True)
class Variable:
    """A variable in a state space; data: its first bytes (others are 0), size 0 for dynamic shared memory."""

    name: str
    space: str
    alignment: int
    size: int
    data: bytes = b""


@dataclass
class Kernel:
    """An entry. registers: type by name; labels: index of the instruction behind; parameters: bytes and alignment."""

    name: str
    parameters: list[Variable]
    registers: dict[str, str] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)


_ENTRY = re.compile(r"^(?:\.visible\s+)?\.entry\s+(\w+)", re.MULTILINE)
_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak)\s+)*\.(global|const|shared|local|param)\s+(?:\.align\s+(\d+)\s+)?"
    r"\.([a-z]\d+)\s+(?:\.ptr(?:\s+\.(?!align)\w+)?(?:\s+\.align\s+\d+)?\s+)?([\w$.]+)\s*(\[\d*\])?\s*(?:=\s*\{([^}]*)\})?"
)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_LABEL = re.compile(r"([\w$%]+):")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_INSTRUCTION = re.compile(r"(?:@(!?[%\w$]+)\s+)?([\w.:]+)\s*(.*)", re.DOTALL)
_WORD = re.compile(r"[%$]?[A-Za-z_][\w$]*")


def type_bytes(name: str) -> int:
    """4 for u32, b32, f32 and f16x2."""
    match = re.fullmatch(r"[a-z]+(\d+)(?:x(\d))?", name)
    if not match:
        raise PtxError(f"no type: {name}")
    return int(match[1]) * int(match[2] or 1) // 8


def _variable(text: str) -> Variable:
    match = _VARIABLE.match(text)
    if not match:
        raise PtxError(f"cannot be read as a variable: {text[:100]}")
    space, alignment, type_, name, extent, values = match.groups()
    width = type_bytes(type_)
    count = int(extent[1:-1] or 0) if extent else 1
    numbers = [int(v, 0) for v in values.split(",")] if values else []
    data = b"".join((v % (1 << 8 * width)).to_bytes(width, "little") for v in numbers)
    return Variable(name, space, int(alignment or width), width * count, data)


def split_operands(text: str) -> tuple[str, ...]:
    """At commas outside of braces and brackets."""
    found, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif c == "," and not depth:
            found.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return (*found, last) if last else tuple(found)


class Module:
    """A PTX file; kernels are read when they are asked for."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._entries = {match[1]: match.start() for match in _ENTRY.finditer(text)}

    def kernels(self) -> list[str]:
        """Names of the entries."""
        return list(self._entries)

    @cached_property
    def variables(self) -> dict[str, Variable]:
        """Those of the module, by name."""
        lines = re.findall(
            r"^(?:\.(?:visible|extern|weak)\s+)*\.(?:global|const|shared)\s[^;]*;", self.text, re.MULTILINE
        )
        found = [_variable(line) for line in lines]
        return {variable.name: variable for variable in found}

    @cached_property
    def files(self) -> dict[str, str]:
        """Names of source files by their numbers."""
        return {number: Path(name).name for number, name in _FILE.findall(self.text)}

    def kernel(self, name: str) -> Kernel:
        """Raises PtxError if there is none of this name."""
        if name not in self._entries:
            raise PtxError("no kernel of this name")
        start = self._entries[name]
        body = self.text.index("\n{", start)
        head = self.text[start:body]
        parameters = [_variable(match[0]) for match in re.finditer(r"\.param[^,()]*", head)]
        end = next((place for place in self._entries.values() if place > start), len(self.text))
        kernel = Kernel(name, parameters)
        first_line = self.text.count("\n", 0, body + 1) + 1
        _Body(self, kernel).read(self.text[body + 1 : end].split("\n"), first_line)
        return kernel


class _Body:
    """Reads the statements of a kernel. Names of inner scopes get the scope's number."""

    def __init__(self, module: Module, kernel: Kernel) -> None:
        self._module, self._kernel = module, kernel
        self._scopes: list[dict[str, str]] = []
        self._n_scopes = 0
        self._source = ""

    def read(self, lines: list[str], first_line: int) -> None:
        waiting, begun = "", first_line
        for number, raw in enumerate(lines, first_line):
            line = raw.split("//", 1)[0].strip()
            if not line:
                continue
            if match := _LOC.match(line):
                if match[2] != "0":
                    self._source = f"{self._module.files.get(match[1], match[1])}:{match[2]}"
                continue
            if not waiting:
                begun = number
            waiting = self._statements(f"{waiting} {line}" if waiting else line, begun)
            if not self._scopes:
                return
        raise PtxError(f"kernel {self._kernel.name}: its end is missing")

    def _statements(self, text: str, line: int) -> str:
        """Reads whole statements and returns the rest."""
        while text:
            if text[0] == "{":
                self._open()
                text = text[1:].lstrip()
                continue
            if text[0] == "}":
                self._scopes.pop()
                text = text[1:].lstrip()
                continue
            label = _LABEL.match(text)
            if label and text[label.end() : label.end() + 1] != ":":
                # Branches within inline assembly go backwards; others would not find their label.
                name = self._declare(label[1]) if len(self._scopes) > 1 else label[1]
                self._kernel.labels[name] = len(self._kernel.instructions)
                text = text[label.end() :].lstrip()
                continue
            statement, end, rest = text.partition(";")
            if not end:
                return text
            self._statement(statement.strip(), line)
            text = rest.lstrip()
        return ""

    def _open(self) -> None:
        self._scopes.append({})
        if len(self._scopes) > 1:
            self._n_scopes += 1

    def _declare(self, name: str) -> str:
        unique = name if len(self._scopes) <= 1 else f"{name}@{self._n_scopes}"
        self._scopes[-1][name] = unique
        return unique

    def _resolve(self, name: str) -> str:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return name

    def _statement(self, text: str, line: int) -> None:
        if not text or text.startswith(".pragma"):
            return
        registers = _REGISTERS.match(text)
        if registers:
            self._registers(registers[1], registers[2])
        elif text.startswith((".shared", ".local", ".const", ".global")):
            variable = _variable(text)
            self._kernel.variables[variable.name] = variable
        else:
            self._instruction(text, line)

    def _registers(self, type_: str, names: str) -> None:
        for name in split_operands(names):
            many = re.fullmatch(r"([\w%$]+)<(\d+)>", name)
            if many:
                self._kernel.registers.update(dict.fromkeys((f"{many[1]}{i}" for i in range(int(many[2]))), type_))
            else:
                self._kernel.registers[self._declare(name)] = type_

    def _instruction(self, text: str, line: int) -> None:
        match = _INSTRUCTION.match(text)
        if not match:
            raise PtxError(f"line {line}: cannot be read: {text[:80]}")
        guard, mnemonic, operands = match.groups()
        guard = guard or ""
        if len(self._scopes) > 1:
            operands = _WORD.sub(lambda m: self._resolve(m[0]), operands)
            guard = _WORD.sub(lambda m: self._resolve(m[0]), guard)
        self._kernel.instructions.append(Instruction(mnemonic, split_operands(operands), guard, line, self._source))
