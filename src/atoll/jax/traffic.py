"""What a compiled program sends between islands, read from its own text.

Counted are the bytes that each place takes in from others: of an all-gather its output
but for its own part, of an all-to-all likewise, of an all-reduce twice that of a
reduce-scatter of its operand. A collective that stays within one island counts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod

_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8"), 1),
    **dict.fromkeys(("s16", "u16", "bf16", "f16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64"), 8),
}
_COLLECTIVE = re.compile(
    r"= (?P<shape>.*?) (?P<kind>all-gather|all-to-all|all-reduce|reduce-scatter|"
    r"collective-permute)(?P<start>-start)?\((?P<rest>.*)"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")


def collective_bytes(text: str, *, island_of: Sequence[int]) -> int:
    """Return the bytes that a place takes in from other islands in one call.

    Args:
        text: of a compiled program, `compiled.as_text()`.
        island_of: for each device, in the order of the mesh, which island's it is.
    """
    return sum(size for _, size in collectives(text, island_of=island_of))


def collectives(text: str, *, island_of: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield kind and bytes of every collective between islands in a program."""
    for line in text.splitlines():
        found = _COLLECTIVE.search(line)
        if found is None:
            continue
        groups = _groups(line)
        width = max((len(group) for group in groups), default=len(island_of))
        if groups and not any(_crosses(group, island_of) for group in groups):
            continue
        sizes = [_size(*each) for each in _ARRAY.findall(found["shape"])]
        # A started collective has its operands before its outputs.
        size = sum(sizes) if not found["start"] else max(sizes)
        yield found["kind"], _taken(found["kind"], size, width)


def _taken(kind: str, size: int, width: int) -> int:
    share = size * (width - 1) // width
    if kind == "collective-permute":
        return size
    if kind == "reduce-scatter":
        return size * (width - 1)
    return 2 * share if kind == "all-reduce" else share


def _size(dtype: str, shape: str) -> int:
    return _BYTES.get(dtype, 0) * prod(int(n) for n in shape.split(",") if n)


def _groups(line: str) -> list[list[int]]:
    if listed := _LISTED.search(line) or _PAIRS.search(line):
        return [
            [int(n) for n in group.split(",") if n]
            for group in re.findall(r"\{([\d,]*)\}", listed[1])
        ]
    if iota := _IOTA.search(line):
        return _iota_groups(*[_numbers(each) for each in iota.groups()])
    if mesh := _MESH.search(line):
        return _mesh_groups(mesh[1], mesh[2])
    return []


def _mesh_groups(axes: str, along: str) -> list[list[int]]:
    """Return the groups of XLA's form by axes: those along which devices talk."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    named = re.findall(r"'(\w+)'", along)
    order = [i for i, name in enumerate(sizes) if name not in named]
    order += [i for i, name in enumerate(sizes) if name in named]
    width = prod(sizes[name] for name in named)
    return _iota_groups([-1, width], list(sizes.values()), order)


def _numbers(text: str | None) -> list[int]:
    return [int(n) for n in text.split(",")] if text else []


def _iota_groups(
    shape: list[int], dims: list[int], order: list[int]
) -> list[list[int]]:
    """Return the groups of XLA's short form: an arange, transposed and cut to rows."""
    order = order or list(range(len(dims)))
    strides = [prod(dims[i + 1 :]) for i in range(len(dims))]
    numbers = [0]
    for axis in order:
        numbers = [n + strides[axis] * i for n in numbers for i in range(dims[axis])]
    width = prod(shape[1:])
    return [numbers[i : i + width] for i in range(0, len(numbers), width)]


def _crosses(group: Sequence[int], island_of: Sequence[int]) -> bool:
    return len({island_of[device] for device in group}) > 1
