"""A compiled program's text as a graph of its instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Instruction:
    """One line of the entry computation."""

    name: str
    line: str
    operands: tuple[str, ...]


class Graph:
    """What depends on what in the entry computation of a program."""

    def __init__(self, text: str) -> None:
        entry = re.split(r"^ENTRY ", text, flags=re.MULTILINE)[1].split("\n}")[0]
        self._by_name: dict[str, Instruction] = {}
        self.outputs: tuple[str, ...] = ()
        for line in entry.splitlines():
            if found := re.match(r"\s*(ROOT )?(%[\w.\-]+) = (.*)", line):
                root, name, rest = found.groups()
                called = rest.split("metadata=")[0]
                operands = tuple(re.findall(r"%[\w.\-]+", called))
                self._by_name[name] = Instruction(name, line, operands)
                if root:
                    self.outputs = operands

    def matching(self, pattern: str) -> list[Instruction]:
        """Return the instructions whose line has the pattern."""
        return [
            each for each in self._by_name.values() if re.search(pattern, each.line)
        ]

    def behind(self, names: list[str]) -> set[str]:
        """Return all that these instructions depend on, and themselves."""
        seen: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in seen and name in self._by_name:
                seen.add(name)
                waiting.extend(self._by_name[name].operands)
        return seen

    def arguments(self, names: set[str]) -> set[str]:
        """Return which arguments of the program are among instructions, by name."""
        found = set()
        for name in names:
            line = self._by_name[name].line
            if " parameter(" in line:
                told = re.search(r'op_name="(\w+)', line)
                found.add(told[1] if told else line)
        return found
