"""Interfaces of other libraries: ``torch.utils.checkpoint``, RoundPipe, torchgpipe, RETURNN, rotor."""
