"""What a workload is: one op on inputs of a given size, what it moves, what is right, and what else computes it."""

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

# (max error, rms error) relative to the RMS of what is right, for results that are rounded once to the dtype.
BOUNDS = {torch.float32: (1e-4, 1e-5), torch.float16: (2e-2, 2e-3), torch.bfloat16: (1e-1, 1e-2)}


@dataclass(frozen=True)
class Setting:
    """Which passes an op is measured in.

    Args:
        shape: the model's, with the dtype.
        device: where inputs lie.
        nodes: rows of the tree pass of one request, root included.
        context: committed positions of each request.
        requests: of a batch.
        groups: SSMs of equal shape that run as one; 1 for a target.
        layers: of the model.
        fixed_order_dot: in Triton's interpreter, whose dot is BLAS and not row-invariant.
    """

    shape: KernelShape
    device: torch.device
    nodes: int = 32
    context: int = 2048
    requests: int = 4
    groups: int = 1
    layers: int = 1
    fixed_order_dot: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.shape.dtype


class Workload(ABC, Generic[InputsT]):
    """One op on inputs of one size.

    Building one allocates nothing. Its inputs are made by the first run or by `prepare`, and dropped by `release`;
    several copies of them, run in turn, keep what is read out of the caches.

    Attributes:
        op: the op's name.
        key: what a tuned configuration of the op holds for.
        load: what distinguishes workloads of one key: "rows 32".
        weight: the share of this load in the time that tuning minimises, among the loads of one key.
        bytes, flops: what any implementation must move and compute, of one run.
    """

    op: ClassVar[str]
    key: dict[str, Any]
    load: str
    weight: float = 1.0
    bytes: int
    flops: int

    def __init__(self, device: torch.device, dtype: torch.dtype, fixed_order_dot: bool = False):
        self.device, self.dtype, self._fixed_order_dot = device, dtype, fixed_order_dot
        self._inputs: list[InputsT] = []
        self._expected: Tensors | None = None

    @abstractmethod
    def make(self, generator: torch.Generator) -> InputsT:
        """One copy of the inputs. A generator of equal seed gives equal inputs."""

    @abstractmethod
    def run(self, config: Any, copy: int = 0) -> Tensors:
        """The op on a copy of the inputs. It may change them as the op does: see `reset`."""

    @abstractmethod
    def expected(self) -> Tensors:
        """What is right for copy 0, by the op's reference."""

    @abstractmethod
    def compare(self, actual: Tensors, expected: Tensors, config: Any) -> None:
        """Raises AssertionError where results are not right."""

    def shipped(self) -> list[Any]:
        """Configurations as the op names them, its default first; [None] for an op that has none."""
        return [None]

    def alone(self, config: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Rows of copy 0 in company, and by themselves or elsewhere: pairs that must be equal bit by bit."""
        return iter(())

    def baselines(self) -> dict[str, Callable[[int], Any]]:
        """What else computes this, by name: functions of the copy to run on."""
        return {}

    def reset(self, inputs: InputsT) -> None:
        """Puts a copy back to where it was made, for an op that changes its inputs."""

    def candidates(self) -> list[Any]:
        """The configurations to choose from, the default first."""
        configs = self.shipped()
        if self._fixed_order_dot:
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
        """Makes copies of the inputs up to a number."""
        while len(self._inputs) < copies:
            generator = torch.Generator(self.device).manual_seed(len(self._inputs))
            self._inputs.append(self.make(generator))

    def release(self) -> None:
        """Drops inputs and expectations."""
        self._inputs, self._expected = [], None

    def check(self, config: Any) -> None:
        """Raises AssertionError where a configuration's results are not right, or depend on the rows beside a row."""
        if self._expected is None:
            self.reset(self.inputs[0])
            self._expected = self.expected()
        self.reset(self.inputs[0])
        self.compare(self.run(config), self._expected, config)
        self.reset(self.inputs[0])
        for index, (company, alone) in enumerate(self.alone(config)):
            differing = (_bits(company) != _bits(alone)).sum() if company.shape == alone.shape else company.numel()
            assert not differing, f"rows depend on the rows beside them: {differing} values differ in case {index}"

    def near(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Raises AssertionError where results differ by more than their rounding to the dtype explains."""
        max_error, rms_error = BOUNDS[self.dtype]
        assert_close(actual, expected, max_error=max_error, rms_error=rms_error)

    def random(self, generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers in the dtype; never zeros, on which a GPU draws less power and runs faster."""
        values = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
        return values.mul_(scale).to(self.dtype)


def equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raises AssertionError where any element differs."""
    assert actual.shape == expected.shape, f"{what} has shape {list(actual.shape)}, expected {list(expected.shape)}"
    wrong = (actual != expected).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what} differs at {len(wrong)} places, first {at}: {actual[at].item()}, expected {expected[at].item()}"
        )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of one dtype are equal bit by bit: a NaN equals itself, and zeros have signs."""
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, so that NaN equals itself and zeros have signs."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
