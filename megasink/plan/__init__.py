"""``megasink plan``: the memory, communication and time of a run, without its GPUs.

No formula of a model is used: the trainer itself is built and stepped on the hollow GPU
(`megasink.plan.hollow`), as one rank of the whole job, once for each different pipeline stage.

    launch.py       the command: checks, one helper process, the answer
    helper.py       the helper process on the hollow GPU: one fork for each rank
    rank.py         one rank: three steps of the trainer, and what they took
    batches.py      what the ranks read in place of data, and how tokens are routed
    collectives.py  the communication of a step, by group and purpose
    memory.py       memory of a rank by part
    parameters.py   parameters by component, and the modules of each layer
    job.py          the ranks' records put together: the whole job; rates and memory of GPUs
    show.py         the tables
"""
