"""One run of a module over fake tensors, written down call by call.

The tape holds what the module asked of torch (functions of torch's Python interface, with their
arguments), the module calls around them, and which tensors share memory and are written. It is cheap (no
graph, no functionalisation), and it is what repeated blocks are recognised by: two module calls that ask
the same of torch compute the same, whatever their classes and attributes say.

What the tape cannot hold raises `NotTaped`; the caller then exports the module whole.
"""

import contextlib
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from torch_bridge.fake import Lending
from torch_bridge.program import Ref, map_leaves
from torch_bridge.signature import OUTSIDE_USER_CODE

_CONSTANTS = (
    bool, int, float, complex, str, type(None), type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
# They set what every call notes of itself (`State`).
_STATE_SETTERS = {torch._C._set_grad_enabled}


class NotTaped(Exception):
    """The run does something that a tape cannot repeat."""


@dataclass(frozen=True, slots=True)
class State:
    """What torch computes by, beside the arguments: gradients on or off, autocast regions."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Compute under this state."""
        with contextlib.ExitStack() as stack:
            if not self.grad:
                stack.enter_context(torch.no_grad())
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a torch function.

    Args:
        function: what was called.
        args, kwargs, result: nested structures with a `Ref` for every tensor.
        path: module path, slash-separated.
        source: (file, line) of the user's code, or None.
        written: storages that the call writes in place.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    result: Any
    path: str
    source: tuple[str, int] | None
    state: State
    written: frozenset[int]

    @property
    def source_line(self) -> str:
        """`file:line: code`, "" if unknown."""
        if self.source is None:
            return ""
        file, line = self.source
        return f"{file}:{line}: {linecache.getline(file, line).strip()}"


@dataclass(slots=True, kw_only=True)
class Span:
    """The calls `start` to `end` that one call of a module made."""

    path: str
    start: int
    end: int = -1
    inner: list["Span"] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor of the run. `home` is what it was before the run: an argument slot (int), a parameter's or
    buffer's name (str), a tensor with values that the module holds elsewhere, or None (computed)."""

    tensor: torch.Tensor
    storage: int
    home: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """Calls in order, values by number, module calls as a tree, and the values that forward returns."""

    calls: tuple[Call, ...]
    values: tuple[Value, ...]
    root: Span
    results: tuple[Ref, ...]


def record(
    module: torch.nn.Module,
    paths: Mapping[int, str],
    arguments: Sequence[torch.Tensor],
    homes: Sequence[tuple[torch.Tensor, torch.Tensor, Any]],
    mode: "WritesNoted",
) -> Tape:
    """Run a module on fake arguments and write down what it does.

    Args:
        module: a function of flat tensors to flat tensors.
        paths: id of each submodule -> its slash-separated path.
        arguments: fake tensors of `mode`.
        homes: parameters and buffers as the module holds them now (fake tensors of `mode`), each with the
            tensor that it stands for, and with its name; without a name it goes by its values.
        mode: where all fake tensors live.

    Raises:
        NotTaped: what happened cannot be written down.
    """
    recorder = _Recorder(paths, mode)
    for slot, tensor in enumerate(arguments):
        recorder.meet(tensor, home=slot)
    for tensor, original, name in homes:
        number = recorder.meet(tensor, home=original if name is None else name)
        recorder.numbers[id(original)] = number
    with recorder.modules_noted(), _exporting(), mode, recorder:
        results = module.forward(*arguments)
    if recorder.stack != [recorder.root]:
        raise NotTaped("a module call did not end")
    recorder.root.end = len(recorder.calls)
    return Tape(
        calls=tuple(recorder.calls),
        values=tuple(recorder.values),
        root=recorder.root,
        results=tuple(recorder.reference(tensor) for tensor in results),
    )


class WritesNoted(Lending):
    """A fake mode that tells which storages a function writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        if torch.Tag.inplace_view in func.tags and func is not torch.ops.aten.detach_.default:
            raise NotTaped("a tensor that changes its shape")
        if schema.is_mutable:
            given = {**dict(zip([a.name for a in schema.arguments], args, strict=False)), **(kwargs or {})}
            for argument in schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._note(given.get(argument.name))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _note(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.written.add(value.untyped_storage()._cdata)
        elif isinstance(value, list | tuple):
            for item in value:
                self._note(item)


class _Recorder(TorchFunctionMode):
    def __init__(self, paths: Mapping[int, str], mode: WritesNoted) -> None:
        super().__init__()
        self.mode = mode
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self.numbers: dict[int, int] = {}
        self.root = Span(path="", start=0)
        self.stack = [self.root]
        self.paths = paths
        self.states: dict[State, State] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _STATE_SETTERS or getattr(func, "__name__", "") in _QUESTIONS:
            return func(*args, **kwargs)
        self.mode.written.clear()
        state = self._state()
        taken = map_leaves(self.leaf, args), map_leaves(self.leaf, kwargs)
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__" and not isinstance(result, torch.Tensor):
            return result
        if isinstance(result, tuple) and not isinstance(result, torch.Size):
            answer: Any = tuple(result)  # torch's named results
        else:
            answer = result
        self.calls.append(
            Call(
                function=func,
                args=taken[0],
                kwargs=taken[1],
                result=map_leaves(self.result_leaf, answer),
                path=self.stack[-1].path,
                source=_user_frame(),
                state=state,
                written=frozenset(self.mode.written),
            )
        )
        return result

    def _state(self) -> State:
        autocast = tuple(
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        )
        if torch.is_inference_mode_enabled():
            raise NotTaped("inference mode")
        state = State(torch.is_grad_enabled(), autocast)
        return self.states.setdefault(state, state)

    def meet(self, tensor: torch.Tensor, home: Any) -> int:
        if type(tensor) is not torch.Tensor and not isinstance(tensor, FakeTensor | torch.nn.Parameter):
            raise NotTaped(f"a {type(tensor).__name__}")
        self.numbers[id(tensor)] = len(self.values)
        storage = tensor.untyped_storage()._cdata
        self.values.append(Value(tensor=tensor, storage=storage, home=home))
        return len(self.values) - 1

    def reference(self, tensor: torch.Tensor) -> Ref:
        number = self.numbers.get(id(tensor))
        if number is not None:
            return Ref(number)
        if isinstance(tensor, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise NotTaped("a tensor from outside torch's Python interface")
        if tensor.is_meta:
            raise NotTaped("a meta tensor")
        return Ref(self.meet(tensor, home=tensor))

    def leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.reference(leaf)
        if not isinstance(leaf, _CONSTANTS):
            raise NotTaped(f"an argument of class {type(leaf).__name__}")
        return leaf

    def result_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return None
        number = self.numbers.get(id(leaf))
        return Ref(self.meet(leaf, home=None) if number is None else number)

    @contextlib.contextmanager
    def modules_noted(self) -> Iterator[None]:
        """Note module calls while this lasts."""

        def before(module: torch.nn.Module, _args: Any) -> None:
            path = self.paths.get(id(module))
            span = Span(path=self.stack[-1].path if path is None else path, start=len(self.calls))
            self.stack[-1].inner.append(span)
            self.stack.append(span)

        def after(_module: torch.nn.Module, _args: Any, _out: Any) -> None:
            self.stack.pop().end = len(self.calls)

        handles = register_module_forward_pre_hook(before), register_module_forward_hook(after)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


# Functions that answer with plain Python values; what the module does with an answer is on the tape.
_QUESTIONS = frozenset(
    "size dim numel nelement ndimension stride storage_offset element_size is_contiguous is_floating_point "
    "is_complex is_signed is_conj is_neg get_device type is_tensor is_grad_enabled _is_view untyped_storage "
    "is_inference __len__ __hash__ has_names".split()
)


def _user_frame() -> tuple[str, int] | None:
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(OUTSIDE_USER_CODE):
            return file, frame.f_lineno
        frame = frame.f_back
    return None


@contextlib.contextmanager
def _exporting() -> Iterator[None]:
    """Let `torch.compiler.is_exporting()` say yes, as it does during torch.export."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    found = {flag: getattr(torch.compiler, flag) for flag in flags if hasattr(torch.compiler, flag)}
    for flag in found:
        setattr(torch.compiler, flag, True)
    try:
        yield
    finally:
        for flag, value in found.items():
            setattr(torch.compiler, flag, value)
