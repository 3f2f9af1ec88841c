"""A token view against a list."""

from itertools import product

import pytest

from pronk.speculation.token_view import TokenView


@pytest.mark.parametrize("split", range(6))
def test_a_view_behaves_like_a_list(split: int) -> None:
    tokens = [7, 8, 9, 7, 5]
    longer = TokenView(tokens[:split], tuple(tokens[split:]))
    assert len(longer) == len(tokens)
    assert [*longer] == tokens
    assert [*reversed(longer)] == tokens[::-1]
    places = [*range(-8, 9)]
    for place in places:
        if -5 <= place < 5:
            assert longer[place] == tokens[place]
        else:
            with pytest.raises(IndexError):
                longer[place]
    for start, stop, step in product([None, *places], [None, *places], [None, 1, 2, -1, -3]):
        assert longer[start:stop:step] == tokens[start:stop:step]
    assert (longer.index(7), longer.count(7), 5 in longer, 6 in longer) == (0, 2, True, False)
