"""States of recurrent layers: those of running requests, and copies after prompts and cached prefixes."""

import torch

from treespec_kernels.recurrent.request_state import RecurrentState, StateShape, StateTensors


class StatePool:
    """States of running requests, and a limited number of copies.

    The key of a copy is the id of a prompt's group, which keeps it until `drop`, or the key of a prefix's last page
    (`page_keys`), which is evicted when it is the least recently used one.
    """

    def __init__(self, shape: StateShape, num_requests: int, num_kept: int, device: torch.device | str = "cpu"):
        without_tree, self.num_requests = shape._replace(num_nodes=0), num_requests
        self.nbytes = self.size(shape, num_requests, num_kept)
        self.tensors = shape.tensors(num_requests, device)  # states of the requests
        self._free, self._held = self.tensors.states, dict[str, RecurrentState]()
        self._free_copies, self._kept = without_tree.allocate(num_kept, device), dict[str | bytes, RecurrentState]()

    @staticmethod
    def size(shape: StateShape, num_requests: int, num_kept: int) -> int:
        """Return the bytes of a pool."""
        return num_requests * shape.nbytes + num_kept * shape._replace(num_nodes=0).nbytes

    def with_scratch(self, count: int) -> StateTensors:
        """Return the requests' states with scratch memory of `count` states for all passes, which run one by one."""
        matrices = self.tensors.matrices
        scratch = matrices.new_empty(count, *matrices.shape[2:])
        for state in self._free:
            state.scratch = scratch
        self.tensors = self.tensors._replace(scratch=scratch)
        return self.tensors

    @property
    def num_held(self) -> int:
        """Number of states of requests and groups."""
        return len(self._held) + sum(isinstance(key, str) for key in self._kept)

    @property
    def holders(self) -> set[str]:
        """Ids of the requests that hold a state."""
        return {*self._held}

    def reserve(self, request_id: str) -> RecurrentState:
        """Allocate a request's state, reset to before the first token."""
        assert request_id not in self._held, f"{request_id} holds a state already"
        state = self._held[request_id] = self._free.pop()
        state.reset()
        return state

    def of(self, request_id: str) -> RecurrentState:
        """Return a request's state, allocated if necessary."""
        return self._held.get(request_id) or self.reserve(request_id)

    def release(self, request_id: str) -> None:
        if (state := self._held.pop(request_id, None)) is not None:
            self._free.append(state)

    def keep(self, key: str | bytes, state: RecurrentState) -> None:
        """Keep a copy of a state without uncommitted tokens."""
        if (copy := self._kept.pop(key, None)) is None:
            if not self._free_copies:
                self.drop(next(other for other in self._kept if isinstance(other, bytes)))  # the least recently used
            copy = self._free_copies.pop()
            copy.copy_from(state)
        self._kept[key] = copy

    def find(self, key: str | bytes) -> RecurrentState | None:
        """Return the copy with this key, or None."""
        return self._kept.get(key)

    def drop(self, key: str | bytes) -> None:
        """Drop the copy with this key, if any."""
        if (copy := self._kept.pop(key, None)) is not None:
            self._free_copies.append(copy)
