"""Inputs of a captured round: requests as data in buffers with fixed addresses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treespec.planning.learning import RoundShapes
from treespec.tree import TokenTree
from treespec_kernels.tree.device_trees import ProposedTrees
from treespec_kernels.tree.growth_limits import SEEDS

MAX_ENDS = 8  # end tokens of a request that a captured round knows


@dataclass(frozen=True)
class RoundLimits:
    """Limits of the captured rounds of one batch size.

    Args:
        max_depth: D, levels that are drafted at most.
        nodes: rows of the target pass by graph, ascending, 1 (plain decoding) first.
        max_pages: of one request.
        max_context: committed positions of the longest request.
    """

    max_depth: int
    nodes: tuple[int, ...]
    max_pages: int
    max_context: int

    @property
    def width(self) -> int:
        """Tokens that a round emits at most: a path of D nodes below the root, and the token after it."""
        return self.max_depth + 1

    @property
    def shapes(self) -> RoundShapes:
        """What the planner may choose from."""
        return RoundShapes(self.max_depth, self.nodes)


class RoundInput(NamedTuple):
    """One request of a round.

    Attributes:
        context_len: L, committed positions of the target.
        new_tokens: those that the SSMs have not read, the root last; at most D + 1.
        pages: int64 [num_pages].
        end_tokens: below which nothing is drafted.
        temperature: of the choice, 0 takes the argmax; draft_temperature: of the SSMs' guess of it.
        rng_seed, sample: of the noise.
        weights: trust in each SSM, 0 where it is silent; sum 1. Empty where no SSM may draft.
        proposed: the tree of sources that cost no pass, over the root; None where there is none.
        ratios: float32 [len(proposed)], evidence ratios of its nodes.
        max_depth, max_nodes: of its tree; 0 and 1 make it plain decoding.
        least_value: that a node must have.
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


class _Buffer:
    """Device memory of one dtype that is filled by one copy from pinned memory, carved into named views."""

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
    """Elements that a field takes, so that each begins at a multiple of 16 bytes: Triton compiles a kernel anew for
    another alignment."""
    return -(-size // 16) * 16


class RoundInputs:
    """The requests of a round on the device.

    Args:
        num_requests: B, at most.
        num_ssms: sources with a pass.
        limits, device: of the round.
    """

    def __init__(self, num_requests: int, num_ssms: int, limits: RoundLimits, device: torch.device):
        self.num_requests, self.num_ssms, self.limits, self.device = num_requests, num_ssms, limits, device
        b = num_requests
        self._buffers = [
            _Buffer(
                dict.fromkeys(("context_lens", "new_lens", "roots", "max_depths", "max_nodes"), (b,))
                | {
                    "new_tokens": (b, limits.width),
                    "end_tokens": (b, MAX_ENDS),
                    "pages": (b, limits.max_pages),
                    "proposed_tokens": (b, SEEDS),
                    "proposed_parents": (b, SEEDS),
                },
                torch.int32,
                device,
            ),
            _Buffer(
                dict.fromkeys(("temperatures", "draft_temperatures", "least_values"), (b,))
                | {"weights": (b, num_ssms), "proposed_probs": (b, SEEDS), "proposed_ratios": (b, SEEDS)},
                torch.float32,
                device,
            ),
            _Buffer({"rng_seeds": (b,), "samples": (b,)}, torch.int64, device),
        ]
        self._views = {name: view for buffer in self._buffers for name, view in buffer.device.items()}
        self._host = {name: values for buffer in self._buffers for name, values in buffer.host.items()}

    def __getitem__(self, name: str) -> Tensor:
        """A field on the device."""
        return self._views[name]

    def noise(self, temperatures: str, by_row: Callable[[Tensor], Tensor], positions: Tensor) -> dict[str, Any]:
        """Arguments of `row_topk_triton`: each request's noise for all of its rows."""
        own = {"seeds": by_row(self["rng_seeds"]), "samples": by_row(self["samples"])}
        return own | {"temperatures": by_row(self[temperatures]), "positions": positions}

    @property
    def proposed(self) -> ProposedTrees:
        """The trees of sources that cost no pass."""
        return ProposedTrees(*(self[f"proposed_{name}"] for name in ProposedTrees._fields))

    def fill(self, requests: Sequence[RoundInput]) -> None:
        """Upload a batch; places behind it are idle."""
        host = self._host
        for values in host.values():
            values.fill(0)
        for name in ("roots", "end_tokens", "proposed_tokens", "proposed_parents"):
            host[name].fill(-1)
        host["weights"].fill(np.nan)  # a NaN weight disables the source
        for i, request in enumerate(requests):
            new = request.new_tokens
            assert 1 <= len(new) <= self.limits.width, "tokens that the SSMs have missed are read before the round"
            assert request.context_len <= self.limits.max_context, "a request outgrew the round"
            one = {
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
            for name, value in one.items():
                host[name][i] = value
            for name, several in (
                ("new_tokens", new),
                ("end_tokens", request.end_tokens),
                ("pages", request.pages),
                ("weights", np.where(request.weights > 0, request.weights, np.nan)),
            ):
                host[name][i, : len(several)] = several
            if request.proposed is not None:
                self._fill_proposed(i, request.proposed, request.ratios)
        for buffer in self._buffers:
            buffer.upload()

    def _fill_proposed(self, i: int, tree: TokenTree, ratios: np.ndarray) -> None:
        assert len(tree) <= 1 + SEEDS, "a proposed tree is cut before the round"
        of_nodes = {"tokens": tree.tokens, "parents": tree.parents - 1, "probs": tree.probs, "ratios": ratios}
        for name, values in of_nodes.items():
            self._host[f"proposed_{name}"][i, : len(tree) - 1] = values[1:]
