"""Former place of :mod:`pronk.lab.bench`, until 0.4."""
