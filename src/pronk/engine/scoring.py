"""How likely a model finds whole alternatives: a trie of them is a tree like any other, computed in one pass.

::

    is it …    yes            ── yes
               no        =       no ── way
               no way

A request reads the prompt up to its last token, which it is told to choose. In the next step it *guesses* the trie
below that token, and hears the logits of every node. No guess is ever accepted: the request is told to end there. Rows
do not depend on what is computed beside them, so the sums are those of each alternative alone, to the bit.

The last token of an alternative needs no row. Tries of more rows than a tree may have are split among several requests,
which start from the first one's cache and share its passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pronk.drafters.shared.trie import Trie
from pronk.engine.engine import Engine
from pronk.engine.request import Request
from pronk.engine.request_factory import RequestFactory
from pronk.errors import CacheFullError, OptionError, PromptError, PronkError
from pronk.sampling.params import SamplingParams
from pronk.sampling.sampler import NotFiniteError, Sampler, is_finite
from pronk.speculation.proposer import DraftContext, Needs, Outcome, Proposer
from pronk.speculation.tree import TokenTree

__all__ = ["score"]

Tokens = tuple[int, ...]


def score(
    engine: Engine, request_factory: RequestFactory, prompt: Sequence[int], alternatives: Sequence[Sequence[int]]
) -> list[float]:
    """Sums of log-probabilities of each alternative's tokens after a prompt.

    Args:
        engine: which computes.
        request_factory: of its model.
        prompt: token ids, at least two.
        alternatives: token ids, at least one in each.

    Raises:
        PromptError: the prompt has a single token, or an alternative is too long for a tree or for the model.
        CacheFullError: the cache has no room for the alternatives.
        PronkError: logits were not finite; others are those of :meth:`~pronk.engine.engine.Engine.run`.
    """
    if len(prompt) < 2:
        msg = "choose: expected a prompt of at least two tokens, found one; put something before it"
        raise PromptError(msg)
    most, longest = engine.scheduler.max_tree - 1, max(map(len, alternatives))
    if longest - 1 > most:
        msg = f"choose: expected alternatives of at most {most + 1} tokens, found one of {longest}; make it shorter"
        raise PromptError(msg)
    wanted = sorted({tuple(each) for each in alternatives})
    found: dict[Tokens, float] = {}
    while missing := [each for each in wanted if each not in found]:
        scorers = [_Scorer(part) for part in _parts(missing, most)]
        engine.run(_requests(request_factory, prompt, scorers))
        heard = {key: value for scorer in scorers for key, value in scorer.scores().items()}
        if not heard.keys() - found.keys() and not (engine.scheduler.running or engine.scheduler.waiting):
            msg = "choose: the cache has no room for the alternatives behind the prompt; give it more kv_memory"
            raise CacheFullError(msg)
        found.update(heard)
    return [found[tuple(each)] for each in alternatives]


class _ScriptedSampler(Sampler):
    """Chooses what it is told to: the prompt's last token, and then an end."""

    told: tuple[int, int]

    def choose(self, logits: Tensor) -> int:  # noqa: ARG002 - they are not asked
        """The next of them."""
        return self.told[min(self.context.num_chosen, 1)]


def _requests(request_factory: RequestFactory, prompt: Sequence[int], scorers: Sequence[_Scorer]) -> list[Request]:
    last = prompt[-1]
    end = 0 if last else 1
    depth = max(scorer.depth for scorer in scorers)
    try:
        params = SamplingParams(max_tokens=depth + 2, ignore_eos=True, stop_token_ids=[end])
        requests: list[Request] = []
        for scorer in scorers:
            parent = requests[0] if requests else None
            requests.append(
                request_factory.request(prompt[:-1], params, scorer, parent=parent, sampler=_ScriptedSampler)
            )
    except OptionError as error:
        msg = f"choose: expected room for {depth + 1} tokens behind the prompt of {len(prompt)}, found less"
        raise PromptError(msg) from error
    for request in requests:
        assert isinstance(request.sampler, _ScriptedSampler)
        request.sampler.told = (last, end)
    return requests


def _parts(alternatives: Sequence[Tokens], most: int) -> list[list[Tokens]]:
    """Neighbours together, as they begin alike, in parts whose tries have at most ``most`` nodes to be computed."""
    parts, nodes, last = list[list[Tokens]](), 0, Tokens()
    for each in alternatives:
        shared = next(
            (place for place, pair in enumerate(zip(last, each, strict=False)) if pair[0] != pair[1]), len(last)
        )
        new = len(each) - 1 - max(0, min(shared, len(last) - 1))
        if not parts or nodes + new > most:
            parts.append([])
            nodes, new = 0, len(each) - 1
        nodes, last = nodes + max(0, new), each
        parts[-1].append(each)
    return parts


@dataclass(eq=False)
class _Scorer(Proposer[list[int]]):
    """Guesses the trie of some alternatives, and hears what the target says of its nodes.

    Attributes:
        alternatives: whose log-probabilities it is to find.
        rows: logits after each beginning of an alternative that was computed.
    """

    name = "choose"
    needs = Needs(logits=True)
    bypass_budget = True

    alternatives: Sequence[Tokens]
    rows: dict[Tokens, Tensor] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """Of the trie's nodes."""
        return max(len(each) - 1 for each in self.alternatives)

    def start(self, prompt: Sequence[int]) -> list[int]:
        """The tokens that the tries hang below, once they are there."""
        return [*prompt]

    def propose(self, contexts: Sequence[DraftContext[list[int]]]) -> list[TokenTree]:
        """The trie, whole."""
        return [self._tree(context.tokens[-1]) for context in contexts]

    def observe(self, outcome: Outcome[list[int]]) -> None:
        """Take the logits of the step that had the trie."""
        if outcome.position < len(outcome.state):
            return  # the prompt's pass
        assert outcome.logits is not None
        tree = outcome.tree
        for node in range(len(tree)):
            self.rows[tuple(tree.tokens[step] for step in tree.path(node))] = outcome.logits[node].clone()

    def scores(self) -> dict[Tokens, float]:
        """Of those alternatives of whose beginnings all have been computed.

        Raises:
            PronkError: logits were not finite.
        """
        said = {beginning: self._logprobs(beginning) for beginning in self.rows}
        return {
            each: sum(said[each[:place]][token] for place, token in enumerate(each))
            for each in self.alternatives
            if all(each[:place] in said for place in range(len(each)))
        }

    def _logprobs(self, beginning: Tokens) -> dict[int, float]:
        """Of the tokens that come next in an alternative."""
        row = self.rows[beginning].float()
        if not is_finite(row):
            msg = "choose: expected finite logits, found others"
            raise PronkError(msg) from NotFiniteError()
        size = len(beginning)
        following = {each[size] for each in self.alternatives if len(each) > size and each[:size] == beginning}
        logprobs = row.log_softmax(0)
        return {token: float(logprobs[token]) for token in following}

    def _tree(self, root: int) -> TokenTree:
        trie = Trie(root)
        for each in self.alternatives:
            node = 0
            for token in each[:-1]:
                node = trie.add(node, token, 1.0, ("", 0))
        tree = trie.tree(len(trie))
        # Without gains, none of them is weighed against its row.
        return TokenTree(tree.tokens, tree.parents)
