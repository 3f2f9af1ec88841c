"""HTTP server with the APIs of OpenAI and Anthropic; ``pip install pronk[serve]`` adds it.

A request passes four modules: ``guard`` checks its headers and reads its body, ``protocol``
validates the body, ``service`` runs it on the engine thread, and ``app`` sends the response.
"""

from pronk.base.lazy import export

__getattr__, __dir__, __all__ = export(__name__, __file__)
