"""The only place that uses private torch APIs.

Tested with torch 2.11.0, 2.13.0 and 2.15.0. Everything else in the project uses documented interfaces, so changes of a
torch release are handled here. That PyTorch still has them is checked first, by the canary.

What each module offers to the other folders is in its ``__all__``, and a name of this package.
"""

from __future__ import annotations

import roundpipe_fx.torch_private.canary  # isort: split

from roundpipe_fx.torch_private.aot import *
from roundpipe_fx.torch_private.autograd import *
from roundpipe_fx.torch_private.compiling import *
from roundpipe_fx.torch_private.dynamo import *
from roundpipe_fx.torch_private.flags import *
from roundpipe_fx.torch_private.forks import *
from roundpipe_fx.torch_private.graph_operators import *
from roundpipe_fx.torch_private.memory_profile import *
from roundpipe_fx.torch_private.modes import *
from roundpipe_fx.torch_private.modules import *
from roundpipe_fx.torch_private.packed_tracing import *
from roundpipe_fx.torch_private.random_branches import *
from roundpipe_fx.torch_private.rare_collections import *
from roundpipe_fx.torch_private.recurrence import *
from roundpipe_fx.torch_private.sizes import *
from roundpipe_fx.torch_private.structured_trace import *
from roundpipe_fx.torch_private.tensor_classes import *
from roundpipe_fx.torch_private.torch_distributed import *
from roundpipe_fx.torch_private.tracing_patches import *
from roundpipe_fx.torch_private.tracing_retries import *
from roundpipe_fx.torch_private.trees import *
from roundpipe_fx.torch_private.users_exceptions import *
