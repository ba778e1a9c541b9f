"""Python processes that begin with torch imported. A rank needs a core for four seconds to import it, and this suite starts two
hundred.

    tests                             nursery (one per session)            process (one per rank)
      start ──── what to run ───────>   torch imported, one thread
                                        fork ───────────────────────────>    environment, files and import path of its own;
                                        wait for its end                     runs the module as `python -u -m` does
            <─── exit status ────────                                        gone

What is imported ahead is torch, the testbed and what most ranks run here; neither Megatron nor Transformer Engine, so that a
process finds the releases that its own PYTHONPATH names. Who goes away without waiting for a process ends it, and all of them end
with the tests.

Ranks import Megatron, which takes them two seconds more. So they have a room of the nursery: a process for all ranks whose
environment is the same but for their number, with the stand-ins in place and with those releases imported that this environment
names. A room that nobody needs for a while ends.

    tests                             nursery                              room (one per environment)     rank
      which room? ──────────────────>   fork (the first time) ───────────>   stand-ins, Megatron imported
            <─── its socket, its pid
      start a rank ──────────────────────────────────────────────────────>   fork ──────────────────────>   as above
"""
