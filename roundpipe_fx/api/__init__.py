"""What a user calls: ``compile``, the compiled module, the ``torch.compile`` backend, ``plan``."""
