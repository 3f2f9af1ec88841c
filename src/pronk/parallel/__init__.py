"""One model in several processes: tree parallelism (branches of token trees) and tensor parallelism.

The *driver* is the process with the requests (rank 0); the other processes are *workers*.
"""
