"""What calls return, under vLLM's module name."""

from treespec.request import CompletionOutput, RequestMetrics, RequestOutput, StreamChunk

__all__ = ["CompletionOutput", "RequestMetrics", "RequestOutput", "StreamChunk"]
