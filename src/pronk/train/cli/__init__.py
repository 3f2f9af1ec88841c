"""``pronk train``: one file per kind of drafter."""
