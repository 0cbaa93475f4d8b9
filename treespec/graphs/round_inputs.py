"""Inputs of a captured round: requests as data in buffers with fixed addresses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.graphs.sampling_state import RequestTransforms
from treespec.planning.learning import RoundShapes
from treespec.tree import TokenTree
from treespec_kernels.tree.device_trees import ProposedTrees
from treespec_kernels.tree.growth_limits import SEEDS

_NO_TRANSFORMS = (0.0, 1.0, -np.inf, 1.0, 0.0, 0.0)  # a row of `TransformInputs.numbers`
MAX_ENDS = 8  # maximum number of end tokens of a request


@dataclass(frozen=True)
class RoundLimits:
    """Limits of the captured rounds of one batch size.

    Args:
        max_depth: D, the maximum number of draft levels.
        nodes: rows per request of the target pass, by graph, ascending; the first is 1 (plain decoding).
        max_pages: maximum pages of one request.
        max_context: maximum committed positions of a request.
    """

    max_depth: int
    nodes: tuple[int, ...]
    max_pages: int
    max_context: int

    @property
    def width(self) -> int:
        """Maximum number of tokens emitted by a round: a path of D nodes below the root, and the bonus token."""
        return self.max_depth + 1

    @property
    def shapes(self) -> RoundShapes:
        """Tree shapes that the planner may choose."""
        return RoundShapes(self.max_depth, self.nodes)


class RoundInput(NamedTuple):
    """One request of a round.

    Attributes:
        context_len: L, the number of committed positions of the target.
        new_tokens: tokens that the SSMs have not read, the root last; at most D + 1.
        pages: int64 [num_pages].
        end_tokens: tokens below which nothing is drafted.
        temperature: temperature of the target's choices; 0 = argmax.
        draft_temperature: temperature of the SSMs' proposals.
        rng_seed, sample: identify the request's noise.
        weights: mixture weight of each SSM, 0 if it does not draft; sum 1. Empty if no SSM may draft.
        proposed: proposals of sources without a model, as a tree over the root; None if there are none.
        ratios: float32 [len(proposed)], evidence ratios of the nodes of `proposed`.
        max_depth, max_nodes: limits of the tree; 0 and 1 for plain decoding.
        least_value: minimum value of a node.
        transforms: logit transforms of the target's choices; None for temperature alone.
    """

    context_len: int
    new_tokens: Sequence[int]
    pages: np.ndarray
    end_tokens: Sequence[int]
    temperature: float
    draft_temperature: float
    rng_seed: int
    sample: int
    weights: np.ndarray
    proposed: TokenTree | None
    ratios: np.ndarray
    max_depth: int
    max_nodes: int
    least_value: float
    transforms: RequestTransforms | None = None


class _Buffer:
    """Device memory of one dtype, divided into named fields and filled by one copy from pinned host memory."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device):
        sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        total = sum(map(_padded, sizes.values()))
        self._host = torch.zeros(total, dtype=dtype, pin_memory=device.type == "cuda", device="cpu")
        self._device = torch.zeros(total, dtype=dtype, device=device)
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        first = 0
        for name, shape in shapes.items():
            part = slice(first, first + sizes[name])
            self.host[name] = self._host[part].view(shape).numpy()
            self.device[name] = self._device[part].view(shape)
            first += _padded(sizes[name])

    def upload(self) -> None:
        self._device.copy_(self._host, non_blocking=True)


