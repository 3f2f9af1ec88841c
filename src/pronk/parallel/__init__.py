"""One model in several processes: tree parallelism and tensor parallelism.

Tree parallelism divides the branches of token trees among processes that each have the whole model.
Tensor parallelism divides the model. The *driver* (rank 0) is the process that has the requests.
The other processes are its *workers*.
"""
