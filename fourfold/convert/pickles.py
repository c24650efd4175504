"""Safe unpickling: a machine that can build containers and nothing else.

A pickle is a program for a stack machine; Python's own runs whatever functions it names. This one
imports nothing and calls nothing but the constructors its caller lists: any other name is refused,
by name. It knows the opcodes of protocols 2 to 5.

Bytes objects are not copied but stay slices of the file, so a file of weights costs the memory of
its names. The number of steps is bounded, no step makes more than one small object, and keys are
plain values, so no file can make it hang or exhaust memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.errors import CheckpointError

# A tensor takes some thirty steps, so this is room for fifty times the largest model there is,
# while a file of nothing but steps stays below a few hundred megabytes of memory.
MAX_STEPS = 2_000_000
MAX_NAME_BYTES = 1000


@dataclass(frozen=True, eq=False)
class Constructor:
    """Something a pickle may call, and what it stands for here."""

    make: Callable[..., Any]


class Record:
    """An object that a pickle may give a state. By default it ignores that and is inert."""

    def set_state(self, state: Any) -> None:
        pass


Globals = Callable[[str], Any]


def only(known: Mapping[str, Any]) -> Globals:
    """The plain rule for names: these, and every other is refused."""

    def find(name: str) -> Any:
        if name not in known:
            raise CheckpointError(
                f"it names {_printable(name)}, which weights do not need; a file that does may run "
                "code where it is read. Nothing was run"
            )
        return known[name]

    return find


_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False}
_EMPTY: dict[bytes, type] = {b"]": list, b"}": dict, b"\x8f": list}  # a set is kept as a list
_INTEGERS = {b"J": "<i", b"K": "<B", b"M": "<H", b"G": ">d"}
_LONGS = {b"\x8a": "<B", b"\x8b": "<i"}
_TEXTS = {b"X": "<I", b"\x8c": "<B", b"\x8d": "<Q"}
_OLD_TEXTS = {b"T": "<i", b"U": "<B"}
_BYTES = {b"B": "<I", b"C": "<B", b"\x8e": "<Q", b"\x96": "<Q"}
_TUPLES = {b")": 0, b"\x85": 1, b"\x86": 2, b"\x87": 3}
_PUTS = {b"q": "<B", b"r": "<I"}
_GETS = {b"h": "<B", b"j": "<I"}


class PickleMachine:
    """Runs one pickle; `position` is then after it, where another may begin."""

    def __init__(
        self,
        data: memoryview,
        path: Path,
        find: Globals,
        persistent: Callable[[Any], Any] | None = None,
        position: int = 0,
        max_steps: int | None = None,
    ) -> None:
        self.data, self.path, self.position = data, path, position
        self.max_steps = MAX_STEPS if max_steps is None else max_steps
        self.find, self.persistent = find, persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def load(self) -> Any:
        try:
            for _ in range(self.max_steps):
                opcode = bytes(self._take(1))
                if opcode == b".":
                    return self.stack.pop()
                self._step(opcode)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path} is refused: {error}") from None
        except (TypeError, ValueError, KeyError, IndexError, OverflowError, struct.error) as error:
            raise CheckpointError(
                f"{self.path} is damaged near byte {self.position}: {type(error).__name__} while "
                "reading its pickle"
            ) from None
        raise CheckpointError(
            f"{self.path} is refused: its pickle takes over {self.max_steps} steps"
        )

    # -- bytes ------------------------------------------------------------------------------

    def _take(self, count: int) -> memoryview:
        if not 0 <= count <= len(self.data) - self.position:
            raise CheckpointError(
                f"it is cut off or damaged: {count} bytes are announced at byte {self.position} "
                f"and {len(self.data) - self.position} are left"
            )
        self.position += count
        return self.data[self.position - count : self.position]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _line(self) -> str:
        window = bytes(self.data[self.position : self.position + MAX_NAME_BYTES])
        length = window.index(b"\n")
        self.position += length + 1
        return window[:length].decode()

    # -- steps ------------------------------------------------------------------------------

    def _step(self, opcode: bytes) -> None:
        push = self.stack.append
        if opcode in _GETS:
            push(self.memo[self._number(_GETS[opcode])])
        elif opcode in _PUTS:
            self.memo[self._number(_PUTS[opcode])] = self.stack[-1]
        elif opcode in _CONSTANTS:
            push(_CONSTANTS[opcode])
        elif opcode in _INTEGERS:
            push(self._number(_INTEGERS[opcode]))
        elif opcode in _TUPLES:
            push(self._popped(_TUPLES[opcode]))
        elif opcode in _TEXTS:
            push(str(self._take(self._number(_TEXTS[opcode])), "utf-8", "surrogatepass"))
        elif opcode in _BYTES:
            push(self._take(self._number(_BYTES[opcode])))
        elif opcode in _OLD_TEXTS:
            push(str(self._take(self._number(_OLD_TEXTS[opcode])), "latin-1"))
        elif opcode in _EMPTY:
            push(_EMPTY[opcode]())
        elif opcode in _LONGS:
            push(self._long(self._number(_LONGS[opcode])))
        elif opcode in _STEPS:
            _STEPS[opcode](self)
        else:
            raise CheckpointError(f"opcode {opcode!r} at byte {self.position - 1} is not known")

    def _long(self, size: int) -> int:
        if size > 255:
            raise CheckpointError(f"it holds an integer of {size} bytes")
        return int.from_bytes(self._take(size), "little", signed=True)

    def _popped(self, count: int) -> tuple[Any, ...]:
        if count > len(self.stack):
            raise IndexError
        items = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return items

    def _since_mark(self) -> tuple[Any, ...]:
        return self._popped(max(len(self.stack) - self.marks.pop(), 0))

    def _mark(self) -> None:
        self.marks.append(len(self.stack))

    def _memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _frame(self) -> None:
        self._take(8)  # how much to read at once: of no use where all is at hand

    def _protocol(self) -> None:
        if self._take(1)[0] > 5:
            raise CheckpointError("it is of a pickle protocol above 5")

    def _append(self, items: tuple[Any, ...]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError
        target.extend(items)

    def _set(self, items: tuple[Any, ...]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise TypeError
        for key, value in zip(items[::2], items[1::2]):
            # A tuple's hash costs what the tuple holds, which may be itself many times over.
            if not isinstance(key, str | int | float | Record | None):
                raise CheckpointError(f"a {type(key).__name__} is used as a key")
            target[key] = value

    def _dict(self) -> None:
        items = self._since_mark()
        self.stack.append({})
        self._set(items)

    def _global(self) -> None:
        module, name = self._line(), self._line()
        self.stack.append(self.find(f"{module}.{name}"))

    def _stack_global(self) -> None:
        module, name = self._popped(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError
        self.stack.append(self.find(f"{module}.{name}"))

    def _call(self) -> None:
        function, arguments = self._popped(2)
        if not isinstance(function, Constructor) or not isinstance(arguments, tuple):
            raise CheckpointError("it calls something that cannot be called")
        self.stack.append(function.make(*arguments))

    def _build(self) -> None:
        (state,) = self._popped(1)
        target = self.stack[-1]
        if isinstance(target, Record):
            target.set_state(state)
        elif type(target) is not dict:  # a dict's attributes are no part of what it holds
            raise TypeError

    def _persistent(self) -> None:
        if self.persistent is None:
            raise CheckpointError("it refers to something outside itself")
        (name,) = self._popped(1)
        self.stack.append(self.persistent(name))


_STEPS: dict[bytes, Callable[[PickleMachine], Any]] = {
    b"(": PickleMachine._mark,
    b"0": lambda self: self._popped(1),
    b"1": PickleMachine._since_mark,
    b"2": lambda self: self.stack.append(self.stack[-1]),
    b"t": lambda self: self.stack.append(self._since_mark()),
    b"l": lambda self: self.stack.append(list(self._since_mark())),
    b"d": PickleMachine._dict,
    b"a": lambda self: self._append(self._popped(1)),
    b"e": lambda self: self._append(self._since_mark()),
    b"\x90": lambda self: self._append(self._since_mark()),
    b"\x91": lambda self: self.stack.append(list(self._since_mark())),
    b"s": lambda self: self._set(self._popped(2)),
    b"u": lambda self: self._set(self._since_mark()),
    b"c": PickleMachine._global,
    b"\x93": PickleMachine._stack_global,
    b"R": PickleMachine._call,
    b"\x81": PickleMachine._call,
    b"b": PickleMachine._build,
    b"Q": PickleMachine._persistent,
    b"\x94": PickleMachine._memoize,
    b"\x95": PickleMachine._frame,
    b"\x80": PickleMachine._protocol,
}


def _printable(name: str) -> str:
    return repr(name if len(name) <= 100 else name[:97] + "...")
