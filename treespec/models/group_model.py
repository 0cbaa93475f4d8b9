"""Models that may grow a token tree together."""

from typing import TypeAlias

from treespec.models.block_draft import BlockDraft
from treespec.models.decoder import Decoder
from treespec.models.feature_head import FeatureHead

StepModel: TypeAlias = Decoder | FeatureHead  # scores the nodes of every level in a pass
GroupModel: TypeAlias = StepModel | BlockDraft
