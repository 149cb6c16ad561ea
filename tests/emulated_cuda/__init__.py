"""CUDA devices emulated on the host, so that what is for CUDA can run where there is no accelerator.

Four devices that share the host's memory. An operator runs at once, in the CPU's kernel, so results are those of the
CPU; what an accelerator would do *later* is kept as vector clocks. Each operator happens at a time of the stream that
is current; events, waits, ``record_stream``, synchronizations and copies between devices order these times as on CUDA.
From that follow, through PyTorch's own streams, events, autograd threads and generators:

- **races**: an operator that reads or writes what another stream has not been waited for, and memory that is handed out
  again while another stream may still use it; likewise copies to and from the same memory of the host. A race is an
  error in the operator, or fails the test when it is over;
- **synchronizations** of the host, counted and refused as ``torch.cuda.set_sync_debug_mode("error")`` does; what is
  copied to the host without one is there once the host has waited for it, and not a number before;
- **memory**: the allocator's counters of allocated, active and reserved bytes, and its blocks, with sizes rounded up as
  the caching allocator rounds them. What another stream may still use is not reused before the host has found out that
  it is done; the first product of a thread on a stream takes cuBLAS's 32 MiB, for good;
- **streams**: 32 of a device, then they are the same again; an event that the host has not waited for is not done when
  it is queried for the first time;
- **efficient attention**, whose seeds are on the host while the fake kernel says that they are on the device: others
  would end the process in the backward on a real device, and fail the test here;
- **captures** (``capturing``), which refuse to synchronize the host, and ``cudaHostUnregister`` that fails
  (``failing_unregistration``);
- tensors on different devices in one operator: an error, as on CUDA.

What it is not: it knows no other kernels of CUDA's (convolutions are the CPU's, nothing is known of what they allocate
for themselves), no Triton, so an eager stage stands in for Inductor, and no seconds, and it replays no captured graph.

Several processes, each with a device, communicate by ``nccl.py``.

``make emulated`` runs ``tests/gpu`` on it. ``device.cpp`` is loaded before torch is (``LD_PRELOAD``), which finds there
what a CUDA build would bring; ``cuda_module.py`` makes up for what a CPU build leaves out of ``torch.cuda``.
"""
