"""What observers of rounds are told, beside what requests put out."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from treespec import RoundRecord
from treespec.outputs import RequestOutput


def assert_tell(records: Sequence[RoundRecord], outputs: Sequence[RequestOutput], decided_anew: bool = False) -> None:
    """The records of each sample are its output, round by round, and its metrics, which do not come from them.

    A captured round that is decided anew counts twice in the metrics.
    """
    for output in outputs:
        of_request = [record for record in records if record.request_id == output.request_id]
        accepted, alone = Counter[str](), Counter[str]()
        for completion in output.outputs:
            written: list[int] = []
            for number, each in enumerate((r for r in of_request if r.index == completion.index), start=1):
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
                for node in path[1:].tolist():
                    accepted.update(names := tree.sources_of(node))
                    alone.update(names if len(names) == 1 else ())
                written += each.emitted
            assert written == completion.token_ids
        metrics, nodes = output.metrics, sum(len(each.tree) for each in of_request)
        assert (metrics.accepted_by_source, metrics.accepted_only_by_source) == (dict(accepted), dict(alone))
        assert decided_anew or (metrics.target_passes, metrics.nodes_verified) == (len(of_request), nodes)
