"""An OpenAI-compatible server; ``pip install 'pronk[serve]'`` brings what it needs.

A request's way: the guard lets it in (``guard``), its body becomes an ask (``protocol``), the service runs that on the
model's thread and hands back chunks or one body (``service``), and the app (``app``) puts them on the wire.
"""
