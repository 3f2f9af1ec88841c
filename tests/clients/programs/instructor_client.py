"""Use instructor in its modes; print what it returned."""

import json
import sys
from typing import Annotated, Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

url, key = sys.argv[1:]
api = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
asked = {"model": "tiny", "messages": [{"role": "user", "content": "How warm is it?"}]}
asked |= {"temperature": 0, "max_tokens": 200, "max_retries": 0}


class Report(BaseModel):
    """Weather of a city."""

    model_config = ConfigDict(extra="forbid")  # without it, the small model adds fields for ever
    city: Literal["Paris", "Oslo"]
    degrees: Annotated[int, Field(ge=-50, le=50)]


facts = {}
# These modes force the form of the answer; the others only ask for it in words.
for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"):
    client = instructor.from_openai(api, mode=getattr(instructor.Mode, mode))
    found, answer = client.create_with_completion(response_model=Report, **asked)
    assert isinstance(found, Report)
    facts[mode] = [found.city, found.degrees]
client = instructor.from_openai(api, mode=instructor.Mode.JSON_SCHEMA)
partial = client.create_partial(response_model=Report, **asked)
facts["partial"] = [each.model_dump() for each in partial]
json.dump(facts, sys.stdout)
