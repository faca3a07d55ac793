"""What `serve` patches of SGLang's OpenAI routes."""

from tests.stub.sglang_adapters import OpenAIServingBase

__all__ = ["OpenAIServingBase"]
