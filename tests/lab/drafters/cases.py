"""The lab's drafters for the engine's tests of all drafters, which this folder's tests of the same
names run.
"""

from functools import cache

from drafting.from_draft import drafts
from lab.drafters import trained_glide, trained_kangaroo, trained_medusa, trained_multi_token
from lab.drafters.stores import conformance_spec
from pronk.drafting import REGISTRY
from pronk.drafting.registry import DRAFTERS as ENGINE

REGISTERED = [name for name in REGISTRY if name not in ENGINE]
# Drafters of the engine with parts of the lab, and drafters of the lab with other options or parts.
COMPOSED = (
    "merged",
    "first_of",
    "auto",
    "lookahead, filled",
    "cape of kangaroo",
    "merged with trained",
)
DRAFTERS = [*REGISTERED, *COMPOSED]


@cache
def specs() -> dict[str, str]:
    """Return the specifications of the drafters in :data:`DRAFTERS` that need options."""
    model = drafts.spec()
    cape = f"cape(threshold({model}))"
    kangaroo = trained_kangaroo.spec()
    medusa = trained_medusa.spec()
    return {
        "lookahead": "lookahead(window=4, ngram=3, guesses=5)",
        "gauss_seidel": "gauss_seidel(num_tokens=5)",
        "retrieval": conformance_spec(),
        "staged": f"staged({model}, prompt_lookup(min_ngram=1))",
        "cape": cape,
        "beam": f"beam({model}, width=3)",
        "multi_token": trained_multi_token.spec(),
        "medusa": medusa,
        "kangaroo": kangaroo,
        "glide": trained_glide.spec(),
        "vanilla": trained_glide.spec("vanilla"),
        "merged": (
            "merged(prompt_lookup(min_ngram=1), recycling(shared=True), lookahead(window=2), "
            "num_nodes=20)"
        ),
        "first_of": (
            "first_of(prompt_lookup(max_ngram=3), lookahead(window=3, ngram=3), gauss_seidel)"
        ),
        "auto": f"auto({cape}, {medusa})",
        "lookahead, filled": "lookahead(window=4, ngram=3, guesses=5, warm_up='random')",
        "cape of kangaroo": f"cape({kangaroo})",
        "merged with trained": f"merged(prompt_lookup(min_ngram=1), {medusa}, {kangaroo})",
    }


def spec(name: str) -> str:
    """Return the specification of a drafter in :data:`DRAFTERS`."""
    return specs().get(name, name)
