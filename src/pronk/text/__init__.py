"""Text and tokens: the tokenizer, chat templates, and the dialects of tool calls and thoughts."""

from pronk.base.lazy import export

__getattr__, __dir__, __all__ = export(__name__, __file__)
