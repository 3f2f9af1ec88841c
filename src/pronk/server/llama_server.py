"""The state of a server in the form of llama-server's ``/props`` and ``/slots``, read only.

A slot is a place for a request, which runs or waits: the server has ``limits.requests`` of them.
Neither paths of files nor texts of requests are shown.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from pronk import __version__
from pronk.server.errors import ApiError
from pronk.server.model_pool import PooledModel
from pronk.server.service import Service


def server_props(model: PooledModel) -> dict[str, Any]:
    """Return the reply of ``/props``: context, sampling defaults and chat template of a model.

    Raises:
        ApiError: the model is not loaded.
    """
    service = _loaded(model)
    llm = service.engine.llm
    return {
        "default_generation_settings": {
            "n_ctx": llm.config.context,
            "params": dict(model.details["sampling"]),
        },
        "total_slots": service.settings.limits.requests,
        "model_alias": model.name,
        "chat_template": llm.tokenizer.chat_template or "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"pronk-{__version__}",
        "is_sleeping": False,
    }


def server_slots(model: PooledModel) -> list[dict[str, Any]]:
    """Return the reply of ``/slots``: which slots are in use.

    Raises:
        ApiError: the model is not loaded.
    """
    service = _loaded(model)
    num_used = service.engine.num_requests
    context = service.engine.llm.config.context
    slots = list[dict[str, Any]]()
    for number in range(service.settings.limits.requests):
        is_processing = number < num_used
        slots.append({"id": number, "n_ctx": context, "is_processing": is_processing})
    return slots


def _loaded(model: PooledModel) -> Service:
    if model.service is None:
        msg = f"model: expected {model.name} to be loaded, found none; send it a request first"
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, msg, "model_not_loaded", "model")
    return model.service
