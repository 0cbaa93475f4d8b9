"""Inputs of a captured round: requests as data in buffers at fixed addresses."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.drafters.evidence import SeedEvidence
from treespec.graphs.sampling_state import RequestTransforms
from treespec.models.adapter_slots import NO_ADAPTER
from treespec.planning.learning import RoundShapes
from treespec.tree import TokenTree
from treespec_kernels.sampling.coupled_choice import RowNoise
from treespec_kernels.tree.device_trees import ProposedTrees
from treespec_kernels.tree.growth_limits import SEEDS

_NO_TRANSFORMS = (0.0, 1.0, -np.inf, 1.0, 0.0, 0.0)  # a row of `TransformInputs.numbers`
MAX_ENDS = 8  # maximum number of end tokens of a request


@dataclass(frozen=True)
class RoundLimits(RoundShapes):
    """Limits of the captured rounds of one batch size."""

    max_pages: int  # maximum pages of a request
    max_context: int  # maximum committed positions of a request

    @property
    def width(self) -> int:
        """Maximum number of tokens emitted in a round: a path of D nodes below the root, and the bonus token."""
        return self.max_depth + 1


class RoundInput(NamedTuple):
    """One request of a round."""

    context_len: int  # L, the number of committed positions of the target
    new_tokens: Sequence[int]  # tokens that the SSMs have not read, the root last; at most D + 1
    pages: np.ndarray  # int64 [num_pages]
    end_tokens: Sequence[int]  # tokens that nothing is drafted after
    temperature: float  # temperature of the target; 0 = argmax
    draft_temperature: float  # temperature of the SSMs
    rng_seed: int  # noise seed of the request
    sample: int
    weights: np.ndarray  # mixture weights of the SSMs, NaN if inactive; sum 1. Empty if no SSM may draft
    max_depth: int  # maximum depth of the tree; 0 for plain decoding
    max_nodes: int  # maximum nodes of the tree; 1 for plain decoding
    least_value: float  # minimum value of a node
    max_len: int  # maximum number of positions of the request
    adapter: int = NO_ADAPTER  # slot of the request's adapter
    state_slot: int = 0  # slot of the request's recurrent state, if the model has one
    replayed: int = 0  # number of committed tokens after this state
    transforms: RequestTransforms | None = None  # logit transforms of the target; None for temperature alone


_ALIGNMENT = 64  # alignment of every field, in bytes; Triton would recompile kernels for less than 16


class DeviceInputs:
    """Inputs of captured passes: named fields at fixed device addresses, filled by one copy from pinned host memory."""

    def __init__(
        self,
        num_requests: int,  # B, the maximum number of requests
        limits: RoundLimits,
        fields: Mapping[torch.dtype, Mapping[str, tuple[int, ...]]],  # field shapes by dtype and name
        device: torch.device,
        idle: Mapping[str, Any],  # values of idle fields other than 0, by name
    ):
        self.num_requests, self.limits, self.device = num_requests, limits, device
        layout: dict[str, tuple[int, torch.dtype, tuple[int, ...]]] = {}
        self._places: dict[str, tuple[int, int]] = {}  # first byte and end of each field
        size = 0
        for dtype, shapes in fields.items():
            for name, shape in shapes.items():
                first, layout[name] = size, (size, dtype, shape)
                size += -(-int(np.prod(shape)) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
                self._places[name] = first, size
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda", device="cpu")
        self._host, self._device = host, torch.zeros(size, dtype=torch.uint8, device=device)
        # Numpy views of the fields in pinned memory, which `upload` copies to the device.
        self.host = {name: _field(host, *location).numpy() for name, location in layout.items()}
        self._fields = {name: _field(self._device, *location) for name, location in layout.items()}
        for name, values in idle.items():
            self.host[name][:] = values
        self._bytes = host.numpy()
        self._idle = self._bytes.copy()

    def __getitem__(self, name: str) -> Tensor:
        return self._fields[name]

    def clear(self) -> None:
        self._bytes[:] = self._idle

    def upload(self, first: str | None = None, last: str | None = None) -> None:
        """Copy the fields from `first` to `last`, in definition order, to the device; None for all."""
        if first is None and last is None:  # the device waits for this copy, so avoid slicing
            self._device.copy_(self._host, non_blocking=True)
            return
        span = slice(self._places[first][0] if first else None, self._places[last][1] if last else None)
        self._device[span].copy_(self._host[span], non_blocking=True)


def _field(memory: Tensor, first: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor view of the bytes from `first` on."""
    return memory[first : first + int(np.prod(shape)) * dtype.itemsize].view(dtype).view(shape)


