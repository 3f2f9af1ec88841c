"""Names of the model and of its adapters in requests."""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus

from pronk.errors import OptionError
from pronk.server.errors import ApiError

__all__ = ["ModelNames"]


class ModelNames:
    """Names in the field ``model`` of requests; the ending ``.gguf`` and capital letters do not count.

    Attributes:
        model: name of the model.
        all: names of the model and of its adapters.
    """

    def __init__(self, model: str, adapters: Collection[str]) -> None:
        """Collect the names; raise an OptionError if two are the same."""
        self.model, self.all = model, (model, *adapters)
        self._adapters = {_key(name): name for name in adapters}
        if len({_key(name) for name in self.all}) < len(self.all):
            msg = f"adapter: expected names other than the model's and each other's, found {', '.join(self.all)}"
            raise OptionError(msg)

    def adapter(self, name: str | None) -> str | None:
        """Return the adapter with a name; ``None``: the model itself, also without a name.

        Raises:
            ApiError: there is no such model.
        """
        if name is None or _key(name) == _key(self.model):
            return None
        if _key(name) not in self._adapters:
            message = f"model: expected {' or '.join(map(repr, self.all))}, found {name!r}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, "model_not_found", "model")
        return self._adapters[_key(name)]


def _key(name: str) -> str:
    """Return a model's name without the ending of its file and in small letters."""
    return name.casefold().removesuffix(".gguf")
