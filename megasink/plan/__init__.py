"""``megasink plan``: the memory, communication and time of a run, without its GPUs.

No formula of a model is used: the trainer itself is built and stepped on the hollow GPU
(`megasink.plan.hollow`), as one rank of the whole job, once for each different pipeline stage.

    launch.py       the command: checks, one helper process, the answer
    helper.py       the helper process on the hollow GPU: one fork for each rank
    rank.py         one rank: three steps of the trainer, measured
    batches.py      batches for the ranks, in place of data
    collectives.py  the communication of a step, by group and purpose
    memory.py       memory of a rank by part
    parameters.py   parameters of the model by component
    layers.py       the modules of each layer
    job.py          the whole job, from the ranks' records
    devices.py      peak rates and memory of GPUs
    show.py         the tables
"""
