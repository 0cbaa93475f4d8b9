"""Every causal architecture of the installed transformers, tiny and random, against the table in docs/models.md."""

import pytest
import transformers

from tests.helpers.models import quick
from tests.helpers.walk import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, documented, outcome_of

DOCUMENTED = "5.24."  # the release of transformers whose architectures are in the table
QUICK = ("smollm3", "mamba", "bloom", "dbrx")


@pytest.mark.parametrize("model_type", quick(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, QUICK))
def test_architecture(model_type: str) -> None:
    """Its tokens are those of transformers, plainly and in trees, whose logits have the bits of plain decoding; or it
    is refused for the documented reason."""
    outcome = outcome_of(model_type)
    if transformers.__version__.startswith(DOCUMENTED):
        assert outcome.row == documented()[model_type], f"{outcome.message}; python -m tests.helpers.walk"


def test_the_table_is_of_existing_architectures() -> None:
    if transformers.__version__.startswith(DOCUMENTED):
        assert set(documented()) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
