"""What the vectors of whole blocks are built from: instructions of LLVM."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.np.arrayobj import make_array

I32 = ir.IntType(32)


def place(context: Any, builder: Any, signature: Any, args: Any, which: int) -> Any:
    """Build the address of an array's element, whose index is an argument after it."""
    array = make_array(signature.args[which])(context, builder, args[which])
    after = which + 1
    return builder.gep(array.data, [args[after]])


def load(builder: Any, pointer: Any, kind: Any) -> Any:
    """Build a vector of what lies at an address, aligned or not."""
    loaded = builder.load(builder.bitcast(pointer, kind.as_pointer()))
    loaded.align = 1
    return loaded


def store(builder: Any, vector: Any, pointer: Any) -> None:
    """Build the writing of a vector to an address, aligned or not."""
    stored = builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()))
    stored.align = 1


def call(builder: Any, name: str, result: Any, argument: Any) -> Any:
    """Build the call of an instruction that LLVM knows by this name."""
    kind = ir.FunctionType(result, [argument.type])
    known = builder.module.globals.get(name)
    return builder.call(known or ir.Function(builder.module, kind, name), [argument])


def every(kind: Any, number: float) -> Any:
    """Build a vector whose every element is `number`."""
    return ir.Constant(kind, [number] * kind.count)


def spread(builder: Any, scalar: Any, kind: Any) -> Any:
    """Build a vector whose every element is `scalar`."""
    if isinstance(kind.element, ir.IntType) and scalar.type != kind.element:
        scalar = builder.trunc(scalar, kind.element)
    one = builder.insert_element(
        ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0)
    )
    first = ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(one, one, first)


def larger(builder: Any, one: Any, other: Any) -> Any:
    """Build the larger of two numbers without signs, or of each two of vectors."""
    return builder.select(builder.icmp_unsigned(">", one, other), one, other)
