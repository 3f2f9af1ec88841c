"""EAGLE-3 (Li et al. 2025) and MTP heads: one light layer on the target's hidden states.

:mod:`pronk.drafting.from_target.modules.eagle` has the formulas. MTP heads are part of some
checkpoints; EAGLE-3 heads are trained afterwards. The two kinds differ only in their input. With
``num_nodes`` the proposal is a tree by the rule of EAGLE-2 (Li et al. 2024, section 4.1): at each
depth, the ``beam`` likeliest nodes by the product of the head's probabilities get children, in one
pass of the head; in the end, the draft tokens of largest gain are proposed.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Self

from pronk.base.checks import check_choice, check_integer, check_path
from pronk.base.errors import (
    CheckpointError,
    ConfigError,
    OptionError,
    PronkError,
    locate_error,
    refuse,
)
from pronk.base.keywords import known_keywords
from pronk.checkpoint.config import ModelConfig
from pronk.checkpoint.gguf.checkpoint import is_gguf
from pronk.checkpoint.hub.model_identity import model_names, simplify_name
from pronk.checkpoint.hub.names import MTP_FILES
from pronk.checkpoint.tensors import open_checkpoint, read_json
from pronk.drafting.acceptance_stats import Counts, DrafterRates
from pronk.drafting.from_target._eagle_runner import EagleRunner, HeadDraft
from pronk.drafting.from_target.modules.eagle import EagleHead, load_head
from pronk.drafting.from_target.modules.eagle_config import check_clusters
from pronk.drafting.from_target.modules.eagle_names import find_mtp_names
from pronk.drafting.head_acceptance import read_head_acceptance
from pronk.drafting.planner import DEFAULT_RATE
from pronk.drafting.proposer import (
    Capabilities,
    DraftContext,
    Drafter,
    Proposer,
    check_needs,
)
from pronk.drafting.shared.chain import Chain, Stop
from pronk.drafting.shared.draft_cache import DraftCache
from pronk.drafting.shared.stepwise import (
    MAX_COUNTED,
    begin_chains,
    can_count,
    count_choices,
    extension_rule,
    model_chain_costs,
)
from pronk.drafting.shared.vocabulary.frequent import count_tokens, most_frequent
from pronk.drafting.step_costs import ChainCosts, StepCosts
from pronk.drafting.target import Target
from pronk.drafting.trie import Trie
from pronk.models.loader import describe_architecture, read_config
from pronk.models.options import WEIGHTS
from pronk.models.resolve import resolve_model
from pronk.sampling.tree import TokenTree
from pronk.sampling.tree_size import MAX_TREE

_FOLDER = "eagle3"  # folder of the default head in the target's folder
_MAX_VOCAB = 1 << 20  # no model has more tokens
# Folder of the heads that come with pronk, each in a folder with a model card.
_PACKAGED = Path(__file__).parents[2] / "heads"


class PackagedHead(NamedTuple):
    """A head that comes with pronk.

    Attributes:
        folder: folder of the head.
        target: name of the file or repository of the target that it was trained on.
        architecture: description of the target's architecture.
    """

    folder: Path
    target: str
    architecture: str


def packaged_heads() -> list[PackagedHead]:
    """Return the heads that come with pronk."""
    heads = []
    for file in sorted(_PACKAGED.glob("*/config.json")):
        settings = read_json(file, ConfigError)
        target = Path(settings["speculators_config"]["verifier"]["name_or_path"]).name
        architecture = settings["pronk"]["target"]["architecture"]
        heads.append(PackagedHead(file.parent, target, architecture))
    return heads


@known_keywords
@dataclass(frozen=True)
class Eagle3(Drafter):
    """Options of EAGLE-3.

    Attributes:
        model: folder or Hub id of a head, in the layouts of EAGLE, SpecForge, speculators or
            DeepSpec. ``None`` is the folder ``eagle3`` in the target's folder, or the head that
            comes with pronk for a model of this name.
        num_tokens: maximum number of draft tokens of a path, 1..64.
        num_nodes: maximum number of draft tokens of a tree, 1..1023; ``None`` proposes chains.
        beam: number of nodes of each depth that get children, and of children of a node, 1..16; for
            trees only.
        weights: how the weights are stored: ``"plain"``, ``"int8"`` or ``"int4"``, as for
            :class:`~pronk.llm.LLM`.
        draft_vocab: maximum number of tokens that are drafted, the most frequent ones of those that
            the head can propose, 1..1048576.
        draft_text: text file, or folder of files ``*.txt``, whose tokens are the most frequent
            ones; ``None``: frequent tokens are the first ones of the tokenizer.
        num_clusters: number of clusters into which the LM head's tokens are divided, so that a row
            computes the logits of those in the best clusters only; a divisor of the number of
            tokens, 0..1048576. 0: as in the head's file, of which most have none.
        num_best: number of clusters whose tokens get logits, 1..1048576.
    """

    name = "eagle3"
    row_options = ("num_nodes",)

    model: str | None = None
    num_tokens: int = 6
    num_nodes: int | None = None
    beam: int = 4
    weights: str = "plain"
    draft_vocab: int = 32768
    draft_text: str | None = None
    num_clusters: int = 0
    num_best: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(f"{self.name}: model", self.model)
        check_integer(f"{self.name}: num_tokens", self.num_tokens, 1, 64)
        if self.num_nodes is not None:
            check_integer(f"{self.name}: num_nodes", self.num_nodes, 1, MAX_TREE - 1)
        check_integer(f"{self.name}: beam", self.beam, 1, 16)
        check_choice(f"{self.name}: weights", self.weights, WEIGHTS)
        check_integer(f"{self.name}: draft_vocab", self.draft_vocab, 1, _MAX_VOCAB)
        check_path(f"{self.name}: draft_text", self.draft_text)
        check_integer(f"{self.name}: num_clusters", self.num_clusters, 0, _MAX_VOCAB)
        check_integer(f"{self.name}: num_best", self.num_best, 1, _MAX_VOCAB)

    def as_chains(self) -> Self:
        return replace(self, num_nodes=None)

    def find_default(self, folder: Path | None, config: ModelConfig) -> Path | None:
        """Return the folder of the default head, or ``None`` if there is none."""
        if folder is not None and (folder / _FOLDER / "config.json").is_file():
            return folder / _FOLDER
        names = model_names(folder, config)
        architecture = describe_architecture(config)
        for head in packaged_heads():
            if simplify_name(head.target) in names and head.architecture == architecture:
                return head.folder
        return None

    def bind(self, target: Target) -> Eagle3Proposer:
        folder = self._find_head(target)
        check_needs(self.name, Eagle3Proposer.capabilities, target)

        def load_runner() -> EagleRunner:
            runner = target.runner
            weights = runner.module_weights(self.weights)
            head = load_head(self.name, folder, runner.module_decoder, weights)
            self._check_device(head, target)
            if folder.parent != _PACKAGED:
                _check_target(self.name, folder, head, target)
            if head.two_stage_head is None:
                self._trim(head, target)
                self._divide(head)
            return EagleRunner(target, head)

        models = target.loaded_models
        clusters = f"{self.num_best} of {self.num_clusters}"
        kind = (self.name, self.weights, str(self.draft_vocab), str(self.draft_text), clusters)
        runner = models.get_or_load(folder, *kind, load=load_runner)
        return Eagle3Proposer(self, runner, read_head_acceptance(folder))

    def _find_head(self, target: Target) -> Path:
        """Return the folder or file of the head; raise OptionError if there is none."""
        if self.model is not None:
            return resolve_model(self.model).absolute()
        default = self.find_default(target.folder, target.decoder.config)
        if default is None:
            msg = (
                f'{self.name}: expected model="…", a folder or a Hub id of a head for this target, '
                "found none"
            )
            raise OptionError(msg)
        return default

    def _trim(self, head: EagleHead, target: Target) -> None:
        """Limit a head to ``draft_vocab`` tokens: special tokens, and the most frequent others."""
        tokens = head.tokens
        if len(tokens) <= self.draft_vocab:
            return
        tokenizer = target.tokenizer
        counts = Counter[int]()
        always = frozenset(target.decoder.config.eos_ids)
        if tokenizer is not None:
            always |= tokenizer.added_ids
        if self.draft_text is not None:
            where = f"{self.name}: draft_text"
            if tokenizer is None:
                refuse(where, "expected a target with a tokenizer, found none", OptionError)
            counts = count_tokens(Path(self.draft_text).expanduser(), tokenizer, where)
        head.trim(most_frequent(tokens, self.draft_vocab, always, counts))

    def _check_device(self, head: EagleHead, target: Target) -> None:
        """Refuse a head that the target's device does not compute."""
        with locate_error(self.name, OptionError, OptionError):
            target.runner.draft_pool(head.config)
        if not target.cache.is_in_memory and (self.num_clusters or head.two_stage_head):
            msg = (
                f"{self.name}: expected a head of one stage for a target on another device, found "
                "clusters of tokens; leave num_clusters out, or use device='cpu'"
            )
            raise OptionError(msg)

    def _divide(self, head: EagleHead) -> None:
        """Divide the LM head into ``num_clusters`` clusters of tokens with similar rows."""
        if not self.num_clusters:
            return
        with locate_error(self.name, ConfigError, OptionError):
            check_clusters("num_clusters", self.num_clusters, len(head.tokens))
        head.divide(self.num_clusters, min(self.num_best, self.num_clusters), self.weights)


