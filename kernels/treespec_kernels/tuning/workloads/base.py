"""Base class of workloads: one op on inputs of one size, with its reference, memory traffic and baselines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch

from treespec_kernels.aot.kernel_spec import KernelShape
from treespec_kernels.tuning.testing import assert_close

Tensors = tuple[torch.Tensor, ...]
InputsT = TypeVar("InputsT")

# (max error, rms error) relative to the RMS of the expected result, for results that are rounded once to the dtype.
BOUNDS = {torch.float32: (1e-4, 1e-5), torch.float16: (2e-2, 2e-3), torch.bfloat16: (1e-1, 1e-2)}


@dataclass(frozen=True)
class Setting:
    """Model and passes for which ops are measured.

    Args:
        shape: shape and dtype of the model.
        device: device of the inputs.
        nodes: number of rows of one request's tree pass, root included.
        context: number of committed positions of each request.
        requests: number of requests of a batch.
        prefill: number of rows of a prefill pass; 0 to leave it out.
        groups: number of SSMs of equal shape that run stacked; 1 for a target.
        layers: number of layers of the model.
        fixed_order_dot: set in Triton's interpreter, whose dot calls BLAS and is not row-invariant.
    """

    shape: KernelShape
    device: torch.device
    nodes: int = 32
    context: int = 2048
    requests: int = 4
    prefill: int = 0
    groups: int = 1
    layers: int = 1
    fixed_order_dot: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.shape.dtype

    @property
    def stack(self) -> tuple[int, ...]:
        """Leading dimension of stacked weights and rows; empty for a single model."""
        return (self.groups,) if self.groups > 1 else ()


class Workload(ABC, Generic[InputsT]):
    """One op on inputs of one size.

    The constructor allocates nothing: inputs are created by the first run or by `prepare`, and dropped by `release`.
    Running several copies of the inputs in turn keeps them out of the caches.

    Attributes:
        op: name of the op.
        key: the problem for which a configuration of the op is tuned.
        load: label that distinguishes the workloads of one key, such as "rows 32".
        weight: weight of this load in the mean time that tuning minimises.
        bytes, flops: minimum memory traffic and number of operations of one run.
        exact: names of the results if they must equal the expected ones; empty if they only have to be close.
    """

    op: ClassVar[str]
    exact: ClassVar[tuple[str, ...]] = ()
    key: dict[str, Any]
    load: str
    weight: float = 1.0
    bytes: int
    flops: int = 0

    def __init__(self, setting: Setting):
        self.setting, self.device, self.dtype = setting, setting.device, setting.dtype
        self._inputs: list[InputsT] = []
        self._expected: Tensors | None = None

    @abstractmethod
    def make(self, generator: torch.Generator) -> InputsT:
        """Create one copy of the inputs; equal seeds give equal inputs."""

    @abstractmethod
    def run(self, config: Any, copy: int = 0) -> Tensors:
        """Run the op on a copy of the inputs, which it may modify (see `reset`)."""

    @abstractmethod
    def expected(self) -> Tensors:
        """Return the expected result for copy 0, from the op's reference."""

    def compare(self, actual: Tensors, expected: Tensors, config: Any) -> None:
        """Raise AssertionError if results are wrong."""
        for index, (own, right) in enumerate(zip(actual, expected, strict=True)):
            if self.exact:
                equal(own, right, self.exact[index])
            else:
                self.near(own, right)

    def shipped(self) -> list[Any]:
        """Return the op's configurations, its default first; [None] for an op without configurations."""
        return [None]

    def invariance_pairs(self, config: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of results that must be bit-identical.

        The first of each pair are rows of copy 0 among the others, the second the same rows alone or at another index.
        """
        return iter(())

    def baselines(self) -> dict[str, Callable[[int], Any]]:
        """Return other implementations by name, as functions of the index of the copy to run on."""
        return {}

    def reset(self, inputs: InputsT) -> None:
        """Restore a copy of the inputs, if the op modifies them."""

    def candidates(self) -> list[Any]:
        """Return the configurations to tune over, the default first."""
        configs = self.shipped()
        if self.setting.fixed_order_dot:
            configs = [c if c is None else replace(c, fixed_order_dot=True) for c in configs]
        return configs

    @property
    def default(self) -> Any:
        return self.candidates()[0]

    @property
    def inputs(self) -> Sequence[InputsT]:
        if not self._inputs:
            self.prepare()
        return self._inputs

    def prepare(self, copies: int = 1) -> None:
        """Create copies of the inputs until there are `copies`."""
        while len(self._inputs) < copies:
            generator = torch.Generator(self.device).manual_seed(len(self._inputs))
            self._inputs.append(self.make(generator))

    def release(self) -> None:
        """Drop inputs and expected results."""
        self._inputs, self._expected = [], None

    def check(self, config: Any) -> None:
        """Raise AssertionError if a configuration's results are wrong, or a row's result depends on other rows."""
        if self._expected is None:
            self.reset(self.inputs[0])
            self._expected = self.expected()
        self.reset(self.inputs[0])
        self.compare(self.run(config), self._expected, config)
        self.reset(self.inputs[0])
        for index, (company, alone) in enumerate(self.invariance_pairs(config)):
            differing = (_bits(company) != _bits(alone)).sum() if company.shape == alone.shape else company.numel()
            assert not differing, f"rows depend on other rows: {differing} values differ in case {index}"

    def key_of(self, **sizes: int) -> dict[str, Any]:
        """Return the key of a problem with these sizes and the setting's dtype."""
        return {"dtype": str(self.dtype).removeprefix("torch."), **sizes}

    def near(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise AssertionError if results differ by more than the rounding error of the dtype."""
        max_error, rms_error = BOUNDS[self.dtype]
        assert_close(actual, expected, max_error=max_error, rms_error=rms_error)

    def random(self, generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Return normally distributed numbers in the dtype.

        Zeros would be unrepresentative, because they draw less power and run faster on a GPU.
        """
        values = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
        return values.mul_(scale).to(self.dtype)


def equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raise AssertionError if any element differs."""
    assert actual.shape == expected.shape, f"{what} has shape {list(actual.shape)}, expected {list(expected.shape)}"
    wrong = (actual != expected).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what} differs at {len(wrong)} places, first {at}: {actual[at].item()}, expected {expected[at].item()}"
        )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors of one dtype are bit-identical: equal NaNs are, +0 and -0 are not."""
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
