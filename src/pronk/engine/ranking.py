"""Relevance of documents to a query, as a decoder judges it: the probability of its answer "yes".

The question is that of Qwen3-Reranker (Zhang et al. 2025, "Qwen3 Embedding", section 2), in the
chat template of the model: a system message asks whether the document meets the requirements of the
query and the instruction, and allows the answers "yes" and "no" only. With the template of
Qwen3-Reranker the prompt is that of its authors, byte for byte. Any other model with a chat
template gets the same question, but was not trained on it.

The score of a document is ``exp(yes) / (exp(yes) + exp(no))``, of the logits of both words as first
token of the answer. A score depends on its own query and document alone: documents are separate
prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pronk.base.errors import TokenizerError
from pronk.engine.outputs import Choice
from pronk.sampling.params import SamplingParams
from pronk.text.chat.messages import thinking_options
from pronk.text.chat.system_messages import has_system_role, place_system_messages
from pronk.text.tokenizer import Tokenizer

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
# The instruction of Qwen3-Reranker for requests without one.
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class RelevanceQuestion:
    """Question whether a document answers a query, and reader of the score in a model's answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def options(self) -> dict[str, Any]:
        """Variables of the chat template that switch off thoughts.

        Without thoughts, the first token is the answer.
        """
        return thinking_options("none")

    def messages(
        self, query: str, document: str, instruction: str | None = None
    ) -> list[dict[str, Any]]:
        """Return the conversation that asks whether a document answers a query.

        ``instruction`` says what relevance means; ``None`` is :data:`DEFAULT_INSTRUCTION`.
        """
        asked = DEFAULT_INSTRUCTION if instruction is None else instruction
        content = f"<Instruct>: {asked}\n<Query>: {query}\n<Document>: {document}"
        messages = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": content},
        ]
        placed = place_system_messages(messages, first=self._has_system_role, anywhere=False)
        return [dict(message) for message in placed]

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters: one token, with the log-probabilities of both answers."""
        return SamplingParams(
            max_tokens=1, logprobs=0, logprob_token_ids=self.answer_ids, ignore_eos=True
        )

    @cached_property
    def answer_ids(self) -> tuple[int, int]:
        """Token ids of the answers "yes" and "no".

        Raises:
            TokenizerError: the words have no different last tokens.
        """
        yes, no = (
            self._tokenizer.encode(word, add_special_tokens=False)[-1] for word in ("yes", "no")
        )
        if yes == no:
            msg = (
                "score: expected a token for each of yes and no, found a shared one; "
                "use another model"
            )
            raise TokenizerError(msg)
        return yes, no

    def score(self, report: Mapping[int, float]) -> float:
        """Return the relevance of a document, from 0 to 1.

        Args:
            report: log-probabilities of the answer's first token, by token id; has those of
                :attr:`answer_ids`.
        """
        yes, no = self.answer_ids
        choice = Choice(("yes", "no"), (report[yes], report[no]))
        return choice.probabilities[0]

    @cached_property
    def _has_system_role(self) -> bool:
        return has_system_role(self._tokenizer.chat)