@known_keywords
@dataclass(frozen=True)
class Mtp(Eagle3):
    """Options of MTP: those of :class:`Eagle3`.

    Attributes:
        model: folder, Hub id or GGUF file with a head. ``None`` is the head in the target's own
            folder or file, or for a GGUF file the head in a file ``mtp-*.gguf`` beside it.
        num_tokens: maximum number of draft tokens of a path, 1..64.
    """

    name = "mtp"
    row_options = ("num_nodes",)

    num_tokens: int = 3

    def find_default(self, folder: Path | None, config: ModelConfig) -> Path | None:
        """Return the target's folder or file if it has an MTP head; ``None`` if there is none.

        llama.cpp's converter also writes the head alone, to a file ``mtp-*.gguf``. Such a file
        beside a GGUF file is used if it is of the target's architecture; of several, the first one
        by name. A file that cannot be read is left out with a warning.
        """
        if folder is None:
            return None
        # The error is raised if the files have changed since the target was loaded.
        with suppress(CheckpointError):
            if find_mtp_names(tuple(open_checkpoint(folder))) is not None:
                return folder
        if not is_gguf(folder):
            return None
        architecture = describe_architecture(config)
        for file in sorted(folder.parent.glob(MTP_FILES)):
            try:
                found = describe_architecture(read_config(file))
            except PronkError as error:
                warnings.warn(f"{self.name}: head left out: {error}", stacklevel=2)
                continue
            if found == architecture:
                return file
        return None


