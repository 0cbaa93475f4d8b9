"""How large a tree is worth its pass: budget and topology from measured cost and drafted probabilities.

A drafted node's value is the product of edge probabilities on its path, the chance that it is accepted. With
candidates sorted by value, the planner takes the prefix of N of them with the largest (sum of values) - rate * verify
time(N), over all requests of the batch at once, where `rate` is what rounds bring in tokens per second; that maximises
tokens per second over many rounds. So trees shrink by themselves as the batch grows, down to nothing.

Times are a measured curve's, corrected by what rounds really take; what gains nothing rests. A rest is decided by
modelled seconds and counted tokens, so a disturbance of one round decides nothing.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from treespec.planning.draft_plan import Drafted, DraftPlan
from treespec.planning.round_costs import CostCurve, RoundCosts, RoundSeconds
from treespec.request import Request
from treespec.tree import TokenTree

PAUSE = 64  # rounds of rest after speculation was seen to cost more than it saves
LONGEST_PAUSE = 1024  # each pause in a row doubles
# What speculation of one request may lose before it rests, in rounds of plain decoding: at first, after a rest, and at
# most. Guesses hold in bursts: with a fifth of it lookup rested through most of 48 texts, and gained 1.11 to 1.15
# where it can gain 1.52 to 1.61 (modelled seconds, an embedded model compiled). A batch of n gets an
# nth, as bursts of several requests make up for each other's lack.
_CREDIT, _SECOND_CREDIT, _LARGEST_CREDIT = 10.0, 5.0, 20.0
_MARGIN = 0.04  # gain that counts as none: about the error of modelled seconds
_MEMORY = 0.03  # weight of the newest round in the running mean
_USUAL_REACH = 0.7  # what a first level is assumed to hold before one was tried
_REACH_MEMORY = 0.15
# How far the last level says what the next one will hold; the rest is usual. A level may hold nothing because other
# sources have said it all, and those below it much: taken at its word, it ended nearly all trees, after 2.7 levels
# where 4.2 gain more (2.98 instead of 2.91; modelled seconds, 0.5B parameters).
_OWN_SHARE = 0.5
# Of the tokens that a further SSM's trust stands for, those that nobody else would have guessed: without the SSMs that
# had 22 % of it, trees of 8 and 16 nodes, lookup in them, lost 2 and 3 % of their drafted tokens.
_UNIQUE = 0.12
_TRUTH_MEMORY = 0.05
_TRUTH_PRIOR = 1.0  # tokens
_RECOVERY = 0.0015  # of what was assumed at first, with each round in which nothing is drafted
_HOPE, _SECOND_HOPE = 1.2, 1.08  # what speculation is assumed to gain before it was tried, and after a pause
_FEW_ROWS = 16  # over which the price of a row is taken: the times of two neighbours may be alike by chance
_LARGEST_VALUE = 0.3  # where rows seem dearer, guesses are made all the same: else nothing is learned of them
_SPEED_PRIOR = 4  # rounds of plain decoding that a request's own speed is drawn towards
_SHARPNESS = 2  # a request expected to end after seven tenths of the time counts as the last one by half
_IDLE_ROUNDS = 8  # for which a batch that is not worth drafting for is not asked again


class _Hope:
    """Whether a way to speculate gains. It may lose a few rounds' time; then it rests, each time for longer.

    Args:
        requests: of the batch.
    """

    def __init__(self, requests: int) -> None:
        self.gain = _HOPE  # running mean: its tokens per second over plain decoding's
        self.resting = 0  # rounds
        self._requests = requests
        self._credit = _CREDIT / requests  # what it may still lose, in rounds of plain decoding
        self._pause = PAUSE

    def observe(self, gain: float, rounds: float, paid: float = 0.0) -> None:
        """Learn from a round that was decoded this way and took as long as `rounds` of plain decoding; `paid`: rounds
        that were spent once, for many to come."""
        self.gain += _MEMORY * (gain - self.gain)
        self._credit += (gain - 1 - _MARGIN) * rounds - paid
        if self._credit < 0:
            self.resting, self._credit = self._pause, _SECOND_CREDIT / self._requests
            self.gain, self._pause = max(self.gain, _SECOND_HOPE), min(2 * self._pause, LONGEST_PAUSE)
        elif self._credit > _LARGEST_CREDIT / self._requests:
            self._credit, self._pause = _LARGEST_CREDIT / self._requests, PAUSE

    def miss(self) -> None:
        """Learn from a round that was not decoded this way: what is not tried cannot be learned, hope returns."""
        self.gain += _RECOVERY * (_HOPE - self.gain)


class _Truth:
    """Accepted tokens over those that the trees' values promised: a ratio of running means.

    The mean of the rounds' ratios, or of their differences, would follow the last long guess that held, or did not.
    """

    def __init__(self) -> None:
        self._accepted = self._promised = _TRUTH_PRIOR

    @property
    def value(self) -> float:
        return min(max(self._accepted / self._promised, 0.1), 1.2)

    def add(self, accepted: float, promised: float) -> None:
        """Learn from a round; both per request."""
        self._accepted += _TRUTH_MEMORY * (accepted - self._accepted)
        self._promised += _TRUTH_MEMORY * (promised - self._promised)

    def miss(self) -> None:
        """Learn from a round that promised nothing."""
        self._accepted += _RECOVERY * (self._promised - self._accepted)


class _Idle(NamedTuple):
    """Batches of `size` requests draft nothing for `rounds` more."""

    size: int
    rounds: int


class _Outlook:
    """What was learned at one size of batch: there are few sizes, and what pays for one request may not for eight.

    Args:
        requests: the fewest of this size.
    """

    def __init__(self, requests: int) -> None:
        self.gain = _HOPE  # running mean over all rounds that speculate
        # Rounds with SSMs, and with sources that cost no pass alone.
        self.ssms, self.free = _Hope(requests), _Hope(requests)


class Planner:
    """Chooses what to draft and what to keep of it.

    Time has a price: `rate`, the tokens that a second is worth when it is spent as in the rounds before. A level is
    drafted, and a node verified, where the tokens that it promises are worth its time; the first level, where it and
    those that may follow are worth the start of drafting as well. Where drafting gains nothing over plain decoding, it
    rests: SSMs, and sources that cost no pass, each for themselves.

    Args:
        cost: this machine's curve.
        learns_seconds: whether times measured in rounds correct the curve's.
    """

    def __init__(self, cost: CostCurve, learns_seconds: bool = True):
        self.costs = RoundCosts(cost, learns_seconds)
        self._outlooks: dict[int, _Outlook] = {}
        self._reach = _USUAL_REACH  # running mean: share of its open mass that a first level holds
        # Running ratio of accepted tokens to those that the trees' values promised, without and with SSMs.
        self._truths = {False: _Truth(), True: _Truth()}
        self._passes_per_level = 1.0  # running mean of rounds with drafting
        self._batch: Sequence[Request] = ()
        self._worth = [1.0]  # of a token, by request of the batch
        self._requests, self._drafted, self._reach_learned = 1, Drafted(0, 0), False
        self._deepest = 0  # level that a request of the batch has room for
        self._asks_free = False  # whether sources that cost no pass are asked in this round
        self._idle = _Idle(0, 0)

    def expects_ssms(self, requests: Sequence[Request]) -> bool:
        """Whether SSMs seem worth their time where these requests run side by side. Asked between two rounds."""
        self._requests, self._worth = len(requests), [1.0] * len(requests)
        self.costs.begin(requests)
        self._deepest = max(min(request.spec.max_depth, request.tokens_left - 1) for request in requests)
        promised = self._truths[True].value * self._reach
        return not self._outlook.ssms.resting and any(self._pays([promised] * len(requests), begins=True))

    def draft_plans(
        self,
        requests: Sequence[Request],
        max_model_len: int,
        unread: Callable[[Request], int] | None = None,
        others_wait: bool = False,
    ) -> list[DraftPlan]:
        """What to draft for each request; depth 0 where nothing is worth drafting.

        Args:
            requests: of this round.
            max_model_len: positions of the longest request.
            unread: tokens that SSMs would have to read first, summed over the SSMs; None: nothing.
            others_wait: whether a request that ends makes room for another.
        """
        self._requests, self._drafted, self._asks_free = len(requests), Drafted(0, 0), False
        self.costs.begin(requests)
        if all(request.spec.is_plain for request in requests):
            return [DraftPlan(0, 0, 1)] * len(requests)
        self._deepest = max(min(request.spec.max_depth, request.tokens_left - 1) for request in requests)
        outlook = self._outlook
        for hope in (outlook.ssms, outlook.free):
            hope.resting = max(hope.resting - 1, 0)
        adaptive = all(request.spec.is_adaptive for request in requests)
        self._batch, self._worth = requests, [1.0] * len(requests)
        if adaptive and outlook.free.resting and (self._keeps_idle() or not self._may_draft()):
            return [DraftPlan(0, 0, 1)] * len(requests)  # a round as short as plain decoding's
        if not others_wait:
            self._worth = self._worth_of_tokens(requests)
        drafts, price = [False] * len(requests), 0.0
        if not (adaptive and outlook.ssms.resting):
            # Before other sources have spoken: where SSMs are not worth a level now, they will not be later.
            promised = self._truths[True].value * self._reach
            drafts = self._pays([promised * worth for worth in self._worth], begins=True)
            price = self._price_of_an_ssm()
        plans = []
        for i, request in enumerate(requests):
            spec = request.spec
            room = max(request.room(max_model_len), 0)
            depth = min(spec.max_depth, len(spec.branching) if spec.branching else spec.max_depth, room)
            if spec.is_plain:
                depth = 0
            levels = depth
            if spec.is_adaptive and outlook.free.resting:
                depth = 0
            if spec.is_adaptive and levels:
                if outlook.ssms.resting or not drafts[i]:
                    levels = 0
                elif unread is not None:
                    levels = levels if self.costs.read(unread(request)) <= self._saving(request) else 0
            least_trust = price if spec.is_adaptive else 0.0
            plans.append(
                DraftPlan(depth, levels, spec.max_nodes, spec.branching, spec.is_adaptive, least_trust, spec.max_ssms)
            )
        self._asks_free = any(plan.max_depth for plan in plans)
        idle = adaptive and not any(plan.max_depth or plan.levels for plan in plans)
        self._idle = _Idle(len(requests), _IDLE_ROUNDS if idle else 0)
        return plans

    def _keeps_idle(self) -> bool:
        """Whether SSMs were not worth a level a few rounds ago: asked in every round, the question costs 3 % of a
        short one."""
        size, left = self._idle
        self._idle = _Idle(size, max(left - 1, 0))
        return left > 0 and size == self._requests

    @property
    def rate(self) -> float:
        """Tokens that a second is worth in this batch."""
        return max(self._outlook.gain, 1.0) * sum(self._worth) / self.costs.plain

    def _may_draft(self) -> bool:
        """Whether SSMs could pay at all: as `worth_a_level`, were all mass open and every request's level as cheap as
        one's."""
        outlook = self._outlook
        promised = self._truths[True].value * self._reach * self.costs.plain / max(outlook.gain, 1.0)
        level = self.costs.level(self._passes_per_level, self._passes_per_level)
        return not outlook.ssms.resting and self._outweighs(promised, level, self.costs.draft_start)

    def _worth_of_tokens(self, requests: Sequence[Request]) -> list[float]:
        """What a token is worth to each request of a batch that ends with its last one.

        One brings the end nearer where its request is the last; elsewhere it saves no more than that request's own
        share of a round.
        """
        count = len(requests)
        if count == 1:
            return [1.0]
        own_share = 1 - self.costs.verify(count - 1, count - 1) / self.costs.verify(count, count)
        left = [r.tokens_left * (r.target_passes + _SPEED_PRIOR) / (r.num_generated + _SPEED_PRIOR) for r in requests]
        last = max(left)
        return [own_share + (1 - own_share) * (each / last) ** _SHARPNESS for each in left]

    @property
    def least_value(self) -> float:
        """The value of a node that is worth its row of the target pass."""
        count = self._requests
        row = (self.costs.verify(count + _FEW_ROWS, count) - self.costs.verify(count, count)) / _FEW_ROWS
        return min(self.rate * row / max(self._worth), _LARGEST_VALUE)

    @property
    def _outlook(self) -> _Outlook:
        size = self._requests.bit_length()
        if size not in self._outlooks:
            self._outlooks[size] = _Outlook(2 ** (size - 1))
        return self._outlooks[size]

    def _saving(self, request: Request) -> float:
        """Seconds that SSMs may save until a request has all its tokens."""
        share = 1 - 1 / max(self._outlook.ssms.gain, 1.0)
        return request.tokens_left * self.costs.plain / self._requests * share

    def _price_of_an_ssm(self) -> float:
        """The trust that a further SSM must have: what is lost without it is a part of its share of the drafted
        tokens."""
        count = self._requests
        level = self.costs.further_ssm(count)
        return self.rate * level / max(_UNIQUE * self._truths[True].value * self._reach * count, 1e-9)

    def worth_a_level(self, trees: np.ndarray, open_mass: np.ndarray, reached: np.ndarray | None) -> np.ndarray:
        """Which trees' next level promises more tokens than its time is worth; the first one pays for the start too,
        together with those behind it. The share that a level is expected to hold of the mass that is open to it lies
        between the one that the level before it held and the usual one."""
        shares = [self._reach] * len(trees)
        if reached is not None:
            own = np.minimum(reached, 1.0)
            self._first_reach(own.tolist())
            shares = (self._reach + _OWN_SHARE * (own - self._reach)).tolist()
        truth, worth = self._truths[True].value, self._worth
        of_each = zip(open_mass.tolist(), shares, trees.tolist(), strict=True)
        promised = [truth * mass * share * worth[tree] for mass, share, tree in of_each]
        return np.array(self._pays(promised, begins=reached is None), dtype=bool)

    def _pays(self, promised: list[float], begins: bool) -> list[bool]:
        """Which trees' next level promises more than its time is worth.

        Lists, as batches are small: an operation on arrays takes longer than a loop over them.

        Args:
            promised: tokens times their worth, by tree.
            begins: whether this is the first level.
        """
        rate, passes = self.rate, self._passes_per_level
        least = rate * self.costs.further_request(passes)
        growing = [each for each in promised if each > least]
        start = self.costs.draft_start if begins else 0.0
        if not self._outweighs(sum(growing), rate * self.costs.level(passes, passes * len(growing)), rate * start):
            return [False] * len(promised)
        return [each > least for each in promised]

    def _outweighs(self, promised: float, level: float, start: float) -> bool:
        """Whether levels that promise less and less, as long as they pay for themselves, pay for the start as well.

        Args:
            promised: by the first of them.
            level, start: the price of each level and of the start, in the same unit.
        """
        gained = -start
        for _ in range(self._deepest):
            if promised <= level:
                break
            gained += promised - level
            promised *= self._reach
        return gained > 0

    def _first_reach(self, shares: list[float]) -> None:
        """Learn what a first level holds; later ones of the round say nothing of it."""
        if not self._reach_learned:
            self._reach += _REACH_MEMORY * (sum(shares) / len(shares) - self._reach)
            self._reach_learned = True

    def cut(self, requests: Sequence[Request], trees: Sequence[TokenTree], drafted: Drafted) -> list[TokenTree]:
        """Keep of each tree what its configuration asks for, or, for "auto", what pays in this batch.

        A tree with random draws stays whole: to leave one out for its token would spoil the law of the others.

        Args:
            requests, trees: side by side.
            drafted: what the SSMs did for them.
        """
        self._drafted, self._reach_learned = drafted, False
        kept = [
            tree if tree.draws.rows is not None else tree.best(request.spec.max_nodes)
            for request, tree in zip(requests, trees, strict=True)
        ]
        free = [
            i
            for i, request in enumerate(requests)
            if request.spec.is_adaptive and len(kept[i]) > 1 and kept[i].draws.rows is None
        ]
        if not free:
            return kept
        others = [len(tree) for i, tree in enumerate(kept) if i not in free]
        rows, grown = sum(others) + len(free), sum(size > 1 for size in others)
        values = [kept[i].values[1:] * self._worth[i] for i in free]
        with_nodes: np.ndarray | int = grown + 1  # trees of several nodes, once so many of the best are kept
        if len(free) == 1:
            owner, falling = None, -np.sort(-values[0])
        else:
            value = np.concatenate(values)
            order = np.argsort(-value, kind="stable")
            owner, falling = np.repeat(np.arange(len(free)), [len(own) for own in values])[order], value[order]
            first = np.zeros(len(order), dtype=np.int64)  # 1 where a request gets its first node
            first[np.unique(owner, return_index=True)[1]] = 1
            with_nodes = grown + np.cumsum(first)
        seconds = self.costs.verify_more(rows, len(falling), len(requests), with_nodes)
        if not drafted.levels:  # a guess that cost no pass may still be dropped, with the host's work on its tree
            seconds += (with_nodes - grown) * max(self.costs.host("tree") - self.costs.host("search"), 0.0)
        seconds -= self.costs.verify(rows, len(requests), grown)
        gain = self._truths[drafted.levels > 0].value * np.cumsum(falling) - self.rate * seconds
        most = int(np.argmax(gain))
        count = most + 1 if gain[most] > 0 else 0
        counts = [count] if owner is None else np.bincount(owner[:count], minlength=len(free)).tolist()
        for i, nodes in zip(free, counts, strict=True):
            kept[i] = kept[i].best(1 + nodes)
        return kept

    def observe(
        self,
        requests: Sequence[Request],
        trees: Sequence[TokenTree],
        emitted: Sequence[int],
        seconds: RoundSeconds | None = None,
    ) -> None:
        """Learn from a round: where automatic trees emit fewer tokens per second than plain decoding would, they rest.

        Args:
            requests, trees, emitted: side by side; `emitted` counts tokens.
            seconds: what the round took; None: as the cost curve says.
        """
        if not requests:
            return
        count, rows, drafted, outlook = len(requests), sum(len(tree) for tree in trees), self._drafted, self._outlook
        grown = sum(len(tree) > 1 for tree in trees)
        speculates = self._asks_free or drafted.levels > 0
        if seconds is not None:
            self.costs.learn(seconds, rows, grown, drafted, speculates or grown > 0)
        if not drafted.levels:  # what is not tried cannot be learned: hope returns slowly
            self._reach += _RECOVERY * (_USUAL_REACH - self._reach)
            self._truths[True].miss()
            outlook.ssms.miss()
        if not speculates or not any(request.spec.is_adaptive for request in requests):
            return
        rounds = self.costs.speculative(rows, grown, drafted) / self.costs.plain
        places = {request: place for place, request in enumerate(self._batch)}  # some may have failed since
        worth = [self._worth[places[request]] for request in requests]
        gain = sum(w * tokens for w, tokens in zip(worth, emitted, strict=True)) / sum(worth) / rounds
        outlook.gain += _MEMORY * (gain - outlook.gain)
        if rows > count:
            promised = sum(float(tree.values[1:].sum()) for tree in trees)
            self._truths[drafted.levels > 0].add((sum(emitted) - count) / count, promised / count)
        if drafted.levels:
            # A request that reads its prompt for itself earns it back; in a batch all wait for it.
            read = self.costs.read(drafted.read_tokens) if count > 1 else 0.0
            outlook.ssms.observe(gain, rounds, read / self.costs.plain)
            self._passes_per_level += _MEMORY * (drafted.passes / drafted.levels - self._passes_per_level)
        else:
            outlook.free.observe(gain, rounds)
