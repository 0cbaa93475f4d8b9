"""Sampler of one request: logit transforms, noise and tree verification."""

import math
import secrets
from collections.abc import Callable, Sequence
from ctypes import CDLL
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from treespec.config.configs import RANDOM_DRAWS
from treespec.errors import ParameterError, RequestError
from treespec.sampling.noise import Noise
from treespec.sampling.restriction import Restriction
from treespec.sampling.transforms import Transforms, truncate_rows
from treespec.sampling_params import SamplingParams
from treespec.tree import TokenTree
from treespec.utils.torch_state import one_thread
from treespec.verification.oracle import RandomOracle
from treespec.verification.verify import verify_drawn
from treespec_kernels.cpu.choice_cpu import RowChoice
from treespec_kernels.sampling.coupled_choice import RowNoise
from treespec_kernels.sampling.row_topk import row_topk_triton

_VERIFY_STREAM, DRAFT_STREAM = 1 << 32, 2 << 32  # added to the sample index in the generator's key
SEED_BITS = 53  # bits of a generated seed, so that JSON numbers represent it exactly


def new_seed() -> int:
    """Generate a seed for a request without one."""
    return secrets.randbits(SEED_BITS)


class Scoring(Protocol):
    """Protocol of objects that transform one row of logits into scores."""

    def scores(self, logits: Tensor, tokens: Sequence[int], ancestors: Sequence[int]) -> Tensor:
        """Return the scores; see `Transforms.scores`."""


