"""One model in several processes: tree parallelism (branches of token trees) and tensor parallelism."""
