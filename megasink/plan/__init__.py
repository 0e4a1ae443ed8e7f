"""``megasink plan``: what a run of ``megasink train`` would take, without its GPUs.

Nothing is estimated from formulas of a model: the trainer itself is built and stepped on the hollow
GPU (`megasink.plan.hollow`), as one rank of the whole job, for as many pipeline stages as differ.

    launch.py       the command: checks, one helper process, the answer
    helper.py       the helper process on the hollow GPU: one fork for each rank
    rank.py         one rank: three steps of the trainer, and what they took
    batches.py      what the ranks read, in the place of data
    collectives.py  the communication of a step, by group and purpose
    memory.py       memory of a rank by part
    parameters.py   parameters of the model by component
    layers.py       the modules of each layer
    job.py          the ranks' records put together: the whole job
    devices.py      peak rates and memory of GPUs
    show.py         the tables
"""
