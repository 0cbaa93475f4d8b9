"""Device state of the logit transforms in captured rounds: biases and token counts of running requests."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from treespec.request import Request
from treespec.sampling.transforms import TransformRow, bias_row, count_row, has_state


class RequestTransforms(NamedTuple):
    """Transforms of a request in a round."""

    row: TransformRow  # parameters of the request
    slot: int  # row of its biases and counts, -1 for none
    new_tokens: Sequence[int]  # output tokens to add to its counts
    truncates: bool  # whether top-k, top-p or min-p applies


class SamplingState:
    """Biases and token counts of up to S requests, each allocated at its first use.

    `max_new` is the maximum number of tokens that a round emits for a request.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, max_new: int):
        self.num_slots, self.vocab_size, self._device, self._max_new = num_slots, vocab_size, device, max_new
        self._slots: dict[Request, int] = {}
        self._known: dict[Request, int] = {}  # number of counted tokens by request

    @cached_property
    def biases(self) -> Tensor:
        """Biases added to the logits, float32 [S, vocab]; -inf excludes a token."""
        return torch.zeros(self.num_slots, self.vocab_size, dtype=torch.float32, device=self._device)

    @cached_property
    def _all_counts(self) -> Tensor:
        """The counts, with an additional row for absent tokens."""
        return torch.zeros(self.num_slots + 1, self.vocab_size, dtype=torch.int32, device=self._device)

    @property
    def counts(self) -> Tensor:
        """Token counts, int32 [S, vocab], as in `TransformInputs`."""
        return self._all_counts[: self.num_slots]

    @staticmethod
    def nbytes(num_slots: int, vocab_size: int) -> int:
        return num_slots * vocab_size * 8

    def count(self, slots: Tensor, tokens: Tensor) -> None:
        """Add tokens (int32 [B, n], -1 for none) to the counts of slots (int32 [B]); part of a captured round."""
        rows = torch.where((tokens >= 0) & (slots >= 0)[:, None], slots[:, None], self.num_slots).long()
        flat_indices = (rows * self.vocab_size + tokens.clamp(min=0)).flatten()
        self._all_counts.view(-1).index_add_(0, flat_indices, torch.ones_like(flat_indices, dtype=torch.int32))

    def rows_of(self, requests: Sequence[Request]) -> list[RequestTransforms | None]:
        """Return each request's transforms in a round, or None. Free the slots of all other requests."""
        if self._slots:
            for finished in self._slots.keys() - set(requests):
                del self._slots[finished], self._known[finished]
        return [self._row_of(request) for request in requests]

    def _row_of(self, request: Request) -> RequestTransforms | None:
        params = request.params
        if not params.transforms_logits and not params.truncates:
            return None
        row = TransformRow.of(params, request.num_prompt, self.vocab_size)
        if not has_state(params):
            return RequestTransforms(row, -1, (), params.truncates)
        num_counted = self._known.get(request, -1)
        if num_counted < 0 or len(request.tokens) - num_counted > self._max_new:
            self._fill(request)
            num_counted = len(request.tokens)
        self._known[request] = len(request.tokens)
        return RequestTransforms(row, self._slots[request], request.tokens[num_counted:], params.truncates)

    def _fill(self, request: Request) -> None:
        """Allocate and fill a request's slot of biases and counts."""
        if request not in self._slots:
            self._slots[request] = min(set(range(self.num_slots)) - set(self._slots.values()))
        slot = self._slots[request]
        self.biases[slot].copy_(torch.from_numpy(bias_row(request.params, self.vocab_size)))
        self._all_counts[slot].copy_(torch.from_numpy(count_row(request.tokens, request.num_prompt, self.vocab_size)))
