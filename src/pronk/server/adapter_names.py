"""Names of a model and of its adapters in requests."""

from __future__ import annotations

from collections.abc import Collection

from pronk.errors import OptionError
from pronk.server.errors import unknown_model
from pronk.server.settings import model_key

__all__ = ["AdapterNames"]


class AdapterNames:
    """Names in the field ``model`` of requests for one model and its adapters.

    Names are compared in small letters, without the ending ``.gguf``.

    Attributes:
        model: name of the model.
        all: names of the model and of its adapters.
    """

    def __init__(self, model: str, adapters: Collection[str]) -> None:
        """Collect the names; raise an OptionError if two are the same."""
        self.model, self.all = model, (model, *adapters)
        self._adapters = {model_key(name): name for name in adapters}
        if len({model_key(name) for name in self.all}) < len(self.all):
            msg = f"adapter: expected names other than the model's and each other's, found {', '.join(self.all)}"
            raise OptionError(msg)

    def __contains__(self, name: str) -> bool:
        return model_key(name) == model_key(self.model) or model_key(name) in self._adapters

    def adapter(self, name: str | None) -> str | None:
        """Return the adapter with a name; ``None``: the model itself, also without a name.

        Raises:
            ApiError: there is no such model.
        """
        if name is None or model_key(name) == model_key(self.model):
            return None
        if model_key(name) not in self._adapters:
            raise unknown_model(name, *self.all)
        return self._adapters[model_key(name)]

    def shown_as(self, name: str | None) -> str:
        """Return the name of the model or adapter as the server's owner wrote it; errors: :meth:`adapter`."""
        return self.adapter(name) or self.model
