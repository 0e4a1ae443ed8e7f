"""``megasink plan``: the memory, communication and time of a run, without its GPUs.

No formula of a model is used: the trainer itself is built and stepped on the hollow GPU
(`hollow/`), as one rank of the whole job, once for each different pipeline stage.
"""
