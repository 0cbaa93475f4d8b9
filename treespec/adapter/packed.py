"""Replacement of a loaded model's linear layers by row-invariant ones."""

import torch
from torch import Tensor, nn

from treespec_kernels.linear.linear import Linear, onednn_available


class PackedLinear(nn.Module):
    """Linear layer with weights reordered for oneDNN."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.linear = Linear(weight.detach(), None if bias is None else bias.detach(), "onednn")
        self.nbytes = self.linear.nbytes
        self.weight = torch.empty_like(weight, device="meta")  # model code may read its dtype or shape

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if len(rows) == 1:  # oneDNN uses another kernel for a single row of some shapes
            return self.linear(rows.expand(2, -1).contiguous())[:1].view(*x.shape[:-1], self.out_features)
        return self.linear(rows.contiguous()).view(*x.shape[:-1], self.out_features)


def pack(model: nn.Module) -> None:
    """Replace all plain linear layers by packed ones, one at a time to bound peak memory."""
    from transformers.pytorch_utils import Conv1D

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear or type(child) is Conv1D:
                weight, bias = child.get_parameter("weight"), getattr(child, "bias", None)
                if onednn_available(weight.dtype):
                    with torch.inference_mode(False), torch.no_grad():
                        setattr(module, name, PackedLinear(weight if type(child) is nn.Linear else weight.t(), bias))
