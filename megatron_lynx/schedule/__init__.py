"""Pipeline schedules as data: the order of a stage's forwards and backwards, and the phase of each."""
