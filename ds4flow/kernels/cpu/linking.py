"""Machine code in this process: object files linked by LLVM, and a way from Python into them.

Needs llvmlite only: a start that compiles nothing does without numba's compiler, whose setting up
takes several times as long as linking all kernels.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from llvmlite import __version__ as llvmlite_version
from llvmlite import ir

from ds4flow.kernels.cpu.store import Stored

ARGUMENTS = 9
"""Arguments of a kernel that Python calls, all int64."""

_METH_FASTCALL = 0x80
_INT = ir.IntType(64)
_POINTER = ir.IntType(8).as_pointer()


@cache
def machine() -> str:
    """Digest of what object code depends on beside its source: CPU, its features, and LLVM."""
    features = llvm.get_host_cpu_features().flatten()
    parts = (llvm.get_process_triple(), llvm.get_host_cpu_name(), features, llvmlite_version)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@cache
def _engine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    made = target.create_target_machine(codemodel="jitdefault", jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(str(_entries())), made)


def link(stored: Stored) -> int:
    """Address of the stored function.

    No kernel raises: should one do so where numba is not set up, the process is stopped.
    """
    for name in stored.raising:
        if llvm.address_of_symbol(name) is None:
            llvm.add_symbol(name, address("raised"))
    _engine().add_object_file(llvm.ObjectFileRef.from_data(stored.code))
    return address(stored.symbol)


def address(symbol: str) -> int:
    """Address of a function that is linked."""
    _engine().finalize_object()
    found = int(_engine().get_function_address(symbol))
    if not found:
        raise LookupError(f"the object code has no function {symbol}")
    return found


class _Method(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


@cache
def entry(*, release: bool) -> Callable[..., int]:
    """The function that Python calls: the address of a kernel and its nine int64 arguments.

    `release`: without the interpreter's lock, so that other Python threads go on meanwhile.
    """
    name = "enter_and_release" if release else "enter"
    method = _Method(name.encode(), address(name), _METH_FASTCALL, None)
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.argtypes = (ctypes.POINTER(_Method), ctypes.c_void_p, ctypes.c_void_p)
    make.restype = ctypes.py_object
    _METHODS.append(method)
    made: Callable[..., int] = make(ctypes.byref(method), None, None)
    return made


_METHODS: list[_Method] = []  # a function object refers to its method, and does not own it


def _entries() -> ir.Module:
    """`enter` and `enter_and_release` as C functions of Python, and `raised`."""
    module = ir.Module("entries")
    module.triple = llvm.get_process_triple()
    for name, release in (("enter", False), ("enter_and_release", True)):
        _emit_entry(module, name, release=release)
    trap = ir.Function(module, ir.FunctionType(ir.VoidType(), ()), "llvm.trap")
    raised = ir.Function(module, ir.FunctionType(ir.VoidType(), ()), "raised")
    b = ir.IRBuilder(raised.append_basic_block())
    b.call(trap, ())
    b.unreachable()
    return module


def _emit_entry(module: ir.Module, name: str, *, release: bool) -> None:
    """A function `(self, arguments, count)` of Python that calls its first argument."""

    def python(called: str, result: Any, *kinds: Any) -> Any:
        known = module.globals.get(called)
        return known or ir.Function(module, ir.FunctionType(result, kinds), called)

    kind = ir.FunctionType(_POINTER, (_POINTER, _POINTER.as_pointer(), _INT))
    function = ir.Function(module, kind, name)
    _, arguments, count = function.args
    b = ir.IRBuilder(function.append_basic_block())
    with b.if_then(b.icmp_signed("!=", count, _INT(ARGUMENTS + 1)), likely=False):
        b.call(python("PyErr_BadArgument", ir.IntType(32)), ())
        b.ret(_POINTER(None))
    convert = python("PyLong_AsLongLong", _INT, _POINTER)
    values = [
        b.call(convert, (b.load(b.gep(arguments, (_INT(i),))),)) for i in range(ARGUMENTS + 1)
    ]
    failed = b.call(python("PyErr_Occurred", _POINTER), ())
    with b.if_then(b.icmp_unsigned("!=", failed, _POINTER(None)), likely=False):
        b.ret(_POINTER(None))
    kernel = b.inttoptr(values[0], ir.FunctionType(_INT, (_INT,) * ARGUMENTS).as_pointer())
    state = b.call(python("PyEval_SaveThread", _POINTER), ()) if release else None
    result = b.call(kernel, values[1:])
    if release:
        b.call(python("PyEval_RestoreThread", ir.VoidType(), _POINTER), (state,))
    b.ret(b.call(python("PyLong_FromLongLong", _POINTER, _INT), (result,)))
