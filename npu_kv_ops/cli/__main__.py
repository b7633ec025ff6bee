"""`python -m npu_kv_ops.cli` is `npu-kv`."""

import sys

from . import main

sys.exit(main())
