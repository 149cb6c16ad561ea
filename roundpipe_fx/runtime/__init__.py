"""The runtime: runs programs. It knows emitted code, not passes."""
