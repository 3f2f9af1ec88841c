"""Whatever fits the schema, and whatever does not: never an error of the server's own, never without an answer."""

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from server.serving import KEY, Running

ROUTES = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/moderations",
    "/tokenize",
    "/detokenize",
    "/v1/models/{name}",
]
# Every path is a name of a model. Bodies that fit the schema of responses take long to make up: on demand.
QUICK = [
    (route, mode)
    for route in ROUTES
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if (route, mode) not in ((ROUTES[-1], GenerationMode.NEGATIVE), ("/v1/responses", GenerationMode.POSITIVE))
]
# What makes a request long is cut short: this is about what the server makes of it, not about the text.
SHORT = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "n": 1}


def drive(served: Running, route: str, mode: GenerationMode, examples: int) -> int:
    """Returns how many were answered with 200."""
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"})
    (operation,) = (found.ok() for found in schema.include(path=route).get_all_operations())
    fine = 0

    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def run(case: schemathesis.Case) -> None:
        nonlocal fine
        if isinstance(case.body, dict):
            for name in SHORT.keys() & case.body.keys():
                if isinstance(case.body[name], int) and case.body[name] > SHORT[name]:
                    case.body[name] = SHORT[name]
        answer = case.call(headers={"Authorization": f"Bearer {KEY}"}, timeout=30)
        case.validate_response(answer, checks=[not_a_server_error])
        fine += answer.status_code == 200

    run()
    return fine


@pytest.mark.parametrize(("route", "mode"), QUICK, ids=str)
def test_no_error_of_its_own(served: Running, route: str, mode: GenerationMode) -> None:
    drive(served, route, mode, 5)
    assert served.drained


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES[:-1])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.name)
def test_no_error_of_its_own_at_length(served: Running, route: str, mode: GenerationMode) -> None:
    fine = drive(served, route, mode, 600)
    assert fine > 0 or mode is GenerationMode.NEGATIVE
    assert served.drained
