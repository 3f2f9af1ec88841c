"""The lab's drafters by name and options: valid specifications, and one-line errors for invalid
ones.
"""

import pytest

from drafting import test_names as names
from lab.drafters.cases import REGISTERED


@pytest.mark.parametrize("name", REGISTERED)
def test_options_out_of_range_are_refused(name: str) -> None:
    names.test_options_out_of_range_are_refused(name)


@pytest.mark.parametrize("name", REGISTERED)
def test_a_name_makes_a_drafter(name: str) -> None:
    names.test_a_name_makes_a_drafter(name)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cape(sizes='big')", "cape: sizes: expected one of paper, fine, found"),
        ("cape(sizes=0)", r"cape: sizes: expected an integer in 1\.\.16, found 0"),
        (
            "beam(draft_model, draft_model)",
            "beam: expected draft_model, glide or vanilla alone, found draft_model, ",
        ),
        (
            "threshold(cape(draft_model))",
            r"threshold: expected a drafter of chains, found cape; write cape\(threshold",
        ),
        (
            "cape(cape(draft_model))",
            r"cape: expected a drafter of chains, found cape; one cape is enough",
        ),
        ("cape(draft_model, draft_model)", "cape: expected one drafter of chains"),
        (
            "staged(prompt_lookup)",
            "staged: expected a draft_model and a smaller drafter, .* found prompt_lookup",
        ),
        ("staged(draft_model, suffix, suffix)", "found draft_model, suffix, suffix"),
        ("beam(prompt_lookup)", "beam: expected draft_model"),
        ("kangaroo(num_tokens=0)", "num_tokens: expected an integer in 1..64, found 0"),
        ("kangaroo(eta=1.5)", "eta: expected a number in 0..1, found 1.5"),
        ("kangaroo(model=3)", "model: expected a path, found 3"),
        ("retrieval(num_nodes=1024)", "num_nodes: expected an integer in 1..1023, found 1024"),
        ("retrieval(max_match=65)", "max_match: expected an integer in 1..64"),
        ("retrieval(max_depth=65)", "max_depth: expected an integer in 1..64"),
        ("retrieval(datastore=3)", "datastore: expected .*found 3"),
        ("retrieval(datastore='')", "datastore: expected .*found ''"),
        ("medusa(tree=0)", r"medusa: tree: expected an integer in 1\.\.1023, found 0"),
        ("medusa(tree='0 1')", r"medusa: tree: expected 1\.\.1023 paths of ranks, .* found '0 1'"),
        (
            "medusa(tree=((0,), (1, 0)))",
            r"medusa: tree: expected each path once .* found \(1, 0\) without \(1,\) before it",
        ),
        ("medusa(num_tokens=17)", r"medusa: num_tokens: expected an integer in 1\.\.16, found 17"),
        ("medusa(model=3)", "medusa: model: expected a path, found 3"),
        ("multi_token(tree=0)", r"multi_token: tree: expected an integer in 1\.\.1023, found 0"),
        ("lookahead(window=0)", "lookahead: window"),
        ("lookahead(window=1025)", "lookahead: window"),
        ("lookahead(window='wide')", "lookahead: window"),
        ("lookahead(ngram=3)", "lookahead: expected no ngram with window="),
        ("lookahead(guesses=1)", "lookahead: expected no guesses with window="),
        ("lookahead(window=3, ngram=1)", "lookahead: ngram"),
        (
            "lookahead(window=257, ngram=5)",
            r"lookahead: expected window \* \(ngram - 1\) of at most 1024, found 1028",
        ),
        (
            "lookahead(warm_up='slow')",
            "lookahead: warm_up: expected one of grow, random, found 'slow'",
        ),
        ("multi_token(num_tokens=0)", r"num_tokens: expected an integer in 1\.\.63, found 0"),
    ],
    ids=lambda value: value[:60],
)
def test_invalid_specifications_are_refused(spec: str, message: str) -> None:
    names.test_invalid_specifications_are_refused(spec, message)
