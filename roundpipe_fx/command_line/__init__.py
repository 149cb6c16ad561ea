"""The command line: ``python -m roundpipe_fx``, or ``roundpipe-fx`` where it is installed."""
