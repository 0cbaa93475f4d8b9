"""The rounds of a streamed request, for its client."""

from collections import deque
from dataclasses import replace
from typing import Any

from treespec.drawing.recording import picture
from treespec.engine.round_record import RoundRecord
from treespec.llm import LLM

_KEPT = 256  # rounds that the client has not read; a slow one misses the oldest
_CONTEXT = 16  # tokens before the root, for the texts of the nodes


class RoundFeed:
    """Collects the rounds of one request until `close`.

    Args:
        llm: the LLM to observe.
        request_id: as in `RequestOutput`.
    """

    def __init__(self, llm: LLM, request_id: str):
        self._tokenizer, self._request_id = llm.get_tokenizer(), request_id
        self._records: deque[RoundRecord] = deque(maxlen=_KEPT)
        self._handle = llm.add_round_observer(self._add)

    def _add(self, record: RoundRecord) -> None:
        if record.request_id == self._request_id:
            self._records.append(replace(record, context=record.context[-_CONTEXT:]))

    def take(self) -> list[dict[str, Any]]:
        """Return the rounds since the last call: `RoundRecord.as_dict` with the texts of nodes and bonus token."""
        rounds = []
        while self._records:
            record = self._records.popleft()
            drawn = picture(record, self._tokenizer)
            document = record.as_dict() | {"texts": drawn.tokens, "bonus_text": drawn.bonus}
            del document["request_id"], document["context"]
            rounds.append(document)
        return rounds

    def close(self) -> None:
        """Stop observing. Idempotent."""
        self._handle.remove()
