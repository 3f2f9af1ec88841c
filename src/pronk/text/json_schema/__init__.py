"""JSON schemas of any draft, translated to schemas that llguidance follows exactly.

A tool's schema is enforced as far as a grammar can: :func:`~pronk.text.json_schema.relax.relax`
leaves out the rest and reports it. :func:`~pronk.text.json_schema.relax.check` refuses such a
schema with path and keyword.

1. :mod:`~pronk.text.json_schema.translation` rewrites each keyword, or records a fault.
2. If a keyword may be too complex or contradict another one, :mod:`~pronk.text.json_schema.trial`
   compiles the schema for a tokenizer of bytes. If llguidance does not accept it, the innermost
   part that it does not accept loses one keyword, or else becomes any value.
"""
