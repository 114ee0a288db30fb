"""Reader of the pickle in a PyTorch file without Python's unpickler: nothing in it is imported, called or changed.

A pickle is a program for a stack machine. This machine knows the instructions that `torch.save` writes, and builds
dicts, lists, tuples, numbers and texts. Any other name in a pickle becomes a `Token`: an inert tuple of two texts.
`interop.torch_files` then makes tensors from these tokens.
Source of the instructions: Python's pickletools.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, NoReturn


class BadPickleError(ValueError):
    """The pickle is broken; the message says how, but does not name the file."""


class RefusedPickleError(BadPickleError):
    """The pickle asks for something that no state dict needs."""


class Token(NamedTuple):
    """A global in a pickle: the name of a function or a class."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Storage(NamedTuple):
    """A pickle's reference to the storage of tensors; not checked yet."""

    kind: Token
    key: Any
    size: Any


class Call(NamedTuple):
    """A call that a pickle asks for, with its arguments; it is never made."""

    function: Token
    arguments: tuple[Any, ...]


class Ordered(dict[Any, Any]):
    """Replacement of collections.OrderedDict: the only dict whose state a pickle may set; the state is discarded."""

    __slots__ = ()


_ORDERED = Token("collections", "OrderedDict")
TENSOR = Token("torch._utils", "_rebuild_tensor_v2")
PARAMETER = Token("torch._utils", "_rebuild_parameter")
_NAMESPACE, _DEVICE = Token("argparse", "Namespace"), Token("torch", "device")

_CALLED = (TENSOR, PARAMETER, _ORDERED, _DEVICE)
_KEYS = (str, int, float, bool, type(None))
"""Types of keys. Tuples are excluded: nested references may take forever to hash."""
_MOST_BITS = 64


def read_state_dict(content: bytes, types: frozenset[str]) -> Any:
    """Reads a pickle: dicts, lists, tuples, numbers, texts, and tokens in place of anything else.

    `types` are the names in the module `torch` of the types of storages that a pickle may name.

    Raises:
      BadPickleError: the pickle is broken.
      RefusedPickleError: it asks for something that a state dict does not need.
    """
    return _Machine(types).read(content)


def read_plain(content: bytes, names: Collection[Token]) -> Any:
    """Reads a pickle of plain data: dicts, lists, tuples, numbers, texts.

    `names` are functions and classes that it may also name; a call of one becomes a `Call`, whose state is discarded.

    Raises:
      BadPickleError: the pickle is broken.
      RefusedPickleError: it names anything else.
    """
    return _Machine(frozenset(), frozenset(names)).read(content)


