"""Predicted outputs: propose the text that the client expects, and find it again after an edit.

A request may have a *prediction* (``SamplingParams.prediction``), such as the file that the model
is asked to change. :class:`~pronk.drafting.shared.alignment.Alignment` says where the output
stands in it. The draft tokens are those of the prediction from there on. Between an edit and the
next reliable match there are two places to continue, and a chain of draft tokens from each.

Requests without a prediction get no draft tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from pronk.base.checks import check_integer
from pronk.base.keywords import known_keywords
from pronk.drafting.proposer import Capabilities, DraftContext, Proposer
from pronk.drafting.shared.alignment import Alignment, Place
from pronk.drafting.trie import Trie
from pronk.sampling.params import SamplingParams
from pronk.sampling.tree import TokenTree
from pronk.sampling.tree_size import MAX_TREE

# Acceptance rates are measured by *kind* of draft token, the class of the match before it, in which
# earlier draft tokens of the chain count: 0, 1, 2 or 3, 4 to 7, 8 or more tokens. These are the
# bounds between the classes.
_MATCH_BOUNDS = (1, 2, 4, 8)

# Rates before any measurement, measured on corrections of 164 Python functions.
PRIORS = dict(enumerate((0.1, 0.6, 0.87, 0.97, 0.97)))


@dataclass
class PredictionState:
    """State of one request; its alignment is made at the first proposal."""

    alignment: Alignment | None = None


@known_keywords
@dataclass(frozen=True)
class Prediction(Proposer[PredictionState]):
    """Options of the drafter of predicted outputs.

    Attributes:
        num_tokens: maximum number of draft tokens per step, 1..1023.
    """

    name = "prediction"
    row_options = ("num_tokens",)
    # The tokens of steps without a proposal are in the next context.
    capabilities = Capabilities(observes_all_steps=False)

    num_tokens: int = 31

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, MAX_TREE - 1)

    def drafts_for(self, params: SamplingParams) -> bool:
        return bool(params.prediction)

    def start(self, prompt: Sequence[int]) -> PredictionState:  # noqa: ARG002 - the context has it
        return PredictionState()

    def propose(self, contexts: Sequence[DraftContext[PredictionState]]) -> list[TokenTree]:
        return [self._build_tree(context) for context in contexts]

    def _build_tree(self, context: DraftContext[PredictionState]) -> TokenTree:
        trie = Trie(context.tokens[-1])
        max_nodes = min(self.num_tokens, context.max_nodes)
        if self.drafts_for(context.params) and max_nodes > 0:
            alignment = self._align(context)
            for place in alignment.places():
                self._add_chain(trie, alignment.prediction, place, context)
        return trie.tree(max_nodes)

    def _align(self, context: DraftContext[PredictionState]) -> Alignment:
        """Return the alignment of the prediction with the output and any draft tokens after it.

        The state keeps that of the output alone.
        """
        prediction = context.params.prediction
        assert prediction is not None
        assert not isinstance(prediction, str), "expected token ids, which the engine sets"
        state = context.state
        if state.alignment is None:
            state.alignment = Alignment(prediction)
        start = context.sampler.context.num_prompt
        known = start + state.alignment.num_tokens
        state.alignment.extend(context.tokens[known : context.root + 1])
        lead = context.tokens[context.root + 1 :]
        return state.alignment.after(lead) if lead else state.alignment

    def _add_chain(
        self,
        trie: Trie,
        prediction: Sequence[int],
        place: Place,
        context: DraftContext[PredictionState],
    ) -> None:
        """Add the prediction's tokens from a place on, as long as they are worth their rows.

        A node's gain is the product of the acceptance rates on its path.
        """
        rates = context.acceptance.rates(self.name, PRIORS)
        max_depth = min(self.num_tokens, context.max_depth)
        node = 0
        for depth, token in enumerate(prediction[place.position : place.position + max_depth]):
            kind = bisect_right(_MATCH_BOUNDS, place.match + depth)
            gain = trie.gains[node] * rates.rate(kind, depth + 1)
            if not context.plan.wants(gain, len(trie) - 1):
                break
            node = trie.add(node, token, gain, (self.name, kind))