class Eagle3Proposer(Proposer[DraftCache]):
    """Proposes chains or trees; ``runner`` runs the head."""

    capabilities = Capabilities(computes_features=True, observes_all_steps=False)

    def __init__(self, options: Eagle3, runner: EagleRunner, acceptance: Counts) -> None:
        """Create a proposer; ``acceptance`` are the counts that travel with the head."""
        self.options = options
        self.runner = runner
        self.name = options.name
        self.target = runner.target
        self.models = (runner,)
        self.model_name = options.model
        self.known_acceptance = {self.label: acceptance}

    def start(self, prompt: Sequence[int]) -> DraftCache:  # noqa: ARG002 - the first proposal reads it
        return self.runner.module.make_cache()

    def stop(self, state: DraftCache) -> None:
        state.release()

    on_preempt = stop  # for a preempted request, the next proposal fills new blocks

    def chains(
        self, contexts: Sequence[DraftContext[DraftCache]], stops: Sequence[Stop] | None = None
    ) -> list[Chain]:
        chains = begin_chains(self, contexts, self.options.num_tokens, stops=stops)
        self.runner.draft_chains([chain for chain in chains if not chain.is_full])
        return chains

    def propose(self, contexts: Sequence[DraftContext[DraftCache]]) -> list[TokenTree]:
        if self.options.num_nodes is None:
            return [chain.tree() for chain in self.chains(contexts)]
        return self._propose_trees(contexts)

    def _propose_trees(self, contexts: Sequence[DraftContext[DraftCache]]) -> list[TokenTree]:
        """Propose a tree for each request, with one pass of the head per depth of all trees."""
        # A request that does not draft keeps the tree of its root alone.
        trees = [Chain(context, self.label).tree() for context in contexts]
        active = {
            number: context
            for number, context in enumerate(contexts)
            if extension_rule(self, context)(())
        }
        drafts = self.runner.begin(active, self.options.num_tokens * self.options.beam)
        searches = {
            number: _Search(draft, self.options, self.label) for number, draft in drafts.items()
        }
        live = [*searches.values()]
        while live := [search for search in live if search.expand() and self._pays(search)]:
            for search in live:
                search.add_best()
            self.runner.extend([search.draft for search in live])
        for number, search in searches.items():
            trees[number] = search.trie.tree(search.max_nodes)
        self.runner.end([*drafts.values()])
        return trees

    def score_history(self, context: DraftContext[DraftCache]) -> bool:
        if not can_count(context, context.root - 1 - len(context.state.tokens)):
            return False
        read = self.runner.read(context, MAX_COUNTED)
        if read is None:
            return False
        count_choices(self.label, context, *read)
        return True

    def _pays(self, search: _Search) -> bool:
        """Return whether a pass of the head for the best nodes is expected to save time."""
        context = search.draft.context
        plan = context.plan
        chain = plan.chain
        if chain is None and plan.costs is not None:
            chain = self.chain_costs(context, plan.costs)
        rate = context.acceptance.rates(self.chain_label).mean(DEFAULT_RATE)
        more = [node.gain * rate for node in search.best]
        return plan.another_pass_pays(search.trie.gains[1:], more, chain, search.depth)

    def chain_costs(self, context: DraftContext[DraftCache], costs: StepCosts) -> ChainCosts:
        num_unread = max(0, context.block_table.length - len(context.state.tokens) - 1)
        return model_chain_costs(self.runner, context, costs, self.options.num_tokens, num_unread)


