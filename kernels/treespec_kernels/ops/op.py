"""Entries of the table of ops: what an op computes, and the cases in which it is checked, timed and compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from treespec_kernels.ops.shapes import Setting
from treespec_kernels.tuning.testing import assert_close, bits

# (max error, rms error) relative to the RMS of the expected result, for results that are rounded once to the dtype.
BOUNDS = {torch.float32: (1e-4, 1e-5), torch.float16: (2e-2, 2e-3), torch.bfloat16: (1e-1, 1e-2)}

Results = dict[str, torch.Tensor]


class Inputs(NamedTuple):
    """Inputs of a case: the op's arguments by name, and numbers on the host that its `plan` needs."""

    arguments: dict[str, Any]
    host: dict[str, Any] = {}  # noqa: RUF012  never changed


def _config_alone(inputs: Inputs, config: Any) -> dict[str, Any]:
    return {} if config is None else {"config": config}


@dataclass(frozen=True, eq=False)
class Op:
    """One op.

    Attributes:
        name: name of the module with its Triton kernels, without "_kernels".
        ref: reference, called with a case's arguments.
        run: Triton implementation, called with a case's arguments and those of `plan`.
        cases: the cases of a setting, of which those with a weight are timed.
        configs: configurations of a case, its default first.
        plan: further arguments of `run`, made once for inputs and a configuration.
        writes: arguments that the op changes; they belong to the results.
        rows: dimension of the rows (or requests) by argument. Results of some rows must be bit-identical to theirs
            among others. Empty if rows are not independent.
        row_dim: dimension of the rows in the results.
        some_rows: inputs of some rows, by ascending indices, if that takes more than `rows`.
        by_row: the results of which each belongs to one row.
        exact: whether floating-point results must equal the reference's.
        compare: replaces the comparison with the reference's results.
        check: replaces the whole check.
        baselines: other implementations by name, as functions of inputs.
    """

    name: str
    ref: Callable[..., Any]
    run: Callable[..., Any]
    cases: Callable[[Setting], list[Case]]
    configs: Callable[[Case], Sequence[Any]] = lambda case: [None]
    plan: Callable[[Inputs, Any], dict[str, Any]] = _config_alone
    writes: tuple[str, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)
    row_dim: int = 0
    some_rows: Callable[[Inputs, list[int]], Inputs] | None = None
    by_row: Callable[[Inputs, Results], Results] = lambda inputs, results: results
    exact: bool = False
    compare: Callable[[Results, Results, Any], None] | None = None
    check: Callable[[Case, Any], None] | None = None
    baselines: Mapping[str, Callable[[Inputs], Any]] = field(default_factory=dict)

    def results_of(self, inputs: Inputs, returned: Any) -> Results:
        """Return the tensors that the op returned or wrote, by name."""
        results = dict(named_tensors(returned, "result"))
        for name in self.writes:
            results |= named_tensors(inputs.arguments[name], name)
        return results

    def rows_of(self, inputs: Inputs, index: list[int]) -> Inputs:
        """Return the inputs of some rows."""
        if self.some_rows is not None:
            return self.some_rows(inputs, index)

        def chosen(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda tensor: tensor.index_select(dim, torch.tensor(index, dtype=torch.int64, device=tensor.device))

        arguments = {
            name: mapped(chosen(self.rows[name]), value) if name in self.rows else value
            for name, value in inputs.arguments.items()
        }
        return inputs._replace(arguments=arguments)


@dataclass(eq=False)
class Case:
    """One op on inputs of one size.

    Nothing is allocated at first: inputs are created by the first run or by `prepare`, and dropped by `release`.
    Running several copies of the inputs in turn keeps them out of the caches. A case is pickled without its inputs.

    Attributes:
        entry: the op.
        key: the problem for which a configuration of the op is tuned.
        load: label that distinguishes the cases of one key, such as "rows 32".
        make: creates one copy of the inputs; equal seeds give equal inputs.
        bytes, flops: minimum memory traffic and number of operations of one run.
        weight: weight of this load in the mean time that tuning minimises; 0 if the case is not timed.
        num_rows: number of rows of the inputs.
    """

    entry: Op
    setting: Setting
    key: dict[str, Any]
    load: str
    make: Callable[[torch.Generator], Inputs]
    bytes: int = 0
    flops: int = 0
    weight: float = 1.0
    num_rows: int = 1
    index: int = 0  # among the cases of its op and setting

    def __post_init__(self) -> None:
        self.inputs_of: list[Inputs] = []
        self._written: dict[str, Any] = {}
        self.expected: Results | None = None
        self._plans: dict[tuple[int, Any], dict[str, Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        from treespec_kernels.ops import case_at

        return case_at, (self.entry.name, self.setting, self.index)

    @property
    def op(self) -> str:
        return self.entry.name

    @property
    def device(self) -> torch.device:
        return self.setting.device

    def candidates(self) -> list[Any]:
        """Return the configurations to tune over, the default first; [None] for an op without configurations."""
        configs = list(self.entry.configs(self))
        if self.setting.fixed_order_dot:
            has_dot = [hasattr(config, "fixed_order_dot") for config in configs]
            configs = [
                dataclasses.replace(c, fixed_order_dot=True) if d else c for c, d in zip(configs, has_dot, strict=True)
            ]
        return configs

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
                self._written = {name: mapped(torch.clone, arguments[name]) for name in self.entry.writes}

    def release(self) -> None:
        """Drop inputs and expected results."""
        self.inputs_of, self._written, self.expected, self._plans = [], {}, None, {}

    def run(self, config: Any, copy: int = 0, **options: Any) -> Results:
        """Run the op on a copy of the inputs, whose `writes` it changes."""
        inputs = self.inputs[copy]
        if (copy, config) not in self._plans:
            self._plans[copy, config] = self.entry.plan(inputs, config)
        returned = self.entry.run(**inputs.arguments, **self._plans[copy, config], **options)
        return self.entry.results_of(inputs, returned)

    def baselines(self) -> dict[str, Callable[[int], Any]]:
        """Return other implementations by name, as functions of the index of the copy to run on."""
        return {
            name: lambda copy, function=function: function(self.inputs[copy])
            for name, function in self.entry.baselines.items()
        }

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
            for (name, own), expected in zip(whole.items(), self.expected.values(), strict=True):
                if self.entry.exact or not expected.is_floating_point():
                    equal(own, expected, name)
                else:
                    near(own, expected)
        for index, (company, alone) in enumerate(self._row_pairs(self.entry.by_row(inputs, whole), config)):
            differing = (bits(company) != bits(alone)).sum() if company.shape == alone.shape else company.numel()
            assert not differing, f"rows depend on other rows: {differing} values differ in case {index}"

    def fresh(self) -> Inputs:
        """Return the first inputs as they were made."""
        first = self.inputs[0]
        written = {name: mapped(torch.clone, value) for name, value in self._written.items()}
        return first._replace(arguments=first.arguments | written)

    def results(self, inputs: Inputs, config: Any) -> Results:
        """Run the op on other inputs."""
        return self.entry.results_of(inputs, self.entry.run(**inputs.arguments, **self.entry.plan(inputs, config)))

    def _row_pairs(self, whole: Results, config: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of results that must be bit-identical: of rows among the others, and of the same rows alone, in
        another order, beside others, or in another tile."""
        entry, rows = self.entry, list(range(self.num_rows))
        if not entry.rows and entry.some_rows is None:
            return
        subsets, more = [rows[:1], rows[-1:], rows[::2]], rows + rows + rows[:1]
        if entry.some_rows is None:
            subsets += [rows[::-1], more]
        subsets = [subset for i, subset in enumerate(subsets) if subset not in (rows, *subsets[:i])]
        tiled = [config.with_tile(tile) for tile in getattr(config, "larger", ())]
        for index, own in [*((subset, config) for subset in subsets), *((more, other) for other in tiled)]:
            some = entry.rows_of(self.fresh(), index)
            results = entry.by_row(some, self.results(some, own))
            for company, alone in zip(whole.values(), results.values(), strict=True):
                yield (
                    company.index_select(entry.row_dim, torch.tensor(index, dtype=torch.int64, device=company.device)),
                    alone,
                )


def mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply a function to every tensor of a value: a tensor, or a tuple or dataclass of values."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        parts = [mapped(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {part.name: mapped(function, getattr(value, part.name)) for part in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value


def named_tensors(value: Any, name: str) -> dict[str, torch.Tensor]:
    """Return every tensor of a value, with a name like "stats.sums"."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, tuple):
        names = getattr(value, "_fields", range(len(value)))
        parts = dict(zip(names, value, strict=True))
    elif dataclasses.is_dataclass(value):
        parts = {part.name: getattr(value, part.name) for part in dataclasses.fields(value)}
    else:
        return {}
    return {
        label: tensor for key, part in parts.items() for label, tensor in named_tensors(part, f"{name}.{key}").items()
    }


def num_bytes(*values: Any) -> int:
    """Return the bytes of all tensors of the values."""
    return sum(tensor.nbytes for value in values for tensor in named_tensors(value, "").values())


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise AssertionError if results differ by more than the rounding error of the dtype."""
    max_error, rms_error = BOUNDS[expected.dtype]
    assert_close(actual, expected, max_error=max_error, rms_error=rms_error)


def equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raise AssertionError if any element differs; equal NaNs do not."""
    assert actual.shape == expected.shape, f"{what} has shape {list(actual.shape)}, expected {list(expected.shape)}"
    wrong = ((actual != expected) & (bits(actual) != bits(expected))).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what} differs at {len(wrong)} places, first {at}: {actual[at].item()}, expected {expected[at].item()}"
        )
