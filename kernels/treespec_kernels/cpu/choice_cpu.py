"""The target's choices and log-probabilities in C++, for rows of logits on the CPU.

The source is `choice_cpu.h`, a part of the library that grows trees. The references are `Noise.choose` after
`truncated_row`, and `LogprobRows.of`.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from treespec_kernels.cpu.cpu_library import address_of
from treespec_kernels.cpu.growth_cpu import MOST_CANDIDATES, STRUCTS
from treespec_kernels.sampling.coupled_choice import gumbel_ref

_RUN = 64  # for `gumbel_ref`, integers are padded to multiples of this, so that none falls into a SIMD tail


class RowChoice:
    """Token choice from logits with a request's temperature, truncation and noise."""

    def __init__(
        self,
        library: ctypes.CDLL,  # from `growth_library`
        key: tuple[int, int],  # seed and sample of the noise, uint64
        temperature: float,  # greater than 0
        top_k: int,  # 0 for all tokens
        top_p: float,
        log_min_p: float,  # -inf without min_p
    ):
        self._choose = library.treespec_choose
        self._tokens = np.zeros(MOST_CANDIDATES, dtype=np.int64)
        self._scores = np.zeros(MOST_CANDIDATES, dtype=np.float32)
        self._integers = np.zeros(MOST_CANDIDATES, dtype=np.uint32)
        self._struct = STRUCTS["Choice"](
            choose=ctypes.cast(library.treespec_choose, ctypes.c_void_p).value,
            temperature=temperature,
            log_min_p=log_min_p,
            top_p=top_p,
            top_k=top_k,
            seed=key[0],
            sample=key[1],
            tokens=address_of(self._tokens),
            scores=address_of(self._scores, np.float32),
            integers=address_of(self._integers, np.uint32),
        )
        self.address = ctypes.addressof(self._struct)

    def choose(self, logits: Tensor, position: int) -> int | None:
        """Return the token at `position`, which is the reference's.

        None if the reference must choose: a score is not finite, many tokens tie, or rounding may change the nucleus.

        Args:
            logits: [vocab], before division by the temperature.
        """
        logits = (logits if logits.dtype == torch.bfloat16 else logits.float()).contiguous()
        struct = self._struct
        struct.logits, struct.is_bf16, struct.width = logits.data_ptr(), logits.dtype == torch.bfloat16, len(logits)
        struct.position = position
        count = self._choose(self.address)
        if count < 0:
            return None
        if count == 1:  # almost always: the other tokens' values are lower by more than the logarithms' rounding errors
            return int(self._tokens[0])
        values = self._scores[:count] + gumbel_ref(self._integers[: -(-count // _RUN) * _RUN])[:count]
        return int(self._tokens[values.argmax()])


def row_logprobs(library: ctypes.CDLL, parts: Sequence[Tensor], tokens: Sequence[int], count: int) -> np.ndarray:
    """Compute `LogprobRows.packed`, int32 [num_rows, 2 + 2 * count], on this thread.

    A row's bits depend neither on other rows nor on the instruction set. Log-probabilities are rounded from float64.

    Args:
        parts: logits, [num_rows, vocab] each, all bfloat16 or all float32, with contiguous rows.
        tokens: chosen token of each row.
    """
    width, dtype = parts[0].shape[1], parts[0].dtype
    assert all(part.stride(1) == 1 and part.dtype == dtype and part.shape[1] == width for part in parts)
    rows = [part.data_ptr() + i * part.stride(0) * dtype.itemsize for part in parts for i in range(len(part))]
    addresses, chosen = np.array(rows, dtype=np.int64), np.array(tokens, dtype=np.int64)
    packed = np.empty((len(rows), 2 + 2 * count), dtype=np.int32)
    struct = STRUCTS["RowLogprobs"](
        address_of(addresses),
        dtype == torch.bfloat16,
        *(len(rows), width, count),
        address_of(chosen),
        address_of(packed, np.int32),
    )
    library.treespec_logprobs(ctypes.addressof(struct))
    return packed
