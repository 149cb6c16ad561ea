"""The interface: ``compile``, the compiled module, the ``torch.compile`` backend, ``plan``."""
