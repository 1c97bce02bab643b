"""A pickle parser that imports no modules, instantiates no classes and calls no functions.

`pickle.load` calls any function that the file names, so an untrusted checkpoint could run arbitrary
commands. `parse` executes the stack operations of the pickle, but represents a class or function as
a `Global`, and an object as a `Record` with the name of its class and the arguments. Only names
that the caller accepts are allowed, and only operations that `pickle.dump` and `torch.save` write
for checkpoints. Time and memory are proportional to the size of the file. The parser is slower than
`pickle.load`: it executes about a million operations per second.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class UnsafePickleError(ValueError):
    """Error raised for a pickle that could run code; a valid checkpoint contains no such pickle."""


@dataclass(frozen=True, slots=True)
class Global:
    """A reference to a class or function by name."""

    name: str  #: dotted name, including the module


@dataclass(slots=True, eq=False)
class Record:
    """A description of an object in the pickle; the object itself is never created."""

    kind: str  #: dotted name of the class, or of the function that returns the object
    arguments: tuple[Any, ...]
    state: Any = None  #: value that `pickle.load` would pass to `__setstate__`


#: `kind` of a `Record` that represents a member of an enumeration, if Python 3.11.0 to 3.11.3 wrote
#: the pickle; other releases store the value of the member instead of its name
GETATTR = "builtins.getattr"
PERSISTENT = "persistent"  #: `kind` of a `Record` that represents data stored outside the pickle
_KEYS = (str, int, float, type(None), Record)
_DATA = (
    "PROTO",
    "FRAME",
    "STOP",
    "MARK",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
    "SHORT_BINBYTES",
    "BINBYTES",
    "BINBYTES8",
    "EMPTY_TUPLE",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
    "EMPTY_LIST",
    "APPEND",
    "APPENDS",
    "EMPTY_DICT",
    "BINPUT",
    "LONG_BINPUT",
    "BINGET",
    "LONG_BINGET",
    "MEMOIZE",
    "BINPERSID",
    "GLOBAL",
    "STACK_GLOBAL",
)


def parse(data: bytes, *, known: Callable[[str], bool]) -> Any:
    """Return the content of a pickle, with each object replaced by a `Record`.

    Classes and functions are replaced by a `Global`. Plain values are returned as they are.

    Args:
        data: content of the whole pickle.
        known: function that returns whether a dotted name is accepted.

    Raises:
        UnsafePickleError: if a name or an operation is not accepted.
        ValueError: if `data` is not a pickle, or is damaged or truncated.
    """
    try:
        return _Machine(data, known).load()
    except UnsafePickleError:
        raise
    except EOFError:
        raise ValueError("the pickle is cut off") from None
    except Exception as error:  # a damaged pickle can raise almost any exception
        why = str(error) or type(error).__name__
        raise ValueError(f"the pickle is damaged ({why})") from None


class _Operations(dict[int, Callable[[Any], None]]):
    """A table of the functions that execute the accepted pickle operations, by opcode."""

    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise UnsafePickleError(f"it has the operation 0x{code:02x}, which no checkpoint has")


class _Machine(pickle._Unpickler):  # type: ignore[name-defined]
    """An unpickler without side effects, based on the standard library's pure-Python unpickler.

    It accepts fewer operations than its base class.
    """

    def __init__(self, data: bytes, known: Callable[[str], bool]):
        super().__init__(io.BytesIO(data))
        self._known = known

    def find_class(self, module: str, name: str) -> Global:
        full = f"{module}.{name}"
        if not self._known(full):
            raise UnsafePickleError(f"it names {full!r}, which no checkpoint needs")
        return Global(full)

    def persistent_load(self, identifier: Any) -> Record:
        return Record(PERSISTENT, identifier if type(identifier) is tuple else (identifier,))

    def reduce(self) -> None:
        """Replace a function call, or the creation of an object, with a `Record` on the stack."""
        arguments = self.stack.pop()
        function = self.stack[-1]
        if type(function) is not Global or type(arguments) is not tuple:
            raise UnsafePickleError("it calls something that is not a function")
        if function.name == GETATTR and [type(argument) for argument in arguments] != [Global, str]:
            raise UnsafePickleError("it reads an attribute of something that is not a class")
        self.stack[-1] = Record(function.name, arguments)

    def build(self) -> None:
        """Store the state of an object in the `Record` that represents the object."""
        state = self.stack.pop()
        record = self.stack[-1]
        if type(record) is not Record:
            raise UnsafePickleError("it sets the state of something that is not an object")
        record.state = state

    def set_item(self) -> None:
        """Pop a key and its value from the stack, and add them to the dictionary below them."""
        value = self.stack.pop()
        key = self.stack.pop()
        self._add([key, value])

    def set_items(self) -> None:
        """Pop keys and their values from the stack, and add them to the dictionary below them."""
        items = self.pop_mark()
        self._add(items)

    def _add(self, items: list[Any]) -> None:
        """Add keys and values to the top of the stack if it is a plain dictionary.
        A tuple as a key is an error, because computing the hash of nested tuples can take forever.
        """
        target = self.stack[-1]
        if type(target) is Record:  # for example, an OrderedDict, whose items are not needed
            return
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, _KEYS):
                raise UnsafePickleError(f"it has a key of type {type(key).__name__}")
            target[key] = value

    dispatch = _Operations(
        {getattr(pickle, n)[0]: pickle._Unpickler.dispatch[getattr(pickle, n)[0]] for n in _DATA}  # type: ignore[attr-defined]
        | {
            pickle.REDUCE[0]: reduce,
            pickle.NEWOBJ[0]: reduce,
            pickle.BUILD[0]: build,
            pickle.SETITEM[0]: set_item,
            pickle.SETITEMS[0]: set_items,
        }
    )