class RoundInputs(DeviceInputs):
    """Device buffers that hold the requests of a round."""

    def __init__(self, num_requests: int, num_ssms: int, limits: RoundLimits, device: torch.device):
        b = num_requests
        names = "context_lens new_lens roots max_depths max_nodes max_lens adapters state_slots replayed"
        ints = dict.fromkeys(names.split(), (b,))
        floats = dict.fromkeys(("temperatures", "draft_temperatures", "least_values"), (b,))
        seeds = b, SEEDS
        fields: dict[torch.dtype, dict[str, tuple[int, ...]]] = {
            torch.int32: {
                **ints,
                "new_tokens": (b, limits.width),
                "end_tokens": (b, MAX_ENDS),
                "pages": (b, limits.max_pages),
                "transform_options": (b, 3),
                "counted_tokens": (b, limits.width),
                "proposed_tokens": seeds,  # `propose` uploads the fields from here to `proposed_ratios`
                "proposed_parents": seeds,
            },
            torch.float32: {
                "proposed_probs": seeds,
                "proposed_ratios": seeds,
                **floats,
                "weights": (b, num_ssms),
                "transform_numbers": (b, 6),
            },
            torch.int64: {"rng_seeds": (b,), "samples": (b,)},
        }
        without = "roots", "end_tokens", "proposed_tokens", "proposed_parents", "counted_tokens"
        idle: dict[str, Any] = dict.fromkeys(without, -1) | {
            "transform_options": [-1, 0, 0],
            "transform_numbers": _NO_TRANSFORMS,
            "adapters": NO_ADAPTER,
            "weights": np.nan,  # disables the SSM
        }
        super().__init__(b, limits, fields, device, idle)
        self.num_ssms = num_ssms
        self._rng_seeds = self.host["rng_seeds"].view(np.uint64)

    def noise(self, temperatures: Tensor, by_row: Callable[[Tensor], Tensor], positions: Tensor) -> RowNoise:
        """Return the noise for `row_topk_triton`, one entry per row; `by_row` expands a field from requests to rows.

        Positions are those of the sampled tokens, int64 [rows].
        """
        return RowNoise(by_row(temperatures), by_row(self["rng_seeds"]), by_row(self["samples"]), positions)

    @property
    def proposed(self) -> ProposedTrees:
        return ProposedTrees(*(self[f"proposed_{name}"] for name in ProposedTrees._fields))

    def fill(self, requests: Sequence[RoundInput]) -> None:
        """Upload a batch; unused rows are idle."""
        self.clear()
        host = self.host
        for i, request in enumerate(requests):
            new_tokens = request.new_tokens
            assert 1 <= len(new_tokens) <= self.limits.width, "the SSMs must read all but D + 1 tokens before the round"
            assert request.context_len <= self.limits.max_context, "the request's context exceeds the round's"
            assert 0 <= request.replayed <= self.limits.width, "the request's state does not lead to its context"
            host["context_lens"][i] = request.context_len
            host["new_lens"][i] = len(new_tokens)
            host["roots"][i] = new_tokens[-1]
            host["max_depths"][i] = request.max_depth
            host["max_nodes"][i] = request.max_nodes
            host["max_lens"][i] = request.max_len
            host["adapters"][i] = request.adapter
            host["state_slots"][i], host["replayed"][i] = request.state_slot, request.replayed
            host["temperatures"][i] = request.temperature
            host["draft_temperatures"][i] = request.draft_temperature
            host["least_values"][i] = request.least_value
            self._rng_seeds[i] = request.rng_seed
            host["samples"][i] = request.sample
            host["new_tokens"][i, : len(new_tokens)] = new_tokens
            host["pages"][i, : len(request.pages)] = request.pages
            if request.end_tokens:
                host["end_tokens"][i, : len(request.end_tokens)] = request.end_tokens
            if len(request.weights):
                host["weights"][i] = request.weights
            host["transform_numbers"][i, 0] = request.temperature
            if (transforms := request.transforms) is not None:
                host["transform_numbers"][i] = transforms.row.numbers
                host["transform_options"][i] = (transforms.slot, *transforms.row.options)
                host["counted_tokens"][i, : len(transforms.new_tokens)] = transforms.new_tokens
        self.upload()

    def propose(self, seed_trees: Sequence[TokenTree | None], evidence: SeedEvidence | None) -> None:
        """Upload the proposals of model-free sources for the batch of the last `fill`, None for no proposal.

        A seed tree has at most 1 + SEEDS nodes. Evidence ratios are 1 if `evidence` is None.
        """
        if not any(seed_trees):
            return
        for i, tree in enumerate(seed_trees):
            if tree is not None:
                num_seeds, probs = len(tree) - 1, tree.probs[1:]
                assert num_seeds <= SEEDS, "the seed tree exceeds SEEDS nodes"
                self.host["proposed_tokens"][i, :num_seeds] = tree.tokens[1:]
                self.host["proposed_parents"][i, :num_seeds] = tree.parents[1:] - 1
                self.host["proposed_probs"][i, :num_seeds] = probs
                self.host["proposed_ratios"][i, :num_seeds] = 1 if evidence is None else evidence.ratios(probs)
        self.upload("proposed_tokens", "proposed_ratios")
