"""A run reports at steps 1, 2 and the end what its plan predicted and what was measured, stage by stage.

measuring   seconds of each step, and of its passes; the most that the device held
rows        the ranks of a stage together, beside what the plan predicts for what came
reporter    when what is measured, gathered, printed and written; the lines that are printed
"""
