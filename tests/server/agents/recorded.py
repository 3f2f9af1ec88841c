"""Bodies of agents and other clients; ``source`` in each names the public facts behind it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BODIES = Path(__file__).parent / "bodies"


@dataclass(frozen=True)
class Recorded:
    """A request of a client.

    Attributes:
        name: folder and name of its file.
        path: path and query of the URL.
        headers: headers that only this client sends.
        body: body of the request.
    """

    name: str
    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any] = field(repr=False)

    @property
    def route(self) -> str:
        """Path of the URL without the query."""
        return self.path.partition("?")[0]

    def functions(self) -> dict[str, Any]:
        """Map the names of functions that the client runs to their schemas.

        Functions may be in a namespace, and in an item of the input.
        """
        tools = [*self.body.get("tools", ())]
        for item in self.body.get("input", ()):
            if isinstance(item, dict):
                tools += item.get("tools", ())
        return dict(_functions(tools))


def _functions(tools: Any) -> Iterator[tuple[str, Any]]:
    for tool in tools:
        kind = tool.get("type")
        if kind == "namespace":
            yield from _functions(tool.get("tools", ()))
        elif kind == "function":
            function = tool.get("function", tool)
            yield function["name"], function.get("parameters") or {}
        elif kind in (None, "custom") and "input_schema" in tool:
            yield tool["name"], tool["input_schema"]


def load(path: Path) -> Recorded:
    """Return the request of a file; ``tools`` names a file with its tools."""
    read = json.loads(path.read_text(encoding="utf-8"))
    body = read["body"]
    if "tools" in read:
        tools = json.loads((BODIES / "tools" / f"{read['tools']}.json").read_text(encoding="utf-8"))
        body = {**body, "tools": tools}
    name = f"{path.parent.name}/{path.stem}"
    return Recorded(name, read["path"], read["headers"], body)


ALL = [load(path) for path in sorted(BODIES.glob("*/*.json")) if path.parent.name != "tools"]
