"""Entries of the table of ops: an op's implementations, and the cases in which it is checked, timed and compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from treespec_kernels.comparison import assert_close, bits
from treespec_kernels.ops.shapes import Setting
from treespec_kernels.tuning.tuned import label_of

# (max error, rms error) relative to the RMS of the expected result, for results rounded once to the dtype.
BOUNDS = {torch.float32: (1e-4, 1e-5), torch.float16: (2e-2, 2e-3), torch.bfloat16: (1e-1, 1e-2)}

Results = dict[str, torch.Tensor]


class Inputs(NamedTuple):
    """Inputs of a case: the op's arguments by name, and host numbers for its `plan`."""

    arguments: dict[str, Any]
    host: dict[str, Any] = {}  # noqa: RUF012  never changed


def _config_alone(inputs: Inputs, config: Any) -> dict[str, Any]:
    return {} if config is None else {"config": config}


@dataclass(frozen=True, eq=False)
class Op:
    """One op."""

    name: str  # name of the module with its Triton kernels, without "_kernels"
    ref: Callable[..., Any]  # reference, called with a case's arguments
    run: Callable[..., Any]  # Triton implementation, called with a case's arguments and those of `plan`
    # Cases of an op in a setting; cases with a weight are timed
    cases: Callable[[Op, Setting], Iterable[Case]]
    configs: Callable[[Case], Sequence[Any]] = lambda case: [None]  # configurations of a case, default first
    # Additional arguments of `run`, created once per inputs and configuration
    plan: Callable[[Inputs, Any], dict[str, Any]] = _config_alone
    writes: tuple[str, ...] = ()  # arguments that the op modifies; they belong to the results
    # Dimension of the rows (or requests) by argument; empty if rows are not independent. A row's results must have the
    # same bits alone and among other rows
    rows: Mapping[str, int] = field(default_factory=dict)
    row_dim: int = 0  # dimension of the rows in the results
    # Selects inputs of some rows by ascending indices, if `rows` is not sufficient
    some_rows: Callable[[Inputs, list[int]], Inputs] | None = None
    # Selects the results that belong to single rows
    by_row: Callable[[Inputs, Results], Results] = lambda inputs, results: results
    exact: bool = False  # whether floating-point results must equal the reference's
    # Replaces the comparison with the reference's results
    compare: Callable[[Results, Results, Any], None] | None = None
    check: Callable[[Case, Any], None] | None = None  # replaces the entire check
    # Other implementations by name, as functions of the inputs
    baselines: Mapping[str, Callable[[Inputs], Any]] = field(default_factory=dict)

    def results_of(self, inputs: Inputs, returned: Any) -> Results:
        """Return the tensors returned or written by the op, by name."""
        results = dict(named_tensors(returned, "result"))
        for name in self.writes:
            results |= named_tensors(inputs.arguments[name], name)
        return results

    def rows_of(self, inputs: Inputs, index: list[int]) -> Inputs:
        """Return the inputs of some rows."""
        if self.some_rows is not None:
            return self.some_rows(inputs, index)
        arguments = dict(inputs.arguments)
        for name in self.rows.keys() & arguments:
            arguments[name] = mapped(partial(_select, index, self.rows[name]), arguments[name])
        return inputs._replace(arguments=arguments)


