"""What one request's tokens are chosen by: its transforms, its noise, and the walk through its trees."""

import math
import secrets
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from treespec.config import RANDOM_DRAWS
from treespec.errors import RequestError
from treespec.sampling.grammar import Grammar
from treespec.sampling.noise import Noise
from treespec.sampling.restriction import Restriction
from treespec.sampling.transforms import Transforms, truncate_rows
from treespec.sampling_params import SamplingParams
from treespec.tree import TokenTree
from treespec.verification.oracle import RandomOracle
from treespec.verification.verify import Verified, verify_drawn_one
from treespec_kernels.sampling.coupled_choice import coupled_choice_triton

_VERIFY_STREAM, _DRAFT_STREAM = 1 << 32, 2 << 32  # added to the sample's number in a generator's key


SEED_BITS = 53  # of a drawn seed, so that every reader of JSON keeps it whole


def new_seed() -> int:
    """A seed for a request that has none."""
    return secrets.randbits(SEED_BITS)


class Scoring(Protocol):
    """From logits to scores, one row at a time."""

    def scores(self, logits: Tensor, tokens: Sequence[int], ancestors: Sequence[int]) -> Tensor:
        """As `Transforms.scores`."""


class Sampler:
    """Chooses the tokens of one request that does not simply take the argmax.

    Args:
        params: of the request.
        prompt: its tokens.
        end_tokens: tokens that end it.
        bad_words: token ids of each spelling.
        vocab_size, device: of the target's logits.
        seed: of the noise.
        sample: which of the request's samples.
        kernel_noise: whether the noise is computed where the logits are, by the kernel that captured rounds use: its
            logarithms may round otherwise than the host's, so an engine uses one of the two for everything.
        transforms: in place of those of `params`, temperature and truncation included.
        grammar: of its structured output, if it has one.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        end_tokens: Sequence[int],
        bad_words: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device,
        seed: int,
        sample: int = 0,
        kernel_noise: bool = False,
        transforms: Scoring | None = None,
        grammar: Grammar | None = None,
    ):
        self.params, self.temperature, self._device = params, params.temperature, device
        self._end_tokens = frozenset(end_tokens)
        self.transforms: Scoring = transforms or Transforms(
            params, len(prompt), end_tokens, bad_words, vocab_size, device, grammar
        )
        self.noise = Noise(seed, sample, vocab_size)
        self._key = seed, sample
        self._kernel_noise = kernel_noise
        self._oracle: RandomOracle | None = None

    @property
    def restriction(self) -> Restriction | None:
        """The tokens that the request may write at all, for those who draft for it; None = all."""
        return self.transforms.restriction if isinstance(self.transforms, Transforms) else None

    def choose(self, logits: Tensor, tokens: Sequence[int], ancestors: Sequence[int] = ()) -> int:
        """The token that plain decoding emits here: argmax of scores plus noise, greedily of scores alone.

        Args:
            logits: [vocab], the target's.
            tokens: prompt and output so far.
            ancestors: what a path of the tree adds to them.

        Raises:
            RequestError: a processor failed, no token is left, or the target computed NaN or infinity.
        """
        position = len(tokens) + len(ancestors)
        if self._kernel_noise and self.temperature > 0:
            return self._choose_by_kernel(logits, tokens, ancestors, position)
        scores = self.transforms.scores(logits, tokens, ancestors)
        if self.temperature > 0:
            scores = scores + torch.from_numpy(self.noise.row(position)).to(self._device)
        best, token = scores.max(0)  # the first of equal ones
        self._check(float(best), logits, position)
        return int(token)

    def _choose_by_kernel(self, logits: Tensor, tokens: Sequence[int], ancestors: Sequence[int], position: int) -> int:
        """Temperature, noise and argmax in one pass. Where nothing else changes the logits, they go in as they are, as
        in a captured round."""
        alone = not self.params.transforms_logits and not self.params.truncates
        scores = logits if alone else self.transforms.scores(logits, tokens, ancestors)
        seed, sample = (np.uint64(word).astype(np.int64).item() for word in self._key)

        def row(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((1,), value, dtype=dtype, device=self._device)

        chosen = coupled_choice_triton(
            scores[None],
            row(self.temperature if alone else 1.0, torch.float32),
            row(seed, torch.int64),
            row(sample, torch.int64),
            row(position, torch.int64),
        )
        if not bool(chosen.finite):
            self._check(float(self.transforms.scores(logits, tokens, ancestors).max()), logits, position)
        return int(chosen.tokens)

    def target_probs(self, logits: Tensor, tokens: Sequence[int], ancestors: Sequence[int]) -> np.ndarray:
        """float32 [vocab], p. Arguments and errors as `choose`; temperature above 0."""
        scores = self.transforms.scores(logits, tokens, ancestors)
        self._check(float(scores.max()), logits, len(tokens) + len(ancestors))
        return torch.softmax(scores, -1).cpu().numpy()

    def walk(self, tree: TokenTree, logits: Tensor, tokens: Sequence[int], most: int) -> Verified:
        """Naive verification: go on to the child that carries the target's choice, until there is none.

        As the choice at a node depends on its past and on noise of its own, the emitted tokens are those of plain
        decoding. Below a token that ends the request nothing is chosen. Where a later choice fails, the tokens before
        it are emitted, as plain decoding would have: the next walk fails at its root.

        Args:
            tree: num_nodes nodes.
            logits: [num_nodes, vocab].
            tokens: prompt and output, up to the root.
            most: tokens that the request may still emit.

        Raises:
            RequestError: as `choose`, at the root.
        """
        below = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
        children = {key: node for node, key in enumerate(below) if node}
        path = [0]
        ancestors: list[int] = []
        while True:
            try:
                token = self.choose(logits[path[-1]], tokens, ancestors)
            except RequestError:
                if not ancestors:
                    raise
                return Verified(np.array(path[:-1], dtype=np.int64), ancestors[-1])
            child = children.get((path[-1], token))
            if child is None or token in self._end_tokens or len(path) >= most:
                self.noise.forget(len(tokens) + len(ancestors))
                return Verified(np.array(path, dtype=np.int64), token)
            path.append(child)
            ancestors.append(token)

    def temper(self, logits: Tensor, position: int, rule: str) -> None:
        """Make a draft's logits say what the target's choice at `position` will be.

        Coupled, the noise of that choice is added; then softmax is the distribution of the choice of a target whose own
        log-probabilities differ from the draft's by further Gumbel noise, so it serves as a child's probability. What
        is drawn at random is truncated as the target is; coupled guesses gain nothing by it.

        Args:
            logits: float32 [num_rows, vocab], changed in place.
            position: of the token that is guessed.
            rule: of verification.
        """
        if self.temperature > 0:
            logits.div_(self.temperature)
            if rule in RANDOM_DRAWS:
                truncate_rows(logits, self.params)
            elif rule == "coupled":
                logits.add_(torch.from_numpy(self.noise.row(position)).to(logits.device))

    def verify_drawn(self, rule: str, tree: TokenTree, logits: Tensor, tokens: Sequence[int]) -> Verified:
        """Verification of a tree whose children were drawn at random, by the rule "rejection" or "traversal"."""

        def target(node: int) -> np.ndarray | None:
            if node and int(tree.tokens[node]) in self._end_tokens:
                return None
            ancestors = tree.tokens[tree.path_to(node)[1:]].tolist()
            try:
                return self.target_probs(logits[node], tokens, ancestors)
            except RequestError:
                if not node:
                    raise
                return None  # as in plain decoding the token before is emitted, and the next round fails at its root

        if self._oracle is None:
            self._oracle = RandomOracle(self.generator(_VERIFY_STREAM))
        return verify_drawn_one(rule, tree, target, self._oracle)

    def draft_generator(self) -> np.random.Generator:
        """Randomness for draws of drafts, independent of verification's."""
        return self.generator(_DRAFT_STREAM)

    def generator(self, stream: int) -> np.random.Generator:
        """Randomness of this request alone, so that nothing else in the batch moves it."""
        seed, sample = self._key
        return np.random.Generator(np.random.Philox(key=np.array([seed, sample + stream], np.uint64)))

    def _check(self, best: float, logits: Tensor, position: int) -> None:
        """Raise where the best score is none."""
        if math.isfinite(best):
            return
        if not bool(torch.isfinite(logits.float().max())):
            raise RequestError(f"the target computed NaN or infinity at position {position - 1}")
        if math.isnan(best) or best > 0:
            raise RequestError(
                f"logit_bias, penalties or logits_processors made NaN or infinity at position {position}"
            )
        raise RequestError(
            f"no token is left at position {position}: allowed_token_ids, structured_outputs, bad_words, logit_bias, "
            "min_tokens or logits_processors exclude them all"
        )
