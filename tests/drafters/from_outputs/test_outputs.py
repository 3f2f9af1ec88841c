"""The likeliest tokens at each node, against a full sort."""

import pytest
import torch

from pronk.drafters import Outcome
from pronk.drafters.from_outputs._likeliest import initial_draft_token, top_tokens
from pronk.sampling.params import SamplingParams
from pronk.speculation.tree import TokenTree


def outcome(logits: torch.Tensor, **params: object) -> Outcome[None]:
    tree = TokenTree.chain(range(len(logits)))
    return Outcome(None, tree, (), (), 0, SamplingParams(**params), logits)  # type: ignore[arg-type]


@pytest.mark.parametrize("vocab", [3, 127, 128, 300, 1000, 8192, 32003])
@pytest.mark.parametrize("count", [1, 2, 4, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_likeliest_tokens_equal_a_full_sort(vocab: int, count: int, dtype: torch.dtype) -> None:
    """Up to 8 tokens: among equal logits, frequent in bfloat16, the smallest token ids are chosen."""
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    want = logits.float().sort(dim=-1, descending=True, stable=True)
    found = top_tokens(outcome(logits), count)
    assert len(found[0]) == min(count, vocab)
    values = logits.float().gather(1, torch.tensor(found))
    assert torch.equal(values, want.values[:, :count])
    assert all(len(set(row)) == len(row) for row in found)
    if count <= 8:
        assert found == want.indices[:, :count].tolist()


def test_selected_nodes_and_a_logit_bias() -> None:
    logits = torch.randn(4, 900, generator=torch.Generator().manual_seed(0))
    whole = top_tokens(outcome(logits), 3)
    assert top_tokens(outcome(logits), 3, [2, 0]) == [whole[2], whole[0]]
    biased = top_tokens(outcome(logits, logit_bias={7: 100.0, whole[1][0]: -100.0}), 2)
    assert all(row[0] == 7 for row in biased)
    assert biased[1][1] == whole[1][1]


def test_initial_draft_tokens_are_tokens_of_the_prompt() -> None:
    prompt = [5, 6, 7, 8, 9]
    assert {initial_draft_token(prompt, position) for position in range(5)} == set(prompt)
    assert initial_draft_token([3], 10**6) == 3
