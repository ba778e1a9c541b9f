"""A run says how it came out: at steps 1, 2 and the end, what its plan predicted and what was measured, stage by stage.

step_clock   seconds of each step, and of its passes, without waiting for the device
device_peak  the most that the device held
step_met     what came, where that was less than planned, and what predicted seconds come to for it
rank_figures what one rank measured, and the ranks of a stage together
reporter     when what is measured, gathered, printed and written
table        the lines that are printed
"""
