"""Operations on 64 words at once for ``codec_jit``, in LLVM's own vectors, which it fits to every processor.

A set of words of a unit is a number of 64 bits, the lowest for the first word. Loops that numba compiles do not become
the comparisons of whole registers that fill such a number, hence these few instructions by hand. Nothing here checks an
index.
"""

from __future__ import annotations

# ruff: noqa: ARG001 - numba finds arguments by name and hands their values to the other half of each pair
from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from protocol.weights.classes import MAX_CLASSES

#: Words per unit.
UNIT: Final = 64
#: Units per block. What a block holds is counted before any of it is needed, so that no load waits for a store.
UNITS: Final = 32
#: Units of a block that are passed at once in search of one.
_LEAP: Final = 8

#: How far ahead memory is read, and what the processor reads at once.
_AHEAD_BYTES, _LINE_BYTES = 4096, 64

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_CLASSES_64: Final = ir.VectorType(_I64, MAX_CLASSES)
_COUNT: Final = f"llvm.ctpop.v{MAX_CLASSES}i64"
_Codegen = Callable[[Any, Any, Any, Any], Any]


def _operation(typing: Callable[..., tuple[Any, _Codegen]]) -> Any:
    """What numba calls: ``typing`` gives the signature and the function that writes the instructions."""
    return intrinsic(typing)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, at: Any, vector: Any) -> Any:
    """Where element ``at`` of an array begins, as a pointer to a vector."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), vector.as_pointer())


def _load(context: Any, builder: Any, array_type: Any, array: Any, at: Any, vector: Any) -> Any:
    loaded = builder.load(_pointer(context, builder, array_type, array, at, vector))
    loaded.align = array_type.dtype.bitwidth // 8  # no more than the array promises
    return loaded


def _store(context: Any, builder: Any, array_type: Any, array: Any, at: Any, value: Any) -> None:
    stored = builder.store(value, _pointer(context, builder, array_type, array, at, value.type))
    stored.align = array_type.dtype.bitwidth // 8


def _index(number: int) -> Any:
    return ir.Constant(ir.IntType(types.intp.bitwidth), number)


def _fetch_ahead(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> None:
    """Bring words that will be looked at soon into the cache; processors by themselves stop at every 4 KiB."""
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    data = builder.bitcast(context.make_array(array_type)(context, builder, array).data, _I8.as_pointer())
    word_bytes = array_type.dtype.bitwidth // 8
    for line in range(0, UNIT * word_bytes, _LINE_BYTES):
        offset = builder.add(builder.mul(at, _index(word_bytes)), _index(_AHEAD_BYTES + line))
        where = builder.inttoptr(builder.add(builder.ptrtoint(data, _I64), offset), _I8.as_pointer())
        builder.call(prefetch, [where, *(ir.Constant(_I32, n) for n in (0, 3, 1))])


def _class_sets(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    words, at, limits, sets, unit = args
    width = signature.args[0].dtype.bitwidth
    vector, bytes_ = ir.VectorType(ir.IntType(width), UNIT), ir.VectorType(_I8, UNIT)
    loaded = _load(context, builder, signature.args[0], words, at, vector)
    shift = ir.Constant(vector, [width - 9] * UNIT)
    keys = builder.trunc(builder.lshr(loaded, shift), bytes_)
    _fetch_ahead(context, builder, signature.args[0], words, at)
    row = builder.mul(unit, _index(MAX_CLASSES))
    for c in range(1, MAX_CLASSES):
        limit = _load(context, builder, signature.args[2], limits, _index(c * UNIT), bytes_)
        above = builder.bitcast(builder.icmp_unsigned(">", keys, limit), _I64)
        _store(context, builder, signature.args[3], sets, builder.add(row, _index(c)), above)
    return context.get_dummy_value()


@_operation
def class_sets(_typing: Any, words: Any, at: Any, limits: Any, sets: Any, unit: Any) -> tuple[Any, _Codegen]:
    """Row ``unit`` of ``sets``, but for its first number: which words from ``at`` on have a key above each limit.

    Rows have ``MAX_CLASSES`` numbers; ``limits`` repeats each limit ``UNIT`` times. The first number, which words there
    are, is the caller's.
    """
    return types.void(words, types.intp, limits, sets, types.intp), _class_sets


def _count_block(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    sets, before, totals = args
    zeros = ir.Constant(_CLASSES_64, [0] * MAX_CLASSES)
    shifted = ir.Constant(ir.VectorType(_I32, MAX_CLASSES), list(range(1, MAX_CLASSES + 1)))
    count = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_CLASSES_64, [_CLASSES_64]), _COUNT)
    sums = zeros
    for u in range(UNITS):
        row = _index(u * MAX_CLASSES)
        from_here = _load(context, builder, signature.args[0], sets, row, _CLASSES_64)
        only = builder.and_(from_here, builder.not_(builder.shuffle_vector(from_here, zeros, shifted)))
        _store(context, builder, signature.args[0], sets, row, only)
        _store(context, builder, signature.args[1], before, row, sums)
        sums = builder.add(sums, builder.call(count, [only]))
    _store(context, builder, signature.args[2], totals, _index(0), sums)
    return context.get_dummy_value()


@_operation
def count_block(_typing: Any, sets: Any, before: Any, totals: Any) -> tuple[Any, _Codegen]:
    """Words of each class: which of each unit, in place of those from a class on; how many before it, and in all."""
    return types.void(sets, before, totals), _count_block


def _take(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    left, totals = args
    had = _load(context, builder, signature.args[0], left, _index(0), _CLASSES_64)
    has = builder.sub(had, _load(context, builder, signature.args[1], totals, _index(0), _CLASSES_64))
    _store(context, builder, signature.args[0], left, _index(0), has)
    negative = builder.icmp_signed("<", has, ir.Constant(_CLASSES_64, [0] * MAX_CLASSES))
    return builder.zext(builder.bitcast(negative, ir.IntType(MAX_CLASSES)), _I64)


@_operation
def take(_typing: Any, left: Any, totals: Any) -> tuple[Any, _Codegen]:
    """Take ``totals`` off ``left``; the set of classes for which that leads below zero."""
    return types.uint64(left, totals), _take


def _unit_of(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    before, c, rank = args
    unit = _index(0)
    for distance, steps in ((_LEAP, UNITS // _LEAP), (1, _LEAP)):
        from_here = unit
        for step in range(1, steps):
            row = builder.add(from_here, _index(step * distance))
            at = builder.add(builder.mul(row, _index(MAX_CLASSES)), c)
            reached = builder.icmp_signed("<=", _load(context, builder, signature.args[0], before, at, _I64), rank)
            unit = builder.select(reached, row, unit)
    return unit


@_operation
def unit_of(_typing: Any, before: Any, c: Any, rank: Any) -> tuple[Any, _Codegen]:
    """The unit in which the word lies that has ``rank`` words of class ``c`` before it in the block."""
    return types.int64(before, types.intp, types.int64), _unit_of


def _differing(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    old, new, at = args
    unit = ir.VectorType(ir.IntType(signature.args[0].dtype.bitwidth), UNIT)
    left = _load(context, builder, signature.args[0], old, at, unit)
    right = _load(context, builder, signature.args[1], new, at, unit)
    return builder.bitcast(builder.icmp_unsigned("!=", left, right), _I64)


@_operation
def differing(_typing: Any, old: Any, new: Any, at: Any) -> tuple[Any, _Codegen]:
    """Which of the words from ``at`` on differ."""
    return types.uint64(old, new, types.intp), _differing


def _count(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    return builder.ctpop(args[0])


@_operation
def members(_typing: Any, of: Any) -> tuple[Any, _Codegen]:
    """How many words a set holds."""
    return types.uint64(types.uint64), _count


def _first(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    return builder.cttz(args[0], cgutils.true_bit)


@_operation
def first(_typing: Any, of: Any) -> tuple[Any, _Codegen]:
    """The first word of a set that is not empty."""
    return types.uint64(types.uint64), _first


def _leading(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
    return builder.ctlz(args[0], cgutils.false_bit)


@_operation
def leading_zeros(_typing: Any, of: Any) -> tuple[Any, _Codegen]:
    """How many zeros a 32-bit number begins with."""
    return types.uint32(types.uint32), _leading


def _read(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    data, at = args
    return _load(context, builder, signature.args[0], data, at, ir.IntType(signature.return_type.bitwidth))


@_operation
def read_64(_typing: Any, data: Any, at: Any) -> tuple[Any, _Codegen]:
    """Eight bytes of a byte array, as a little-endian number."""
    return types.uint64(data, types.intp), _read


@_operation
def read_32(_typing: Any, data: Any, at: Any) -> tuple[Any, _Codegen]:
    """Four bytes of a byte array, as a little-endian number."""
    return types.uint32(data, types.intp), _read


@_operation
def read_16(_typing: Any, data: Any, at: Any) -> tuple[Any, _Codegen]:
    """Two bytes of a byte array, as a little-endian number."""
    return types.uint16(data, types.intp), _read


def _write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    data, at, value = args
    _store(context, builder, signature.args[0], data, at, value)
    return context.get_dummy_value()


@_operation
def write_64(_typing: Any, data: Any, at: Any, value: Any) -> tuple[Any, _Codegen]:
    """Write eight bytes of a byte array, as a little-endian number."""
    return types.void(data, types.intp, types.uint64), _write


@_operation
def write_32(_typing: Any, data: Any, at: Any, value: Any) -> tuple[Any, _Codegen]:
    """Write four bytes of a byte array, as a little-endian number."""
    return types.void(data, types.intp, types.uint32), _write


@_operation
def write_16(_typing: Any, data: Any, at: Any, value: Any) -> tuple[Any, _Codegen]:
    """Write two bytes of a byte array, as a little-endian number."""
    return types.void(data, types.intp, types.uint16), _write


def _at_address(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], context.get_value_type(signature.return_type))


@_operation
def at_address(_typing: Any, address: Any, like: Any) -> tuple[Any, _Codegen]:
    """A pointer to what lies at an address, of the type that the array ``like`` holds; for ``numba.carray``."""
    return types.CPointer(like.dtype)(types.uint64, like), _at_address
