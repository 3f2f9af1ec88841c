"""One model in several processes: tree parallelism (branches of token trees) and tensor parallelism.

The *driver* (rank 0) is the process that holds the requests. The other processes are its *workers*.
"""
