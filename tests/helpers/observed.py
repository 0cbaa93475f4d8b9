"""What observers of rounds are told, beside what requests put out."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from treespec import RoundRecord
from treespec.outputs import RequestOutput


def assert_tell(records: Sequence[RoundRecord], outputs: Sequence[RequestOutput]) -> None:
    """The records of each sample are its output, round by round, and its metrics, which do not come from them."""
    for output in outputs:
        for completion in output.outputs:
            own = [r for r in records if (r.request_id, r.index) == (output.request_id, completion.index)]
            written, accepted = list[int](), Counter[str]()
            for number, each in enumerate(own, start=1):
                tree, path = each.tree, each.path
                tree.check_integrity()
                assert each.number == number
                assert [*each.context, int(tree.tokens[0])] == [*output.prompt_token_ids, *written]
                assert path[0] == 0 and (tree.parents[path[1:]] == path[:-1]).all()
                assert each.accepted == len(path) - 1 and each.seconds > 0
                assert bool(each.plain_reasons) == (len(tree) == 1)
                assert ((tree.probs >= 0) & (tree.probs <= 1)).all()
                by_path = [np.prod(tree.probs[tree.path_to(node)]) for node in range(len(tree))]
                assert np.allclose(tree.values, by_path, rtol=1e-5)
                accepted.update(name for node in path[1:].tolist() for name in tree.sources_of(node))
                written += each.emitted
            assert written == completion.token_ids
            if len(output.outputs) == 1:
                assert output.metrics.accepted_by_source == dict(accepted)
