"""Hidden states of the target at the tokens of lessons, for draft heads that read them."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treespec.startup.options import is_slow

MOST_BYTES = 32 << 30  # maximum bytes of stored states
DISK_SHARE = 0.5  # maximum share of the free disk space


class TargetStates:
    """States of chosen target layers, stored in a file if they fit on the disk.

    Training draws each lesson several times, and a target pass costs more than a training step of a head. States are
    the layers' inputs; the number of layers + 1 means the output after the final norm.
    """

    def __init__(
        self, target: Any, layers: Sequence[int], window_lengths: np.ndarray, device: torch.device, file: Path
    ):
        dtype = torch.float32 if is_slow(torch.bfloat16, device) else torch.bfloat16
        self.decoder, self.layers = target.to(device, dtype).get_decoder(), layers
        width = len(layers) * target.config.hidden_size
        self._ends = np.cumsum(window_lengths)
        self._is_stored = np.zeros(len(self._ends), dtype=bool)
        size = 2 * width * int(self._ends[-1])
        self._file = file
        self._kept: np.memmap[Any, Any] | None = None
        if size <= min(MOST_BYTES, DISK_SHARE * shutil.disk_usage(file.parent).free):
            self._kept = np.memmap(file, np.int16, "w+", shape=(int(self._ends[-1]), width))

    def of(self, lessons: Sequence[int] | np.ndarray, tokens: Tensor) -> Tensor:
        """Return the states at the tokens of some lessons, bfloat16 [rows, length, layers * hidden]."""
        if self._kept is not None and self._is_stored[lessons].all():
            states = torch.zeros(*tokens.shape, self._kept.shape[1], dtype=torch.int16, device="cpu")
            for row, lesson in enumerate(lessons):
                stored = self._kept[self._slice(lesson)]
                states[row, : len(stored)] = torch.from_numpy(np.array(stored))
            return states.view(torch.bfloat16).to(tokens.device)
        with torch.no_grad():
            outputs = self.decoder(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
            computed = torch.cat([outputs[min(layer, len(outputs) - 1)] for layer in self.layers], 2).to(torch.bfloat16)
        if self._kept is not None:
            values = computed.cpu().contiguous().view(torch.int16).numpy()
            for row, lesson in enumerate(lessons):
                rows = self._slice(lesson)
                self._kept[rows] = values[row, : rows.stop - rows.start]
            self._is_stored[lessons] = True
        return computed

    def close(self) -> None:
        self._kept = None
        self._file.unlink(missing_ok=True)

    def _slice(self, lesson: int) -> slice:
        return slice(int(self._ends[lesson - 1]) if lesson else 0, int(self._ends[lesson]))