class _Machine:
    """The stack, the marks and the memo of one pickle."""

    def __init__(self, types: frozenset[str], inert: frozenset[Token] | None = None):
        self._types = types
        self._called = frozenset(_CALLED) if inert is None else inert
        self._made = frozenset((_NAMESPACE,)) if inert is None else inert  # called without arguments; may get a state
        self._known = self._called | self._made
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []  # the stack at each mark
        self._memo: dict[int, Any] = {}

    def read(self, content: bytes) -> Any:
        """Reads the pickle `content`; use a machine once."""
        try:
            for opcode, argument, _ in pickletools.genops(content):
                if opcode.name == "STOP":
                    if self._marked or len(self._stack) != 1:
                        raise BadPickleError("it ends too early")
                    return self._stack[0]
                self._run(opcode.name, argument)
        except BadPickleError:
            raise
        # genops raises these on a truncated stream or one that is not a pickle.
        except (ValueError, LookupError, OverflowError) as error:
            raise BadPickleError(str(error)) from error
        raise BadPickleError("it has no end")

    def _run(self, name: str, argument: Any) -> None:
        if name in _PUSHES:
            if isinstance(argument, int) and argument.bit_length() > _MOST_BITS:
                raise RefusedPickleError(f"holds a number of {argument.bit_length()} bits")
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in _STEPS:
            _STEPS[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            raise RefusedPickleError(f"uses the pickle instruction {name}")

    def _pop(self) -> Any:
        if not self._stack:
            raise BadPickleError("its stack is empty")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        if not self._marked:
            raise BadPickleError("there is no mark")
        items, self._stack = self._stack, self._marked.pop()
        return items

    def _mark(self, _: Any) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _put(self, number: Any) -> None:
        if not self._stack:
            raise BadPickleError("its stack is empty")
        self._memo[len(self._memo) if number is None else number] = self._stack[-1]

    def _get(self, number: int) -> None:
        if number not in self._memo:
            raise BadPickleError(f"nothing is remembered as {number}")
        self._stack.append(self._memo[number])

    def _tuple_of(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._stack.append(tuple(reversed(items)))

    def _marked_tuple(self, _: Any) -> None:
        items = tuple(self._pop_to_mark())
        self._stack.append(items)

    def _extend(self, items: list[Any]) -> None:
        target = self._pop()
        if type(target) is not list:
            _refuse("append to", target)
        target.extend(items)
        self._stack.append(target)

    def _update(self, items: list[Any]) -> None:
        target = self._pop()
        if type(target) not in (dict, Ordered):
            _refuse("set an item of", target)
        if len(items) % 2:
            raise BadPickleError("a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in _KEYS:
                raise RefusedPickleError(f"has a {type(key).__name__} for a key")
            target[key] = value
        self._stack.append(target)

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")  # genops joins the two lines
        self._name(module, name)

    def _stack_global(self, _: Any) -> None:
        name, module = self._pop(), self._pop()
        if type(module) is not str or type(name) is not str:
            raise BadPickleError("a name that is not a text")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        token = Token(module, name)
        if not (token in self._known or (module == "torch" and name in self._types)):
            raise RefusedPickleError(f"asks for {module[:80]}.{name[:80]}")
        self._stack.append(token)

    def _reduce(self, _: Any) -> None:
        arguments, function = self._pop(), self._pop()
        if type(function) is not Token or function not in self._called or type(arguments) is not tuple:
            _refuse("call", function)
        if function == _ORDERED:
            if arguments:
                _refuse("fill", function)
            self._stack.append(Ordered())
        else:
            self._stack.append(Call(function, arguments))

    def _new(self, _: Any) -> None:
        arguments, kind = self._pop(), self._pop()
        if type(kind) is not Token or kind not in self._made or arguments != ():
            _refuse("make", kind)
        self._stack.append(Call(kind, ()))

    def _build(self, _: Any) -> None:
        self._pop()
        target = self._stack[-1] if self._stack else None
        # The state of dicts is `_metadata`, that of a command line its values: neither is needed.
        if type(target) is not Ordered and not (type(target) is Call and target.function in self._made):
            _refuse("set the state of", target)

    def _persistent(self, _: Any) -> None:
        row = self._pop()
        # ("storage", type, key, device, number of elements)
        if type(row) is not tuple or len(row) != 5 or row[0] != "storage" or type(row[1]) is not Token:
            _refuse("refer to", row)
        self._stack.append(Storage(row[1], row[2], row[4]))


def _refuse(what: str, target: Any) -> NoReturn:
    # Names the type alone: formatting the contents could take forever.
    name = str(target) if type(target) is Token else f"a {type(target).__name__}"
    raise RefusedPickleError(f"tries to {what} {name}")


_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT")
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8")
_PUSHES = frozenset((*_NUMBERS, *_TEXTS))
_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_STEPS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine._mark,
    "BINPUT": _Machine._put,
    "LONG_BINPUT": _Machine._put,
    "MEMOIZE": _Machine._put,
    "BINGET": _Machine._get,
    "LONG_BINGET": _Machine._get,
    "TUPLE": _Machine._marked_tuple,
    "TUPLE1": lambda machine, _: machine._tuple_of(1),
    "TUPLE2": lambda machine, _: machine._tuple_of(2),
    "TUPLE3": lambda machine, _: machine._tuple_of(3),
    "APPEND": lambda machine, _: machine._extend([machine._pop()]),
    "APPENDS": lambda machine, _: machine._extend(machine._pop_to_mark()),
    "SETITEM": lambda machine, _: machine._update([machine._pop(), machine._pop()][::-1]),
    "SETITEMS": lambda machine, _: machine._update(machine._pop_to_mark()),
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._reduce,
    "NEWOBJ": _Machine._new,
    "BUILD": _Machine._build,
    "BINPERSID": _Machine._persistent,
}
