"""JSON schemas of any draft, translated to schemas that llguidance follows exactly.

For the arguments of a tool, :func:`~pronk.text.json_schema.relax.relax` leaves out the keywords
that a grammar cannot enforce, and reports them. For a guide,
:func:`~pronk.text.json_schema.relax.check` refuses a schema with such keywords.

1. :mod:`~pronk.text.json_schema.translation` rewrites each keyword, or records a fault. Keywords
   for numbers and strings are in :mod:`~pronk.text.json_schema.scalars`, those for arrays and
   objects in :mod:`~pronk.text.json_schema.members`.
2. If a keyword may be too complex or contradict another one, :mod:`~pronk.text.json_schema.trial`
   compiles the translated schema on trial, for a tokenizer of bytes. If llguidance refuses the
   schema, the innermost refused part loses one keyword, or else becomes any value.
"""
