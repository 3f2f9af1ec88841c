"""Former place of :mod:`pronk.server.replicas`, until 0.4."""
