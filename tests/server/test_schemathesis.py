"""Generated requests, valid and invalid: every one is answered, and none causes a server error."""

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
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/moderations",
    "/tokenize",
    "/detokenize",
    "/v1/models/{name}",
]
# Any name is valid in /v1/models/{name}, so the route has no invalid requests. Valid bodies of /v1/responses take long
# to generate, so only the slow test has them.
QUICK = [
    (route, mode)
    for route in ROUTES
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if (route, mode) not in ((ROUTES[-1], GenerationMode.NEGATIVE), ("/v1/responses", GenerationMode.POSITIVE))
]
# Upper bounds for fields that make a request slow.
SHORT = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "n": 1}


def drive(served: Running, route: str, mode: GenerationMode, examples: int) -> int:
    """Send generated requests to a route; return the number of answers with status 200."""
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
def test_generated_requests_cause_no_server_error(served: Running, route: str, mode: GenerationMode) -> None:
    drive(served, route, mode, 5)
    assert served.drained


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES[:-1])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.name)
def test_many_generated_requests_cause_no_server_error(served: Running, route: str, mode: GenerationMode) -> None:
    fine = drive(served, route, mode, 600)
    assert fine > 0 or mode is GenerationMode.NEGATIVE
    assert served.drained