class Sampler:
    """Samples the tokens of a request whose output is not the plain argmax."""

    def __init__(
        self,
        params: SamplingParams,
        transforms: Scoring,  # logit transforms, including temperature and truncation
        end_tokens: Sequence[int],  # tokens that end the request
        vocab_size: int,  # size of the target's logits
        device: torch.device,
        seed: int,  # noise seed
        sample: int = 0,  # index among the request's samples
        # Compute noise and transforms on the logits' device, with the kernels of captured rounds. Their rounding may
        # differ from the host's, so an engine always uses the same ones
        kernel_noise: bool = False,
        library: CDLL | None = None,  # from `growth_library`; chooses faster on the CPU, with the same bits
    ):
        self.params, self.temperature, self._device = params, params.temperature, device
        self._end_tokens = frozenset(end_tokens)
        self.transforms = transforms
        self.noise = Noise(seed, sample, vocab_size)
        self.key = seed, sample
        self._kernel_noise = kernel_noise
        self._native: RowChoice | None = None
        self.native_choice: int | None = None  # address of a `Choice` with which C++ samples from unmodified logits
        self.restriction: Restriction | None = None  # allowed tokens, also for drafts; None allows all
        if isinstance(transforms, Transforms):
            self.restriction = transforms.restriction
            if library is not None and params.temperature > 0:
                self._native = RowChoice(library, self.key, *transforms.truncation)
                self.native_choice = None if transforms.modifies else self._native.address

    def choose(self, logits: Tensor, tokens: Sequence[int], ancestors: Sequence[int] = ()) -> int:
        """Return the token of plain decoding: the argmax of `Transforms.scores`, plus noise if sampled.

        Raises RequestError if a processor failed or the target computed NaN or infinity, and ParameterError if no token
        is left.
        """
        position = len(tokens) + len(ancestors)
        if self._kernel_noise:
            return self._choose_by_kernel(logits, tokens, ancestors, position)
        if self._native is None:
            return self._choose_by_scores(lambda: self.transforms.scores(logits, tokens, ancestors), logits, position)
        assert isinstance(self.transforms, Transforms)
        transforms, penalised = self.transforms, self.transforms.penalised(logits, tokens, ancestors)
        if (choice := self._native.choose(penalised, position)) is not None:
            return choice
        return self._choose_by_scores(lambda: transforms.truncated(penalised), logits, position)

    def _choose_by_scores(self, scores_of: Callable[[], Tensor], logits: Tensor, position: int) -> int:
        """Return the token with the largest score, plus noise if sampled. `scores_of` returns the scores, [vocab]."""
        with one_thread():
            scores = scores_of()
            if self.temperature > 0:
                token, score = self.noise.choose(scores.cpu().numpy(), position)
            else:
                largest = scores.max(0)  # first on ties
                token, score = int(largest.indices), float(largest.values)
        self._check(score, logits, position)
        return token

    def _choose_by_kernel(self, logits: Tensor, tokens: Sequence[int], ancestors: Sequence[int], position: int) -> int:
        """Compute temperature, noise and argmax in one kernel, without transforms on the logits themselves."""
        unmodified = not self.params.transforms_logits and not self.params.truncates
        scores = logits if unmodified else self.transforms.scores(logits, tokens, ancestors)
        seed, sample = (np.uint64(word).astype(np.int64).item() for word in self.key)

        def row(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((1,), value, dtype=dtype, device=self._device)

        temperature = self.temperature if unmodified else float(self.temperature > 0)
        keys = (row(value, torch.int64) for value in (seed, sample, position))
        choice = row_topk_triton(scores[None], 1, RowNoise(row(temperature, torch.float32), *keys))
        if not bool(choice.finite):
            self._check(float(self.transforms.scores(logits, tokens, ancestors).max()), logits, position)
        return int(choice.tokens)

    def target_probs(self, logits: Tensor, tokens: Sequence[int], ancestors: Sequence[int]) -> np.ndarray:
        """Return the target's probabilities, float32 [vocab], at a temperature above 0; errors as in `choose`."""
        with one_thread():
            scores = self.transforms.scores(logits, tokens, ancestors)
            self._check(float(scores.max()), logits, len(tokens) + len(ancestors))
            return torch.softmax(scores, -1).cpu().numpy()

    def walk(
        self, tree: TokenTree, logits: Tensor, tokens: Sequence[int], limit: int, begin: Sequence[int] = (0,)
    ) -> tuple[np.ndarray, int]:
        """Verify naively: descend to the child that carries the target's choice until there is none.

        A node's choice depends only on its path and its own noise, so the emitted tokens equal plain decoding. The walk
        stops at a token that ends the request. If a choice below the root fails, the tokens before it are emitted, as
        in plain decoding, and the next walk fails at its root.

        `logits` are [num_nodes, vocab], `tokens` prompt and output up to the root, `limit` the request's remaining
        tokens, `begin` the accepted nodes so far, root first. Returns the accepted path, int64 [1 + accepted], root
        first, and the next token.
        """
        edges = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
        children = {key: node for node, key in enumerate(edges) if node}
        path = [*begin]
        ancestors: list[int] = tree.tokens[path[1:]].tolist()
        while True:
            try:
                token = self.choose(logits[path[-1]], tokens, ancestors)
            except RequestError:
                if not ancestors:
                    raise
                return np.array(path[:-1], dtype=np.int64), ancestors[-1]
            child = children.get((path[-1], token))
            if child is None or token in self._end_tokens or len(path) >= limit:
                self.noise.forget(len(tokens) + len(ancestors))
                return np.array(path, dtype=np.int64), token
            path.append(child)
            ancestors.append(token)

    def temper(self, logits: Tensor, position: int, rule: str) -> None:
        """Adjust draft logits, float32 [num_rows, vocab], in place to predict the target's choice at `position`.

        Divides by the temperature. The "coupled" rule adds the target's noise: the softmax, used as child probability,
        is then the choice distribution of a target whose log-probabilities differ from the draft's by further Gumbel
        noise. For random draws the draft is truncated like the target; coupled drafts do not benefit from truncation.
        """
        if self.temperature > 0:
            logits.div_(self.temperature)
            if rule in RANDOM_DRAWS:
                truncate_rows(logits, self.params)
            elif rule == "coupled":
                logits.add_(torch.from_numpy(self.noise.row(position)).to(logits.device))

    def verify_drawn(self, rule: str, tree: TokenTree, logits: Tensor, tokens: Sequence[int]) -> tuple[np.ndarray, int]:
        """Verify a tree of random draws by "rejection" or "traversal"."""

        def target(node: int) -> np.ndarray | None:
            if node and int(tree.tokens[node]) in self._end_tokens:
                return None
            ancestors = tree.tokens[tree.path_to(node)[1:]].tolist()
            try:
                return self.target_probs(logits[node], tokens, ancestors)
            except RequestError:
                if not node:
                    raise
                return None  # emit the preceding token, as in plain decoding; the next round fails at its root

        return verify_drawn(rule, tree, target, self._oracle)

    @cached_property
    def _oracle(self) -> RandomOracle:
        return RandomOracle(self.generator(_VERIFY_STREAM))

    @cached_property
    def draft_oracle(self) -> RandomOracle:
        """Source of randomness for the drafts' draws, independent of verification."""
        return RandomOracle(self.generator(DRAFT_STREAM))

    def generator(self, stream: int) -> np.random.Generator:
        """Return a generator keyed by seed, sample and stream, independent of the rest of the batch."""
        seed, sample = self.key
        return np.random.Generator(np.random.Philox(key=np.array([seed, sample + stream], np.uint64)))

    def _check(self, score: float, logits: Tensor, position: int) -> None:
        """Raise RequestError if the best score is not finite."""
        if math.isfinite(score):
            return
        if not bool(torch.isfinite(logits.float().max())):
            raise RequestError(f"the target computed NaN or infinity at position {position - 1}")
        if math.isnan(score) or score > 0:
            raise ParameterError(
                f"logit_bias, penalties or logits_processors produced NaN or infinity at position {position}"
            )
        raise ParameterError(
            f"no token is left at position {position}: allowed_token_ids, structured_outputs, bad_words, logit_bias, "
            "min_tokens or logits_processors exclude them all"
        )
