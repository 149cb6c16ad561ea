# the same work on the same shapes as stage_0.forward.py