class _Node(NamedTuple):
    """A draft token of a tree that grows.

    Attributes:
        number: the node in ``_Search.trie``.
        parent_row: node of its parent in ``_Search.draft``.
        gain: probability that verification reaches and accepts the node.
        probability: product of the head's probabilities of the tokens in ``path``.
        path: draft tokens from below the root to this one.
    """

    number: int
    parent_row: int
    gain: float
    probability: float
    path: tuple[int, ...]


@dataclass
class _Search:
    """Growth of one request's tree, depth by depth.

    Attributes:
        draft: rows of the nodes that get children.
        options: options of the drafter.
        label: label of the drafter in the tree's origins.
        depth: depth of the deepest nodes.
        best: the likeliest nodes of this depth, at most ``options.beam``.
    """

    draft: HeadDraft
    options: Eagle3
    label: str
    depth: int = 0
    best: list[_Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        context = self.draft.context
        self.trie = Trie(context.tokens[-1])
        self.max_nodes = min(self.options.num_nodes or 0, context.max_nodes)
        self._max_depth = min(self.options.num_tokens, context.max_depth)
        self._rates = context.acceptance.rates(self.label)
        root = _Node(number=0, parent_row=-1, gain=1.0, probability=1.0, path=())
        root_row = len(self.draft.outputs) - 1
        # Computed nodes without children, each with its own node in ``draft``.
        self._level: list[tuple[int, _Node]] = [(root_row, root)]

    def expand(self) -> bool:
        """Add the likeliest children of the computed nodes to the tree.

        Return whether the depth limit allows children of these children.
        """
        self.depth += 1
        found = list[_Node]()
        for row, parent in self._level:
            for token, probability in self._children(row, parent.path):
                kind = DrafterRates.confidence_kind(probability)
                gain = self.trie.gains[parent.number] * self._rates.rate(kind, self.depth)
                number = self.trie.add(parent.number, token, gain, (self.label, kind))
                product = parent.probability * probability
                found.append(_Node(number, row, gain, product, (*parent.path, token)))
        found.sort(key=lambda node: -node.probability)
        self.best = found[: self.options.beam]
        return bool(found) and self.depth < self._max_depth

    def add_best(self) -> None:
        """Add the likeliest nodes of this depth to the next pass of the head."""
        self._level = [(self.draft.add(node.parent_row, node.path[-1]), node) for node in self.best]

    def _children(self, row: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        """Return the likeliest tokens after a computed node, with their probabilities.

        ``row`` is the node in ``draft``, and ``path`` are the draft tokens up to this node.
        """
        sampler = self.draft.context.sampler
        with sampler.after(path):
            logits = self.draft.logits[row]
            drawn = sampler.draft_token(
                logits.values, self.draft.context.root, draw=False, ids=logits.ids
            )
        return [] if drawn is None else drawn.top_tokens(self.options.beam)


def _check_target(drafter: str, folder: Path, head: EagleHead, target: Target) -> None:
    """Refuse a head of another architecture, and warn about one of another target."""
    own = head.eagle.fingerprint
    # Computed only if needed, because it reads a part of every tensor of the target.
    fingerprint = None if own is None else target.fingerprint
    if own is None or fingerprint is None:
        _check_target_name(drafter, folder, head, target)
        return
    if own.architecture != fingerprint.architecture:
        msg = (
            f"{drafter}: {folder.name}: expected a head of this target ({fingerprint}), found "
            f"one of {own}"
        )
        raise OptionError(msg)
    if own.weights != fingerprint.weights and not target.matches(own):
        warnings.warn(
            f"{drafter}: {folder.name} was trained on {own}, which is not this target",
            stacklevel=4,
        )


def _check_target_name(drafter: str, folder: Path, head: EagleHead, target: Target) -> None:
    """Warn if a head without a fingerprint names another target than this one."""
    verifier = head.eagle.verifier
    if verifier is None or target.folder is None:
        return
    names = model_names(target.folder, target.decoder.config)
    names |= {simplify_name(part) for part in target.folder.parts}
    if simplify_name(Path(verifier).name) not in names:
        found = target.folder.name
        warnings.warn(
            f"{drafter}: {folder.name} was trained on {verifier}, found {found}", stacklevel=5
        )
