"""Predicted and measured figures of a run, by stage, reported after steps 1 and 2 and at the end.

measuring   seconds of a step and its passes; peaks of device memory
rows        joins the ranks of a stage, and scales predictions to the run's input
reporter    gathers, prints and writes the figures
"""
