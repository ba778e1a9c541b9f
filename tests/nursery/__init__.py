"""Python processes that begin with torch imported. A rank needs a core for four seconds to import it, and this suite starts two
hundred.

    tests                             nursery (one per session)            process (one per rank)
      start ──── what to run ───────>   torch imported, one thread
                                        fork ───────────────────────────>    environment, files and import path of its own;
                                        wait for its end                     runs the module as `python -u -m` does
            <─── exit status ────────                                        gone

What is imported ahead is torch, the testbed and what most ranks run here; neither Megatron nor Transformer Engine, so that a
process finds the releases that its own PYTHONPATH names. Ranks of a pool, and those of launches, come from a second nursery: a
process of the first with their environment, which has stood in for a GPU and imported the Megatron that they will use. Who goes
away without waiting for a process ends it, and all of them end with the tests.

All are batch processes to the scheduler: none that a message wakes takes the core from its sender, who still holds a lock that
gloo's other thread then waits for in a loop without sleep. Two ranks on two cores took 4.4 processor seconds, and take 3.2.
"""