@dataclass(eq=False)
class Case:
    """One op on inputs of one size.

    Inputs are created by the first run or by `prepare`, and dropped by `release`.
    Running several copies of the inputs in turn keeps them out of the caches.
    """

    entry: Op
    setting: Setting
    key: dict[str, Any]  # problem for which a configuration of the op is tuned
    load: str  # label that distinguishes the cases of one key, such as "rows 32"
    make: Callable[[torch.Generator], Inputs]  # creates a copy of the inputs; equal seeds give equal inputs
    bytes: int = 0  # minimum memory traffic of a run; 0: the bytes of the arguments, known once inputs are created
    weight: float = 1.0  # weight of this load in the mean time that tuning minimises; 0 if the case is not timed
    num_rows: int = 1

    def __post_init__(self) -> None:
        self.inputs_of: list[Inputs] = []
        self._written: dict[str, Any] = {}
        self.expected: Results | None = None
        self._plans: dict[tuple[int, Any], dict[str, Any]] = {}

    @property
    def op(self) -> str:
        return self.entry.name

    @property
    def label(self) -> str:
        """The op and its problem."""
        return label_of(self.op, self.key)

    @property
    def device(self) -> torch.device:
        return self.setting.device

    def candidates(self) -> list[Any]:
        """Return the configurations to tune, default first; [None] for an op without configurations."""
        return list(self.entry.configs(self))

    @property
    def default(self) -> Any:
        return self.candidates()[0]

    @property
    def inputs(self) -> list[Inputs]:
        if not self.inputs_of:
            self.prepare()
        return self.inputs_of

    def prepare(self, copies: int = 1) -> None:
        """Create copies of the inputs until there are `copies`."""
        while len(self.inputs_of) < copies:
            place = torch.device("cpu") if self.device.type == "meta" else self.device
            self.inputs_of.append(self.make(torch.Generator(place).manual_seed(len(self.inputs_of))))
            if len(self.inputs_of) == 1:
                arguments = self.inputs_of[0].arguments
                self.bytes = self.bytes or num_bytes(*arguments.values())
                self._written = {name: mapped(torch.clone, arguments[name]) for name in self.entry.writes}

    def release(self) -> None:
        """Drop inputs and expected results."""
        self.inputs_of, self._written, self.expected, self._plans = [], {}, None, {}

    def run(self, config: Any, copy: int = 0, **options: Any) -> Results:
        """Run the op on a copy of the inputs, modifying its `writes`."""
        inputs = self.inputs[copy]
        if (copy, config) not in self._plans:
            self._plans[copy, config] = self.entry.plan(inputs, config)
        returned = self.entry.run(**inputs.arguments, **self._plans[copy, config], **options)
        return self.entry.results_of(inputs, returned)

    def check(self, config: Any) -> None:
        """Raise AssertionError if a configuration's results are wrong, or a row's result depends on other rows."""
        if self.entry.check is not None:
            self.entry.check(self, config)
            return
        if self.expected is None:
            inputs = self.fresh()
            self.expected = self.entry.results_of(inputs, self.entry.ref(**inputs.arguments))
        inputs = self.fresh()
        whole = self.results(inputs, config)
        if self.entry.compare is not None:
            self.entry.compare(whole, self.expected, config)
        else:
            for (name, result), expected in zip(whole.items(), self.expected.values(), strict=True):
                if self.entry.exact or not expected.is_floating_point():
                    equal(result, expected, name)
                else:
                    near(result, expected)
        for index, (batched, single) in enumerate(self._row_pairs(self.entry.by_row(inputs, whole), config)):
            differing = (bits(batched) != bits(single)).sum() if batched.shape == single.shape else batched.numel()
            assert not differing, f"rows depend on other rows: {differing} values differ in case {index}"

    def fresh(self) -> Inputs:
        """Recreate the first inputs in their original state."""
        first = self.inputs[0]
        written = {name: mapped(torch.clone, value) for name, value in self._written.items()}
        return first._replace(arguments=first.arguments | written)

    def results(self, inputs: Inputs, config: Any) -> Results:
        """Run the op on other inputs."""
        return self.entry.results_of(inputs, self.entry.run(**inputs.arguments, **self.entry.plan(inputs, config)))

    def _row_pairs(self, whole: Results, config: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of results that must be bit-identical: of rows among others, and of the same rows alone, in
        another order, among different rows, or in another tile."""
        entry, rows = self.entry, list(range(self.num_rows))
        if not entry.rows and entry.some_rows is None:
            return
        subsets, more = [rows[:1], rows[-1:], rows[::2]], rows + rows + rows[:1]
        if entry.some_rows is None:
            subsets += [rows[::-1], more]
        subsets = [subset for i, subset in enumerate(subsets) if subset not in (rows, *subsets[:i])]
        tiled = [config.with_tile(tile) for tile in getattr(config, "larger", ())]
        for index, variant in [*((subset, config) for subset in subsets), *((more, other) for other in tiled)]:
            inputs = entry.rows_of(self.fresh(), index)
            results = entry.by_row(inputs, self.results(inputs, variant))
            for batched, single in zip(whole.values(), results.values(), strict=True):
                yield _select(index, entry.row_dim, batched), single


def _select(index: list[int], dim: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(dim, torch.tensor(index, dtype=torch.int64, device=tensor.device))


def _members_of(value: Any) -> dict[Any, Any]:
    """Return the parts of a tuple or dataclass by name or index; empty for other values."""
    if isinstance(value, tuple):
        return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    is_parted = dataclasses.is_dataclass(value)
    return {member.name: getattr(value, member.name) for member in dataclasses.fields(value)} if is_parted else {}


def mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply a function to every tensor of a value: a tensor, or a tuple or dataclass of values."""
    if isinstance(value, torch.Tensor):
        return function(value)
    members = {name: mapped(function, member) for name, member in _members_of(value).items()}
    if type(value) is tuple:
        return tuple(members.values())
    return type(value)(**members) if members else value


def named_tensors(value: Any, name: str) -> dict[str, torch.Tensor]:
    """Return every tensor of a value, with a name like "stats.sums"."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    named = [named_tensors(member, f"{name}.{key}") for key, member in _members_of(value).items()]
    return {label: tensor for tensors in named for label, tensor in tensors.items()}


def num_bytes(*values: Any) -> int:
    """Return the bytes of all tensors of the values."""
    return sum(tensor.nbytes for value in values for tensor in named_tensors(value, "").values())


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise AssertionError if results differ by more than the rounding error of the dtype."""
    max_error, rms_error = BOUNDS[expected.dtype]
    assert_close(actual, expected, max_error=max_error, rms_error=rms_error)


def equal(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Raise AssertionError if any element differs; equal NaNs do not."""
    assert actual.shape == expected.shape, f"{name} has shape {list(actual.shape)}, expected {list(expected.shape)}"
    wrong = ((actual != expected) & (bits(actual) != bits(expected))).nonzero()
    if len(wrong):
        i = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{name} differs at {len(wrong)} places, first {i}: {actual[i].item()}, expected {expected[i].item()}"
        )