def _padded(size: int) -> int:
    """Return the number of elements of a field, rounded up to a multiple of 16.

    Every field is then aligned to 16 bytes; Triton would recompile kernels for another alignment.
    """
    return -(-size // 16) * 16


class DeviceInputs:
    """Inputs of captured passes as named device buffers with fixed addresses.

    Args:
        num_requests: B, the maximum number of requests.
        limits: limits of the passes.
        fields: shapes of the fields of each dtype, by name.
        device: device of the buffers.

    Attributes:
        host: the fields as numpy arrays in pinned memory, which `upload` copies to the device.
    """

    def __init__(
        self,
        num_requests: int,
        limits: RoundLimits,
        fields: Mapping[torch.dtype, dict[str, tuple[int, ...]]],
        device: torch.device,
    ):
        self.num_requests, self.limits, self.device = num_requests, limits, device
        self._buffers = [_Buffer(shapes, dtype, device) for dtype, shapes in fields.items()]
        self._views = {name: view for buffer in self._buffers for name, view in buffer.device.items()}
        self.host = {name: values for buffer in self._buffers for name, values in buffer.host.items()}

    def __getitem__(self, name: str) -> Tensor:
        """Return a field on the device."""
        return self._views[name]

    def upload(self) -> None:
        """Copy all fields to the device."""
        for buffer in self._buffers:
            buffer.upload()


class RoundInputs(DeviceInputs):
    """The requests of a round as device buffers.

    Args:
        num_requests: B, the maximum number of requests.
        num_ssms: number of SSMs.
        limits: limits of the round.
        device: device of the buffers.
    """

    def __init__(self, num_requests: int, num_ssms: int, limits: RoundLimits, device: torch.device):
        b = num_requests
        fields: dict[torch.dtype, dict[str, tuple[int, ...]]] = {
            torch.int32: dict.fromkeys(("context_lens", "new_lens", "roots", "max_depths", "max_nodes"), (b,))
            | {
                "new_tokens": (b, limits.width),
                "end_tokens": (b, MAX_ENDS),
                "pages": (b, limits.max_pages),
                "proposed_tokens": (b, SEEDS),
                "proposed_parents": (b, SEEDS),
                "transform_options": (b, 3),
                "counted_tokens": (b, limits.width),
            },
            torch.float32: dict.fromkeys(("temperatures", "draft_temperatures", "least_values"), (b,))
            | {
                "weights": (b, num_ssms),
                "proposed_probs": (b, SEEDS),
                "proposed_ratios": (b, SEEDS),
                "transform_numbers": (b, 6),
            },
            torch.int64: {"rng_seeds": (b,), "samples": (b,)},
        }
        super().__init__(b, limits, fields, device)
        self.num_ssms = num_ssms

    def noise(self, temperatures: Tensor, by_row: Callable[[Tensor], Tensor], positions: Tensor) -> dict[str, Any]:
        """Return the noise arguments of `row_topk_triton`, one entry per row.

        Args:
            temperatures: float32 [B].
            by_row: expands a field from requests to rows.
            positions: int64 [rows], positions of the sampled tokens.
        """
        own = {"seeds": by_row(self["rng_seeds"]), "samples": by_row(self["samples"])}
        return own | {"temperatures": by_row(temperatures), "positions": positions}

    @property
    def proposed(self) -> ProposedTrees:
        """The proposals of sources without a model."""
        return ProposedTrees(*(self[f"proposed_{name}"] for name in ProposedTrees._fields))

    def fill(self, requests: Sequence[RoundInput]) -> None:
        """Upload a batch; remaining places are idle."""
        host = self.host
        for values in host.values():
            values.fill(0)
        for name in ("roots", "end_tokens", "proposed_tokens", "proposed_parents", "counted_tokens"):
            host[name].fill(-1)
        host["transform_options"][:, 0] = -1
        host["transform_numbers"][:] = _NO_TRANSFORMS
        host["weights"].fill(np.nan)  # a NaN weight disables the SSM
        for i, request in enumerate(requests):
            new = request.new_tokens
            assert 1 <= len(new) <= self.limits.width, "the SSMs must read all but D + 1 tokens before the round"
            assert request.context_len <= self.limits.max_context, "the request's context exceeds the round's"
            scalars = {
                "context_lens": request.context_len,
                "new_lens": len(new),
                "roots": new[-1],
                "max_depths": request.max_depth,
                "max_nodes": request.max_nodes,
                "temperatures": request.temperature,
                "draft_temperatures": request.draft_temperature,
                "least_values": request.least_value,
                "rng_seeds": np.uint64(request.rng_seed).astype(np.int64),
                "samples": request.sample,
            }
            for name, value in scalars.items():
                host[name][i] = value
            for name, row in (
                ("new_tokens", new),
                ("end_tokens", request.end_tokens),
                ("pages", request.pages),
                ("weights", np.where(request.weights > 0, request.weights, np.nan)),
            ):
                host[name][i, : len(row)] = row
            if request.proposed is not None:
                self._fill_proposed(i, request.proposed, request.ratios)
            self._fill_transforms(i, request)
        self.upload()

    def _fill_transforms(self, i: int, request: RoundInput) -> None:
        """Write the transforms of request `i` into the host buffers."""
        self.host["transform_numbers"][i, 0] = request.temperature
        if (transforms := request.transforms) is not None:
            self.host["transform_numbers"][i] = transforms.row.numbers
            self.host["transform_options"][i] = (transforms.slot, *transforms.row.options)
            self.host["counted_tokens"][i, : len(transforms.new_tokens)] = transforms.new_tokens

    def _fill_proposed(self, i: int, tree: TokenTree, ratios: np.ndarray) -> None:
        """Write the nodes of a proposed tree, without its root, into the host buffers of request `i`."""
        assert len(tree) <= 1 + SEEDS, "the proposed tree exceeds SEEDS nodes"
        of_nodes = {"tokens": tree.tokens, "parents": tree.parents - 1, "probs": tree.probs, "ratios": ratios}
        for name, values in of_nodes.items():
            self.host[f"proposed_{name}"][i, : len(tree) - 1] = values[1:]
