"""JSON schemas of any draft, translated to schemas that llguidance follows exactly.

:func:`~pronk.sampling.json_schema.relax.relax` leaves out what a grammar cannot enforce, and reports it;
:func:`~pronk.sampling.json_schema.relax.check` refuses such schemas with an error that names path and keyword.
"""
