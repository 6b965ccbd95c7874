"""AAH-v3: from statistics (a float array) to a policy (an integer array).

Pure functions on small host arrays, and one object that keeps their state between steps.  Knows no model, no process
group and no attention code.
"""
