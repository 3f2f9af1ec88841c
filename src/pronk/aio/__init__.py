"""Models for asyncio."""

from pronk.aio.llm import AsyncLLM as AsyncLLM
from pronk.aio.llm import Load as Load
