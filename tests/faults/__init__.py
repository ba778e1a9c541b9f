"""Faults that are put into the package on purpose, one by one: does the suite see what it is there for? `make faults`.

    table/*.yaml     one entry a fault: the function, what is broken in it, why that matters, and the tests that must fail
    `table`          reads the entries
    `edit`           puts one into the source of a function: its text is found by name and by what it says, not by line
    `workplace`      a copy of this checkout: a fault is put into its files, so that whatever imports the package has it, ranks
                     and their children included; only the tests that the entry names are run there
    `session`        one session of pytest there, forked from a process that has torch
    `witness`        a plugin of pytest, which writes down how each of these tests ended
    `verdict`        found, not found, or failed for another reason than the entry says
    `__main__`       all of it, two faults side by side

Before any fault is put in, all named tests run in the copies as they are, and have to pass. An entry that says `equivalent` is
not run: it says why no test can see it.
"""
